"""How far a result may be from the float64 oracle.

    max error   <= 2 x that of eager attention in the same dtype + slack * max |oracle|
    mean error  <= 1.5 x that of eager attention + mean slack * mean |oracle|
    gain        <x, oracle> / <oracle, oracle> within 1e-3 of 1 (more only where eager is farther)

Slacks are epsilons of the result's dtype. The mean of fewer than FEW elements says no more than
their maximum, and eager attention may be exact there by luck: the mean is then not looked at, and
the maximum may also be what summation in another order costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FEW = 64
_GAIN = 1e-3
_SLACK = {  # of the maximum, of the mean
    torch.float64: (32.0, 8.0),
    torch.float32: (4.0, 1.0),
    torch.bfloat16: (1.0, 0.125),
    torch.float16: (1.0, 0.125),
}


@dataclass(frozen=True, slots=True)
class Errors:
    """Distance of a result from the oracle, over what the oracle has finite. gain is 1 at best."""

    largest: float
    mean: float
    gain: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """One result of an implementation.

    name: out, lse, dq, dk, dv, or d_ and the name of a captured tensor.
    errors: its own; allowed: the most they may be, gain as a distance from 1.
    problem: "" if it is within the budget, else what is wrong.
    """

    name: str
    shape: tuple[int, ...]
    errors: Errors
    allowed: Errors
    problem: str

    @property
    def passed(self) -> bool:
        return not self.problem


def judge(
    name: str, result: torch.Tensor, eager: torch.Tensor, oracle: torch.Tensor, summed: float = 1.0
) -> Verdict:
    """Compare a result with the oracle.

    Args:
        eager: the same result by eager attention in the dtype of the inputs.
        summed: how many terms an element sums up, for results of few elements.
    """
    finite = torch.isfinite(oracle)
    size = oracle[finite].abs()
    rough = _errors(eager, oracle, finite)
    mine = _errors(result, oracle, finite)
    allowed = _allowed(size, rough, result.dtype, summed)
    shape = tuple(result.shape)
    wrong = (torch.isfinite(result) != finite) | (~finite & (result.double() != oracle))
    if bool(wrong.any()):
        first = tuple(int(i) for i in wrong.nonzero()[0])
        problem = (
            f"{int(wrong.sum())} of {wrong.numel()} are not as finite as the oracle's, the first "
            f"at {list(first)}: {float(result[first])} instead of {float(oracle[first])}"
        )
        return Verdict(name, shape, mine, allowed, problem)
    found = [
        f"{what} {value:.2e} is above {limit:.2e}"
        for what, value, limit in (
            ("max error", mine.largest, allowed.largest),
            ("mean error", mine.mean, allowed.mean),
            ("distance of the gain from 1", abs(mine.gain - 1), allowed.gain),
        )
        if not value <= limit  # also true of NaN
    ]
    return Verdict(name, shape, mine, allowed, "; ".join(found))


def _errors(result: torch.Tensor, oracle: torch.Tensor, finite: torch.Tensor) -> Errors:
    x, y = result.double()[finite], oracle[finite]
    if not y.numel():
        return Errors(0.0, 0.0, 1.0)
    error = (x - y).abs()
    energy = float(y @ y)
    return Errors(float(error.max()), float(error.mean()), float(x @ y) / energy if energy else 1.0)


def _allowed(size: torch.Tensor, rough: Errors, dtype: torch.dtype, summed: float) -> Errors:
    if not size.numel():
        return Errors(0.0, 0.0, 0.0)
    eps = torch.finfo(dtype).eps
    of_max, of_mean = _SLACK[dtype]
    few = size.numel() < FEW
    if few:
        # Rounding errors of that many terms, added in any order, grow as the square root.
        of_max *= max(1.0, math.sqrt(summed))
    energy = float((size**2).sum())
    # Rounding of n alike elements moves the gain by about eps / sqrt(n).
    alike = energy**2 / float((size**4).sum()) if energy else 1.0
    return Errors(
        2 * rough.largest + of_max * eps * float(size.max()),
        math.inf if few else 1.5 * rough.mean + of_mean * eps * float(size.mean()),
        max(_GAIN, 2 * abs(rough.gain - 1)) + of_max * eps / math.sqrt(alike),
    )
