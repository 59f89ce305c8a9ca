"""Every operation, compiled, against the interpreter; with edge values in the lanes."""

from __future__ import annotations

import math
import platform

import pytest
import torch

from attnloom.ir.builder import Builder
from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType, TensorSpec
from attnloom.ir.ops import OPS
from tests.compiler.fragment_driver import Driver, Shape

INT_TYPES = (DType.U8, DType.I8, DType.I16, DType.I32, DType.I64)
FLOAT_ONLY = frozenset(
    "div exp exp2 expm1 log log2 log1p sqrt rsqrt sin cos tan asin acos atan atan2 sinh cosh tanh"
    " asinh acosh atanh sigmoid erf erfc reciprocal isnan isinf isfinite copysign".split()
)
INT_ONLY = frozenset("and or xor not shl shr".split())
NUMBER_OPS = [name for name in OPS if name not in ("cast", "where")]
EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -3.5, 1e-3, 88.0, -104.0, 1e30, math.inf, -math.inf)
SHAPE = Shape(1, 1, 8, 40)


def float_values(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(40 - len(EDGES) - 1, generator=generator, dtype=torch.float64) * 3
    return torch.tensor([*EDGES, math.nan, *drawn.tolist()], dtype=dtype)


def int_values(dtype: DType) -> torch.Tensor:
    info = torch.iinfo(dtype.torch)
    low, high = max(info.min, -(2**20)), min(info.max, 2**20)
    edges = [low, high, 0, 1, 2, 3, 7, 8, 63, 64, 100]
    edges += [] if dtype is DType.U8 else [-1, -2, -3, -7, -8, -64, -100]
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(low, high, (40 - len(edges),), generator=generator).tolist()
    return torch.tensor([*edges, *drawn], dtype=dtype.torch)


def binary_program(op: str, dtype: DType, real: DType, scalar: bool):
    """score * 0 + op(a[kv], c[q]) (op(a[q], c[q]) if scalar), as a float."""
    build = Builder([TensorSpec(dtype.torch, 1), TensorSpec(dtype.torch, 1)])
    q, kv = build.input("q"), build.input("kv")
    operands = [build.load(0, q if scalar else kv), build.load(1, q)]
    value = build.node(op, *operands[: OPS[op].arity])
    return build.finish(build.cast(value, real))


def check(driver: Driver, number: int, bound: BoundProgram, tolerance: float, why: str) -> None:
    score = torch.zeros(SHAPE.B, SHAPE.H, SHAPE.Q_LEN, SHAPE.KV_LEN, dtype=driver.real)
    got, overflow = driver.score(number, bound, score, SHAPE)
    (want,) = interpret(bound, SHAPE.positions() | {"score": score})
    want = want.expand_as(got).to(driver.real)
    assert not overflow, why
    same = (got == want) | (got.isnan() & want.isnan())
    close = (got - want).abs() <= tolerance * want.abs() + tolerance * 1e-2
    bad = ~(same | close)
    assert not bad.any(), f"{why}: {got[bad][:5].tolist()} instead of {want[bad][:5].tolist()}"


@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize("scalar", [False, True])
def test_float_operations(real: str, scalar: bool) -> None:
    dtype = DType.F64 if real == "double" else DType.F32
    names = [name for name in NUMBER_OPS if name not in INT_ONLY]
    programs = [binary_program(name, dtype, dtype, scalar) for name in names]
    driver = Driver("score", programs, real=real)
    values = float_values(dtype.torch)
    other = torch.tensor([1.5, -2.0, 0.0, 3.0, math.inf, 0.25, -1.0, 7.0], dtype=dtype.torch)
    tolerance = 2e-15 if real == "double" else 1e-6
    for number, (name, program) in enumerate(zip(names, programs, strict=True)):
        check(driver, number, BoundProgram(program, (values, other)), tolerance, name)


# Scalars have 64 bits whatever the lanes have.
@pytest.mark.parametrize(
    ("real", "wide", "scalar"),
    [
        ("float", False, False),
        ("float", True, False),
        ("double", False, False),
        ("float", False, True),
        ("double", False, True),
    ],
)
def test_integer_operations(real: str, wide: bool, scalar: bool) -> None:
    out = DType.F64 if real == "double" else DType.F32
    names = [n for n in NUMBER_OPS if n not in FLOAT_ONLY]
    cases = [(name, dtype) for name in names for dtype in INT_TYPES]
    programs = [binary_program(name, dtype, out, scalar) for name, dtype in cases]
    driver = Driver("score", programs, real=real, wide_ints=wide)
    for number, ((name, dtype), program) in enumerate(zip(cases, programs, strict=True)):
        values, small = int_values(dtype), [3, 1, 0, 2, 5, 9, 7, 12]
        if name in ("mul", "pow", "shl") and dtype in (DType.I32, DType.I64):
            values = values % (
                4 if name == "pow" else 8
            )  # stays within the 29 bits that narrow lanes allow for
        elif dtype is not DType.U8 and name not in ("pow", "shl"):
            small = [3, -1, 0, 2, -5, 9, 7, -12]
        other = torch.tensor(small, dtype=dtype.torch)
        check(driver, number, BoundProgram(program, (values, other)), 0, f"{name} {dtype}")


def test_boolean_operations() -> None:
    names = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not")
    cases = [(op, scalar) for op in names for scalar in (False, True)]
    programs = [binary_program(op, DType.BOOL, DType.F32, scalar) for op, scalar in cases]
    driver = Driver("score", programs)
    values = torch.tensor([True, False, False, True] * 10)
    other = torch.tensor([True, False] * 4)
    for number, (case, program) in enumerate(zip(cases, programs, strict=True)):
        check(driver, number, BoundProgram(program, (values, other)), 0, str(case))


@pytest.mark.parametrize("real,wide", [("float", False), ("float", True), ("double", False)])
def test_casts_and_where(real: str, wide: bool) -> None:
    out = DType.F64 if real == "double" else DType.F32
    types = (DType.BOOL, *INT_TYPES, DType.F32, DType.F64)
    cases = [(a, b) for a in types for b in types]
    programs = []
    for source, target in cases:
        build = Builder([TensorSpec(source.torch, 1), TensorSpec(torch.bool, 1)])
        q, kv = build.input("q"), build.input("kv")
        vector, scalar = (build.cast(build.load(0, at), target) for at in (kv, q))
        chosen = build.node("where", build.load(1, kv), vector, scalar)
        chosen = build.node("where", build.load(1, q), vector, chosen)
        programs.append(build.finish(build.cast(chosen, out)))
    driver = Driver("score", programs, real=real, wide_ints=wide)
    flags = torch.arange(40) % 3 == 0
    for number, ((source, target), program) in enumerate(zip(cases, programs, strict=True)):
        if source.is_float:
            values = torch.linspace(-100, 100, 40, dtype=source.torch)
            values = values.abs() if target is DType.U8 else values
        elif source is DType.BOOL:
            values = torch.arange(40) % 2 == 0
        else:
            values = int_values(source)
        check(driver, number, BoundProgram(program, (values, flags)), 0, f"{source} to {target}")


def test_constants_of_every_kind() -> None:
    values = [0.1, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3.4e38, 1e300, 2**53 + 1]
    programs = []
    for value in values:
        build = Builder()
        score = build.input("score")
        dtype = DType.I64 if isinstance(value, int) else DType.F32
        constant = build.cast(build.const(value, dtype), DType.F32)
        programs.append(build.finish(build.node("add", score, constant)))
    driver = Driver("score", programs)
    for number, program in enumerate(programs):
        check(driver, number, BoundProgram(program), 0, str(values[number]))


@pytest.mark.parametrize("target", [("-mavx2", "-mfma"), ("-msse2",)], ids=["avx2", "baseline"])
def test_narrower_vectors(target: tuple[str, ...]) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("flags of x86")
    names = ["tanh", "exp", "log", "sin", "floor", "erf", "sqrt", "mod", "sigmoid"]
    programs = [binary_program(name, DType.F32, DType.F32, False) for name in names]
    driver = Driver("score", programs, target=target)
    other = torch.tensor([1.5, -2.0, 0.0, 3.0, math.inf, 0.25, -1.0, 7.0])
    for number, (name, program) in enumerate(zip(names, programs, strict=True)):
        check(
            driver, number, BoundProgram(program, (float_values(torch.float32), other)), 1e-6, name
        )
