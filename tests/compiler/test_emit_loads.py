"""Captured tensors in generated code: types, strides, bounds, and how gradients leave a tile."""

from __future__ import annotations

import pytest
import torch

from attnloom.ir.builder import Builder
from attnloom.ir.interpret import interpret
from attnloom.ir.node import Axes, BoundProgram, DType, Program, TensorSpec
from tests.compiler.fragment_driver import Driver, Shape

SHAPE = Shape(2, 2, 5, 37)
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def index_program(index, rank: int, dtype: torch.dtype = torch.float32) -> Program:
    """score + tensor[index(build)]."""
    build = Builder([TensorSpec(dtype, rank, dtype.is_floating_point)])
    loaded = build.cast(build.load(0, *index(build)), DType.F32)
    return build.finish(build.node("add", build.input("score"), loaded))


def kv(build: Builder, offset: int = 0) -> int:
    return build.node("add", build.input("kv"), build.const(offset, DType.I64))


def difference(build: Builder, reach: int) -> int:
    """q - kv + reach"""
    d = build.node("sub", build.input("q"), build.input("kv"))
    return build.node("add", d, build.const(reach, DType.I64))


def looked_up(build: Builder) -> int:
    """A position that follows no pattern: (kv * 7 + q) % 11."""
    seven = build.node("mul", build.input("kv"), build.const(7, DType.I64))
    total = build.node("add", seven, build.input("q"))
    return build.node("mod", total, build.const(11, DType.I64))


def check_score(driver: Driver, number: int, bound: BoundProgram, why: object) -> None:
    score = values((SHAPE.B, SHAPE.H, SHAPE.Q_LEN, SHAPE.KV_LEN), seed=5)
    got, overflow = driver.score(number, bound, score, SHAPE)
    (want,) = interpret(bound, SHAPE.positions() | {"score": score})
    assert not overflow, why
    torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=1e-6, msg=str(why))


# name: index, and shapes of the tensor that make it fit, overrun at either end, or empty.
INDICES = {
    "kv": (lambda b: (kv(b),), [(37,), (64,), (20,), (1,), (0,)]),
    "kv - 40": (lambda b: (kv(b, -40),), [(37,), (64,), (3,)]),
    "q - kv + 20": (lambda b: (difference(b, 20),), [(64,), (10,)]),
    "h, kv": (lambda b: (b.input("h"), kv(b)), [(2, 37), (1, 37), (2, 5), (0, 37)]),
    "kv, h": (lambda b: (kv(b), b.input("h")), [(37, 2), (10, 2)]),
    "kv, kv": (lambda b: (kv(b), kv(b, 1)), [(38, 38), (8, 8)]),
    "lookup": (lambda b: (looked_up(b),), [(11,), (4,), (0,)]),
    "lookup, kv, b": (lambda b: (looked_up(b), kv(b), b.input("b")), [(11, 37, 2), (3, 4, 1)]),
    "b, h, q, kv": (lambda b: tuple(b.input(n) for n in ("b", "h", "q", "kv")), [(2, 2, 5, 37)]),
    "none": (lambda _: (), [()]),
}


@pytest.mark.parametrize("wide", [False, True])
def test_indices_inside_and_outside(wide: bool) -> None:
    programs = [index_program(make, len(shapes[0])) for make, shapes in INDICES.values()]
    driver = Driver("score", programs, wide_ints=wide)
    for number, (name, (_, shapes)) in enumerate(INDICES.items()):
        for shape in shapes:
            bound = BoundProgram(programs[number], (values(shape),))
            check_score(driver, number, bound, (name, shape))


def test_nothing_outside_is_read() -> None:
    """The element before and after the tensor is NaN, which would show."""
    programs = [index_program(make, 1) for make, _ in (INDICES["kv - 40"], INDICES["q - kv + 20"])]
    driver = Driver("score", programs)
    for number, program in enumerate(programs):
        for size in (1, 7, 20, 37):
            memory = torch.full((size + 200,), torch.nan)
            memory[100 : 100 + size] = values((size,))
            bound = BoundProgram(program, (memory[100 : 100 + size],))
            check_score(driver, number, bound, size)


