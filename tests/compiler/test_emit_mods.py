"""The table of mods as users write them, compiled: values, masks and gradients."""

from __future__ import annotations

import functools

import pytest
import torch

from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType
from attnloom.ir.passes.simplify import simplify
from attnloom.trace.tracer import trace_mask, trace_score
from tests.compiler import trace_masks, trace_rows, trace_scores  # noqa: F401  fill the table
from tests.compiler.fragment_driver import Driver, Shape
from tests.compiler.trace_table import KV_LEN, MASK_MODS, Q_LEN, SCORE_MODS, B, H

SHAPE = Shape(B, H, Q_LEN, KV_LEN)
CPU = torch.device("cpu")
SCORES, MASKS = list(SCORE_MODS), list(MASK_MODS)


def draw(seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, H, Q_LEN, KV_LEN, generator=generator, dtype=torch.float64).to(dtype)


@functools.cache
def score_programs(real: DType) -> list[BoundProgram]:
    bounds = [trace_score(SCORE_MODS[name](), real, CPU) for name in SCORES]
    return [BoundProgram(simplify(b.program, False), b.tensors, b.numbers) for b in bounds]


@functools.cache
def score_driver(kind: str, real: str, wide: bool = False) -> Driver:
    bounds = score_programs(DType.F64 if real == "double" else DType.F32)
    return Driver(kind, [b.program for b in bounds], real=real, wide_ints=wide)


@functools.cache
def mask_programs() -> tuple[list[BoundProgram], Driver]:
    bounds = [trace_mask(MASK_MODS[name](), CPU) for name in MASKS]
    return bounds, Driver("mask", [b.program for b in bounds])


@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str) -> None:
    bounds, driver = mask_programs()
    number = MASKS.index(name)
    got, overflow = driver.mask(number, bounds[number], SHAPE)
    (want,) = interpret(bounds[number], SHAPE.positions())
    assert not overflow
    assert torch.equal(got, want.expand_as(got))


@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize("name", SCORES)
def test_score(name: str, real: str) -> None:
    driver = score_driver("score", real)
    number = SCORES.index(name)
    bound = score_programs(DType.F64 if real == "double" else DType.F32)[number]
    score = draw(7, driver.real)
    got, overflow = driver.score(number, bound, score, SHAPE)
    if name == "powers" and real == "float":  # 2 ** kv, where padded lanes reach kv = 31
        assert overflow
        driver = score_driver("score", real, wide=True)
        got, overflow = driver.score(number, bound, score, SHAPE)
    (want,) = interpret(bound, SHAPE.positions() | {"score": score})
    assert not overflow
    want = want.expand_as(got).to(driver.real)
    # F32 parts of a double program are computed in float, as torch does.
    torch.testing.assert_close(got, want, rtol=5e-6, atol=1e-6, equal_nan=True)


# torch cannot differentiate floor_divide, which division_modes calls.
@pytest.mark.parametrize("name", [name for name in SCORES if name != "division_modes"])
def test_gradient(name: str) -> None:
    driver = score_driver("grad", "float")
    number = SCORES.index(name)
    bound = score_programs(DType.F32)[number]
    specs = bound.program.tensors
    leaves = tuple(
        t.detach().double().requires_grad_() if s.requires_grad else t
        for t, s in zip(bound.tensors, specs, strict=True)
    )
    score = draw(7, torch.float64).requires_grad_()
    (out,) = interpret(
        BoundProgram(bound.program, leaves, bound.numbers),
        SHAPE.positions() | {"score": score},
        float64=True,
    )
    dscore, live = draw(8, torch.float64), draw(9, torch.float64) > -0.5
    out = out.expand(B, H, Q_LEN, KV_LEN)
    inputs = [score, *(t for t in leaves if t.is_leaf and t.requires_grad)]
    want: list[torch.Tensor | None] = [None] * len(inputs)
    if out.requires_grad:
        weights = torch.where(live, dscore, 0.0)
        kept = torch.where(live & out.isfinite(), out, 0.0)
        want = list(torch.autograd.grad((kept * weights).sum(), inputs, allow_unused=True))
    live &= out.isfinite()

    got, grads, _ = driver.grad(number, bound, score.detach(), dscore, live, SHAPE)
    expected = torch.zeros_like(score) if want[0] is None else want[0]
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
    slots = [i for i, s in enumerate(specs) if s.requires_grad]
    for slot, gradient in zip(slots, want[1:], strict=True):
        assert gradient is not None
        torch.testing.assert_close(grads[slot].double(), gradient, rtol=2e-5, atol=2e-5)
