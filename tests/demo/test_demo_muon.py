"""The demo's optimiser of matrices."""

import pytest
import torch

from attnloom.demo import muon

SHAPES = [(24, 24), (24, 40), (40, 24)]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_directions_are_equally_long(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    matrix = left @ torch.diag(torch.linspace(0.1, 3, 24)) @ right
    turned = muon.orthogonalise(matrix, dtype).float()
    assert turned.shape == matrix.shape
    stretched = left.T @ turned @ right.T  # [24, 24], diagonal: directions stay
    assert (stretched - torch.diag(stretched.diag())).abs().max() < 0.05
    assert stretched.diag().min() > 0.65 and stretched.diag().max() < 1.25


def test_a_matrix_of_zeros_stays() -> None:
    assert not muon.orthogonalise(torch.zeros(3, 5), torch.float32).any()


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_are_those_of_torch(shape: tuple[int, int], dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(muon, "_bfloat16_is_fast", lambda: dtype is torch.bfloat16)
    generator = torch.Generator().manual_seed(6)
    start = torch.randn(shape, generator=generator)
    mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimisers = (
        muon.Muon([mine], lr=0.01),
        torch.optim.Muon([theirs], 0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        mine.grad = theirs.grad = torch.randn(shape, generator=generator)
        for optimiser in optimisers:
            optimiser.step()
    apart = (mine - theirs).norm() / (theirs - start).norm()
    assert apart < 0.03