@pytest.mark.parametrize("real,wide", [("float", False), ("float", True), ("double", False)])
def test_storage_types(real: str, wide: bool) -> None:
    """Along the keys, looked up, and the same for every key."""
    makes = (
        lambda b: (kv(b),),
        lambda b: (difference(b, 20),),
        lambda b: (looked_up(b),),
        lambda b: (b.input("q"),),
    )
    cases = [(dtype, make) for dtype in DTYPES for make in makes]
    programs = []
    for dtype, make in cases:
        build = Builder([TensorSpec(dtype, 1)])
        out = DType.F64 if real == "double" else DType.F32
        programs.append(build.finish(build.cast(build.load(0, *make(build)), out)))
    driver = Driver("score", programs, real=real, wide_ints=wide)
    score = torch.zeros(SHAPE.B, SHAPE.H, SHAPE.Q_LEN, SHAPE.KV_LEN)
    for number, (dtype, _) in enumerate(cases):
        tensor = values((40,), dtype)
        if dtype is torch.float16:
            tensor[:6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 6e-8, -1e-5, 65504.0])
        bound = BoundProgram(programs[number], (tensor,))
        got, overflow = driver.score(number, bound, score, SHAPE)
        (want,) = interpret(bound, SHAPE.positions())
        assert not overflow
        torch.testing.assert_close(
            got, want.expand_as(got).to(driver.real), rtol=0, atol=0, equal_nan=True
        )


def test_strides() -> None:
    names = ("h, kv", "kv, h", "lookup, kv, b")
    programs = [index_program(INDICES[n][0], len(INDICES[n][1][0])) for n in names]
    driver = Driver("score", programs)
    views = (
        (0, values((37, 2)).T),
        (0, values((2, 74))[:, ::2]),
        (0, values((1, 37)).expand(2, 37)),
        (0, values((2, 1)).expand(2, 37)),
        (1, values((2, 37)).T),
        (1, values((37, 4))[:, 1::2]),
        (2, values((2, 11, 37)).permute(1, 2, 0)),
    )
    for number, view in views:
        check_score(driver, number, BoundProgram(programs[number], (view,)), view.stride())


def test_large_integers_are_reported_by_narrow_lanes_only() -> None:
    build = Builder([TensorSpec(torch.int64, 1)])
    along = build.finish(build.node("eq", build.load(0, kv(build)), build.const(5, DType.I64)))
    build = Builder([TensorSpec(torch.int32, 1)])
    row = build.finish(
        build.node("eq", build.load(0, build.input("q")), build.cast(kv(build), DType.I32))
    )
    narrow, wide = (Driver("mask", [along, row], wide_ints=w) for w in (False, True))
    for number, (program, dtype) in enumerate(((along, torch.int64), (row, torch.int32))):
        for value, is_large in (
            (2**29 - 1, False),
            (-(2**29), False),
            (2**29, True),
            (-(2**30), True),
        ):
            tensor = torch.full((40,), value, dtype=dtype)
            tensor[3] = 5
            bound = BoundProgram(program, (tensor,))
            (want,) = interpret(bound, SHAPE.positions())
            for driver, expected in ((narrow, is_large), (wide, False)):
                got, overflow = driver.mask(number, bound, SHAPE)
                assert overflow == expected
                if not overflow:
                    assert torch.equal(got, want.expand_as(got))


