"""Muon: the update of a matrix is its momentum with all singular values brought near 1.

torch.optim.Muon multiplies in bfloat16 on every processor. Without instructions for it that is some
forty times slower than float32, and most of a training step here; this one asks first.

Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon (the iteration and its coefficients);
Liu et al. 2025, arXiv:2502.16982, sec. 2.2 (the size of an update).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

# An odd polynomial in the singular values, steep at 0; applied five times, it takes all from 0.003
# to 1 of the norm to between 0.68 and 1.21.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_LEAST_NORM = 1e-7
_ADAM_RMS = 0.2  # of an update, whatever the matrix's shape: learning rates of AdamW fit


class Muon(torch.optim.Optimizer):
    """For matrices inside layers; no weight decay, Nesterov momentum."""

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})
        self._dtype = torch.bfloat16 if _bfloat16_is_fast() else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, matrix.grad, group["lr"], group["momentum"])

    def _update(self, matrix: torch.Tensor, grad: torch.Tensor, lr: float, momentum: float) -> None:
        state = self.state[matrix]
        average = state.setdefault("average", torch.zeros_like(matrix))
        average.lerp_(grad, 1 - momentum)
        direction = orthogonalise(grad.lerp(average, momentum), self._dtype)
        matrix.sub_(direction, alpha=lr * _ADAM_RMS * math.sqrt(max(matrix.shape)))


def orthogonalise(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [R, C] with singular values near 1; products are computed in dtype."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalise(matrix.T, dtype).T
    x = (matrix / matrix.norm().clamp(min=_LEAST_NORM)).to(dtype)
    for _ in range(_ITERATIONS):
        gram = x @ x.T  # [R, R], the smaller side
        higher = torch.addmm(gram, gram, gram, beta=_CUBIC, alpha=_QUINTIC)
        x = torch.addmm(x, higher, x, beta=_LINEAR)
    return x


def _bfloat16_is_fast() -> bool:
    # The question by which torch itself hands such products to oneDNN; its own are scalar.
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
