"""The one helper that asserts: an implementation against the float64 oracle, by error budget.

Every result (out, lse, max_scores, dq, dk, dv, each captured gradient) must satisfy

    max error   <= 2 x that of eager attention in the same dtype + slack * max |oracle|
    mean error  <= 1.5 x that of eager attention + mean slack * mean |oracle|
    gain        <x, oracle> / <oracle, oracle> within 1e-3 of 1 (more only where eager is farther)

where the slacks are those of SLACK in epsilons of the result's own dtype: one rounding in half
precision; in float32 what another order of summation does; in float64 also what the oracle rounds.
Gradients subtract rowsum(out * dout), whose rounding is relative to what cancels there and not to
what is left (nothing, for a row of one key), hence their own. The oracle itself adds a captured
gradient one score at a time, which in float64 is the larger error of the two (long double agrees
with the kernels): its slack there grows with the root of the number of scores.
An error of eager attention in a tensor of few elements may be small by luck, and those of captured
gradients are such tensors: below FEW elements, the largest error of several draws counts, and the
mean, which says no more than the maximum there, is not looked at.

Kernels round probabilities and gradients of scores before the products that out, dq, dk and dv are:
once for a whole row of what they are multiplied by. Where few rows hold nearly all of a result, a
query that sees one key say, those few roundings are a gain, of half an epsilon at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from tests.harness.case import Case, Problem, draw_problem
from tests.harness.implementations import (
    Implementation,
    eager,
    fresh_memory_is_nan,
    one_thread,
    oracle,
)

FEW = 64
EXTRA_DRAWS = 3
GAIN_TOLERANCE = 1e-3
SLACK = {  # of the maximum, of the mean
    torch.float64: (32, 8),
    torch.float32: (4, 1),
    torch.bfloat16: (1, 1 / 8),
    torch.float16: (1, 1 / 8),
}
GRADIENT_SLACK = SLACK | {torch.float64: (32, 16), torch.float32: (32, 16)}
OUTPUTS = ("out", "lse", "max_scores")
PRODUCTS = ("out", "dq", "dk", "dv")  # of probabilities, or gradients of scores, and rows
Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Errors:
    """How far a result is from the oracle, over the elements that the oracle has finite."""

    largest: float
    mean: float
    gain: float


@dataclass(frozen=True)
class Budget:
    """The most that each error of a result may be; gain is the distance from 1."""

    largest: float
    mean: float
    gain: float


def check_attention(case: Case, implementation: Implementation, *, backward: bool = True) -> None:
    """Assert that an implementation is as accurate on a case as the budget asks.

    Args:
        case: the problem; inputs are drawn in its dtype, and upcast for the oracle.
        implementation: Problem -> (out, lse, max_scores or None).
        backward: whether to check gradients of query, key, value and learnable captures.
    """
    problem = draw_problem(case)
    with one_thread():
        truth = run(problem.copy(torch.float64), oracle, backward)
        allowed = _eager_errors(case, problem, truth, backward)
    with fresh_memory_is_nan():
        mine = run(problem.copy(), implementation, backward)
    s = case.sizes
    num_scores = s.B * s.Hq * s.Q_LEN * s.KV_LEN
    problems = []
    for name, result in mine.items():
        dtype = _expected_dtype(name, problem)
        problems += _violations(name, result, truth[name], allowed[name], dtype, num_scores)
    assert not problems, "\n  ".join([f"{case}: outside the error budget", *problems])


def run(problem: Problem, implementation: Implementation, backward: bool) -> Results:
    """Outputs and gradients of one implementation by name."""
    with torch.set_grad_enabled(backward):
        out, lse, max_scores = implementation(problem)
    results = {"out": out.detach(), "lse": lse.detach()}
    if max_scores is not None:
        results["max_scores"] = max_scores.detach()
    if backward:
        leaves = problem.leaves
        loss = [(out, problem.dout.to(out.dtype))]
        if problem.dlse is not None:
            reached = torch.isfinite(lse.detach())
            loss.append((lse, torch.where(reached, problem.dlse, 0.0).to(lse.dtype)))
        tensors, weights = zip(*[pair for pair in loss if pair[0].requires_grad], strict=True)
        grads = torch.autograd.grad(tensors, list(leaves.values()), weights, allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            results[name] = torch.zeros_like(leaf) if grad is None else grad
    return results


def _eager_errors(
    case: Case, problem: Problem, truth: Results, backward: bool
) -> dict[str, Errors]:
    rough = run(problem.copy(), eager, backward)
    found = {name: _errors(rough[name], truth[name]) for name in truth}
    few = [name for name, x in truth.items() if 0 < x.numel() < FEW]
    for seed in range(1, EXTRA_DRAWS + 1) if few else ():
        other = draw_problem(case.with_seed(case.seed + 1000 * seed))
        exact = run(other.copy(torch.float64), oracle, backward)
        inexact = run(other, eager, backward)
        for name in few:
            found[name] = _worst(found[name], _errors(inexact[name], exact[name]))
    return found


def _expected_dtype(name: str, problem: Problem) -> torch.dtype:
    if name in ("lse", "max_scores"):
        wide = problem.query.dtype == torch.float64
        return torch.float64 if wide else torch.float32
    return problem.dout.dtype if name == "out" else problem.leaves[name].dtype


def _errors(result: torch.Tensor, truth: torch.Tensor) -> Errors:
    finite = torch.isfinite(truth)
    x, y = result.double()[finite], truth[finite]
    if not y.numel():
        return Errors(0.0, 0.0, 1.0)
    error = (x - y).abs()
    energy = float(y @ y)
    gain = float(x @ y) / energy if energy else 1.0
    return Errors(float(error.max()), float(error.mean()), gain)


def _worst(one: Errors, other: Errors) -> Errors:
    gain = max(one.gain, other.gain, key=lambda g: abs(g - 1))
    return Errors(max(one.largest, other.largest), max(one.mean, other.mean), gain)


def _violations(
    name: str,
    result: torch.Tensor,
    truth: torch.Tensor,
    rough: Errors,
    dtype: torch.dtype,
    num_scores: int,
) -> list[str]:
    if result.dtype != dtype or result.shape != truth.shape:
        got = f"{result.dtype} {list(result.shape)}"
        return [f"{name}: is {got}, must be {dtype} {list(truth.shape)}"]
    finite = torch.isfinite(truth)
    wrong = (torch.isfinite(result) != finite) | (~finite & (result.double() != truth))
    if bool(wrong.any()):
        first = tuple(int(i) for i in wrong.nonzero()[0])
        count = f"{int(wrong.sum())} of {wrong.numel()}"
        return [f"{name}: {count} not as finite as the oracle, first at {first}: "
                f"{float(result[first])} instead of {float(truth[first])}"]  # fmt: skip
    slack = (SLACK if name in OUTPUTS else GRADIENT_SLACK)[dtype]
    if dtype == torch.float64 and name.startswith("d_"):
        slack = tuple(s + math.sqrt(num_scores) for s in slack)
    budget = _budget(truth[finite], rough, slack, torch.finfo(dtype).eps)
    if name in PRODUCTS:
        budget = replace(budget, gain=budget.gain + _gain_of_rows(truth, torch.finfo(dtype).eps))
    mine = _errors(result, truth)
    found = []
    for what, value, limit in (
        ("max error", mine.largest, budget.largest),
        ("mean error", mine.mean, budget.mean),
        ("distance of gain from 1", abs(mine.gain - 1), budget.gain),
    ):
        if not value <= limit:  # also true of NaN
            found.append(f"{name}: {what} {value:.3e} passes {limit:.3e}")
    return found


def _budget(truth: torch.Tensor, rough: Errors, slack: tuple[float, float], eps: float) -> Budget:
    if not truth.numel():
        return Budget(0.0, 0.0, 0.0)
    size = truth.abs()
    of_max, of_mean = slack
    energy = float((size**2).sum())
    mean = 1.5 * rough.mean + of_mean * eps * float(size.mean())
    gain = max(GAIN_TOLERANCE, 2 * abs(rough.gain - 1))
    if truth.numel() < FEW and energy:
        # A few gradients through a saturated tanh are all rounding, eager's in other draws too.
        gain = max(gain, 2 * rough.largest / float(size.max()))
    return Budget(
        largest=2 * rough.largest + of_max * eps * float(size.max()),
        mean=mean if truth.numel() >= FEW else math.inf,
        gain=gain + eps / math.sqrt(_alike(size**2)),
    )


def _alike(energies: torch.Tensor) -> float:
    """How many alike ones would have the sum, and the sum of squares, of these. Rounding of n alike
    elements moves the gain by about eps / sqrt(n)."""
    total = float(energies.sum())
    return total**2 / float((energies**2).sum()) if total else 1.0


def _gain_of_rows(truth: torch.Tensor, eps: float) -> float:
    return eps * min(0.5, 1 / math.sqrt(_alike((truth**2).sum(-1)))) if truth.numel() else 0.0