def check_gradient(driver: Driver, number: int, bound: BoundProgram, why: object) -> None:
    """Every live lane's share arrives once; dead lanes hold NaN and add nothing."""
    full = (SHAPE.B, SHAPE.H, SHAPE.Q_LEN, SHAPE.KV_LEN)
    score, dscore = values(full, torch.float64, 5), values(full, torch.float64, 6)
    live = values(full, torch.float64, 7) > 0
    leaves = [
        t.double().clone().requires_grad_() if s.requires_grad else t
        for t, s in zip(bound.tensors, bound.program.tensors, strict=True)
    ]
    tracked = BoundProgram(bound.program, tuple(leaves), bound.numbers)
    score.requires_grad_()
    (out,) = interpret(tracked, SHAPE.positions() | {"score": score}, float64=True)
    (out.expand(full) * torch.where(live, dscore, 0.0)).sum().backward()
    got, grads, _ = driver.grad(
        number,
        bound,
        torch.where(live, score.detach(), torch.nan),
        torch.where(live, dscore, torch.nan),
        live,
        SHAPE,
    )
    torch.testing.assert_close(got.double(), score.grad, rtol=1e-5, atol=1e-5, msg=str(why))
    for slot, grad in grads.items():
        want = leaves[slot].grad
        want = torch.zeros_like(leaves[slot]) if want is None else want  # never loaded
        torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=2e-5, msg=str(why))


def test_gradients_of_every_kind_of_index() -> None:
    names = [name for name in INDICES if INDICES[name][1][0] is not None]
    programs = [index_program(INDICES[n][0], len(INDICES[n][1][0])) for n in names]
    driver = Driver("grad", programs)
    for number, name in enumerate(names):
        for shape in INDICES[name][1]:
            if 0 in shape:
                continue
            check_gradient(driver, number, BoundProgram(programs[number], (values(shape),)), name)
        first = INDICES[name][1][0]
        if len(first) == 2:
            view = values(first[::-1]).T
            check_gradient(driver, number, BoundProgram(programs[number], (view,)), name)


def reduction_program(kind: str, nested: bool) -> Program:
    """score * reduce over r of a[h, r] * score + b[q, r] (and over a second axis, c[r, s])."""
    tensors = [TensorSpec(torch.float32, 2, True)] * 3
    build = Builder(tensors, (), [(0, 1), (2, 1)])
    r, s = build.input("r0"), build.input("r1")
    score = build.input("score")
    term = build.node("mul", build.load(0, build.input("h"), r), score)
    term = build.node("add", term, build.load(1, build.input("q"), r))
    if nested:
        inner = build.node("mul", build.load(2, r, s), term)
        term = build.reduce("sum", Axes.R1, inner)
    return build.finish(build.node("mul", score, build.reduce(kind, Axes.R0, term)))


def test_reductions_and_their_gradients() -> None:
    cases = [(k, n) for k in ("sum", "max", "min", "prod") for n in (False, True)]
    programs = [reduction_program(*case) for case in cases]
    scores, grads = Driver("score", programs), Driver("grad", programs)
    for number, case in enumerate(cases):
        tensors = (values((2, 3)), values((5, 3), seed=1), values((3, 4), seed=2))
        bound = BoundProgram(programs[number], tensors)
        check_score(scores, number, bound, case)
        check_gradient(grads, number, bound, case)


def test_reduction_longer_than_the_register_sums() -> None:
    program = reduction_program("sum", False)
    tensors = (values((2, 300)), values((5, 300), seed=1), values((300, 1), seed=2))
    check_gradient(Driver("grad", [program]), 0, BoundProgram(program, tensors), "300 steps")


def test_reductions_over_nothing() -> None:
    programs = []
    for kind in ("sum", "prod", "max", "min"):
        build = Builder([TensorSpec(torch.float32, 2)], (), [(0, 1)])
        row = build.load(0, build.input("kv"), build.input("r0"))
        total = build.reduce(kind, Axes.R0, row)
        programs.append(build.finish(build.node("add", build.input("score"), total)))
    driver = Driver("score", programs)
    for number, program in enumerate(programs):
        check_score(driver, number, BoundProgram(program, (torch.empty(3, 0),)), number)
