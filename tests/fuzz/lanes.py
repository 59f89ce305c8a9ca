"""A program's value at many scores: called directly, and traced and interpreted, in two precisions.

Where the two precisions differ, a rounding decides the value (a score just at a threshold, the sine
of a large number); `noise` measures that, so that comparisons allow for it and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attnloom.backends.reference import evaluate_lanes
from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType
from attnloom.trace.tracer import trace_mask, trace_score
from tests.fuzz.programs import FuzzProgram
from tests.harness.draw import Draw, Sizes
from tests.harness.table import Captures

_CPU = torch.device("cpu")
Mod = Callable[..., Any]
Lanes = dict[str, torch.Tensor]


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    """Inside, `position * 0.5` is float64, as everything else in a float64 run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def lanes(sizes: Sizes, seed: int, count: int) -> Lanes:
    """`count` random scores of a problem, all of them if there are fewer."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.B, sizes.Hq, sizes.Q_LEN, sizes.KV_LEN)
    total = sizes.B * sizes.Hq * sizes.Q_LEN * sizes.KV_LEN
    flat = torch.arange(total)
    if total > count:
        flat = flat[torch.randperm(total, generator=generator)[:count]]
    positions = dict(zip(("b", "h", "q", "kv"), torch.unravel_index(flat, shape), strict=True))
    return {"score": torch.randn(len(flat), generator=generator), **positions}


def doubled(captures: Captures) -> Captures:
    return {k: v.double() if v.is_floating_point() else v for k, v in captures.items()}


@dataclass(frozen=True)
class Values:
    """One mod at some lanes. direct: by calling it; traced: by interpreting `bound`."""

    direct: torch.Tensor
    traced: torch.Tensor
    bound: BoundProgram


def values(kind: str, mod: Mod | None, at: Lanes) -> Values:
    """Both values, in the precision of `at["score"]`."""
    assert mod is not None
    if kind == "mask":
        bound = trace_mask(mod, _CPU)
        direct = evaluate_lanes(mod, at["b"], at["h"], at["q"], at["kv"])
    else:
        wide = at["score"].dtype is torch.float64
        bound = trace_score(mod, DType.F64 if wide else DType.F32, _CPU)
        direct = evaluate_lanes(mod, at["score"], at["b"], at["h"], at["q"], at["kv"])
        direct = direct.to(at["score"].dtype)
    traced = interpret(bound, at)[0].expand(at["score"].shape)
    return Values(direct.detach(), traced.detach(), bound)


@dataclass(frozen=True)
class Precisions:
    """One mod at some lanes in float32 and float64, and how far roundings move it."""

    single: Values
    double: Values

    @property
    def noise(self) -> torch.Tensor:
        pairs = (
            (self.single.direct, self.double.direct),
            (self.single.traced, self.double.traced),
        )
        found = [distance(x, y) for x, y in pairs]
        return torch.maximum(*found)


def precisions(
    kind: str, program: FuzzProgram, captures: Captures, at: Lanes, binding: int = 0
) -> Precisions:
    """The score_mod or mask_mod of a program in both precisions."""
    which = kind == "mask"
    single = values(kind, program.build(captures, binding)[which], at)
    with double_by_default():
        wide = at | {"score": at["score"].double()}
        double = values(kind, program.build(doubled(captures), binding)[which], wide)
    return Precisions(single, double)


def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """|x - y|; 0 for equal infinities and two NaN, infinite where only one is a number."""
    x, y = x.double(), y.double()
    same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=torch.inf)


def assert_equal(
    what: str,
    got: torch.Tensor,
    expected: torch.Tensor,
    at: Lanes,
    tolerance: float,
    noise: torch.Tensor | float = 0.0,
) -> None:
    """Equal up to `tolerance` relative to 1 + |expected|, and 16 times the noise of the lane."""
    off = distance(got, expected)
    size = expected.double().abs().nan_to_num(posinf=0.0)
    wrong = off > tolerance * (1 + size) + 16 * noise
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        where = {name: x.flatten()[first].item() for name, x in at.items()}
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first at {where}: "
            f"{got[first].item()!r} instead of {expected[first].item()!r}"
        )


def draw_captures(program: FuzzProgram, sizes: Sizes, seed: int) -> Captures:
    return program.draw(sizes, Draw(seed, torch.float32))
