"""How far a result may be from the float64 oracle.

    max error   <= 2 x that of eager attention in the same dtype + slack * max |oracle|
    mean error  <= 1.5 x that of eager attention + mean slack * mean |oracle|
    gain        <x, oracle> / <oracle, oracle> within 1e-3 of 1 (more only where eager is farther)

Probabilities and gradients of scores are rounded before the products that out, dq, dk and dv are,
once for a whole row of them: where few rows hold nearly all of a result, that is a gain, of half an
epsilon at most.

Slacks are epsilons of the result's dtype. The mean of fewer than FEW elements says no more than
their maximum, and eager attention may be exact there by luck: the mean is then not looked at, and
the maximum may also be what summation in another order costs.

A sum whose terms cancel is as inexact as its terms are large, however small it is itself: for
gradients of captured tensors the errors above may also be

    (slack * epsilon + float32's epsilon * sqrt(terms)) * size

where size is the root of the sum of the squares of the terms (`eager.py` measures it). Where the
oracle's own value is smaller than that, a gain says nothing and there is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

FEW = 64
_GAIN = 1e-3
_PRODUCTS = ("out", "dq", "dk", "dv")  # of probabilities, or gradients of scores, and rows
_SLACK = {  # of the maximum, of the mean
    torch.float64: (32.0, 8.0),
    torch.float32: (4.0, 1.0),
    torch.bfloat16: (1.0, 0.125),
    torch.float16: (1.0, 0.125),
}


@dataclass(frozen=True, slots=True)
class Errors:
    """Distance of a result from the oracle, over what the oracle has finite. gain is 1 at best, and
    NaN where the oracle is so small that it is rounding itself."""

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


@dataclass(frozen=True, slots=True)
class Terms:
    """What an element of a result sums up.

    number: how many terms, on average. size: root of the sum of their squares, in the result's
        shape; None where it is not known. dtype: in which they are computed.
    """

    number: float = 1.0
    size: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32

    def noise(self) -> tuple[float, float]:
        """What rounding of the terms may cost an element: at most, and in the mean."""
        if self.size is None or not self.size.numel():
            return 0.0, 0.0
        of_max, of_mean = _SLACK[self.dtype]
        summing = min(torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps)
        one, all_of_them = torch.finfo(self.dtype).eps, summing * math.sqrt(max(1.0, self.number))
        size = self.size.double()
        return (
            (of_max * one + all_of_them) * float(size.max()),
            (of_mean * one + all_of_them) * float(size.mean()),
        )


def judge(
    name: str,
    result: torch.Tensor,
    eager: torch.Tensor,
    oracle: torch.Tensor,
    terms: Terms = Terms(),
) -> Verdict:
    """Compare a result with the oracle.

    Args:
        eager: the same result by eager attention in the dtype of the inputs.
        terms: what an element sums up, for results of few elements and sums that cancel.
    """
    finite = torch.isfinite(oracle)
    size = oracle[finite].abs()
    rough = _errors(eager, oracle, finite)
    mine = _errors(result, oracle, finite)
    allowed = _allowed(size, rough, result.dtype, terms)
    if name in _PRODUCTS:
        allowed = replace(allowed, gain=allowed.gain + _gain_of_rows(oracle, result.dtype))
    if math.isinf(allowed.gain):
        mine = replace(mine, gain=math.nan)
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
        if not value <= limit and not math.isinf(limit)  # also true of NaN
    ]
    return Verdict(name, shape, mine, allowed, "; ".join(found))


def _errors(result: torch.Tensor, oracle: torch.Tensor, finite: torch.Tensor) -> Errors:
    x, y = result.double()[finite], oracle[finite]
    if not y.numel():
        return Errors(0.0, 0.0, 1.0)
    error = (x - y).abs()
    energy = float(y @ y)
    return Errors(float(error.max()), float(error.mean()), float(x @ y) / energy if energy else 1.0)


def _allowed(size: torch.Tensor, rough: Errors, dtype: torch.dtype, terms: Terms) -> Errors:
    if not size.numel():
        return Errors(0.0, 0.0, 0.0)
    eps = torch.finfo(dtype).eps
    of_max, of_mean = _SLACK[dtype]
    few = size.numel() < FEW
    if few:
        # Rounding errors of that many terms, added in any order, grow as the square root.
        of_max *= max(1.0, math.sqrt(terms.number))
    energy = float((size**2).sum())
    noise, mean_noise = terms.noise()
    lost = noise / math.sqrt(energy) if energy else math.inf if noise else 0.0
    gain = max(_GAIN, 2 * abs(rough.gain - 1)) + lost
    gain += of_max * eps / math.sqrt(_alike(size**2))
    return Errors(
        2 * rough.largest + max(noise, of_max * eps * float(size.max())),
        math.inf if few else 1.5 * rough.mean + max(mean_noise, of_mean * eps * float(size.mean())),
        math.inf if lost > 1 else gain,
    )


def _alike(energies: torch.Tensor) -> float:
    """How many alike ones would have the sum, and the sum of squares, of these. Rounding of n alike
    elements moves the gain by about eps / sqrt(n)."""
    total = float(energies.sum())
    return total**2 / float((energies**2).sum()) if total else 1.0


def _gain_of_rows(oracle: torch.Tensor, dtype: torch.dtype) -> float:
    """What one rounding for each row moves the gain by."""
    if not oracle.numel():
        return 0.0
    rows = _alike(torch.where(torch.isfinite(oracle), oracle, 0.0).square().sum(-1))
    return torch.finfo(dtype).eps * min(0.5, 1 / math.sqrt(rows))
