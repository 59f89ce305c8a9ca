"""Types promote as torch promotes 0-d tensors and Python numbers, and values follow."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnloom.errors import TraceError
from attnloom.ir.interpret import interpret
from attnloom.ir.node import DType
from attnloom.trace.tracer import trace_score

CPU = torch.device("cpu")
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
]
NUMBERS = [True, 2, 2.5]
UNARY: list[Callable[[Any], Any]] = [
    operator.neg, operator.invert, abs, torch.sign, torch.floor, torch.exp, torch.sqrt,
    torch.square, torch.relu, torch.isnan, torch.logical_not, torch.reciprocal, torch.sigmoid,
    torch.round,
    torch.nn.functional.silu, torch.nn.functional.gelu, torch.nn.functional.softplus,
    lambda x: x**2, lambda x: x**0.5, lambda x: x**0, lambda x: x << 1, lambda x: x >> 1,
    lambda x: torch.clamp(x, 0, 1), lambda x: torch.clamp(x, max=0.5), lambda x: 2**x,
    lambda x: 2 - x,
    lambda x: torch.zeros_like(x), lambda x: torch.where(x > 0, 1, 0), lambda x: x.sum(),
    lambda x: torch.where(x > 0, 1.5, 0), lambda x: torch.where(x > 0, True, False),
    lambda x: torch.where(x != 0, x, 1), torch.trunc, torch.frac, torch.log10, torch.prod,
    torch.nn.functional.leaky_relu, lambda x: x.any(), lambda x: torch.nan_to_num(x),
    lambda x: torch.masked_fill(x, x > 0, 3),
]  # fmt: skip
BINARY: list[Callable[[Any, Any], Any]] = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.and_, operator.or_, operator.xor, operator.eq, operator.lt, operator.ge, operator.pow,
    lambda x, y: torch.where(torch.tensor(True), x, y), lambda x, y: torch.add(x, y, alpha=2),
    torch.fmod, torch.atan2, torch.logical_and, torch.hypot, torch.maximum, torch.lerp,
    lambda x, y: torch.div(x, y, rounding_mode="trunc"), torch.copysign, torch.logaddexp,
    torch.xlogy, lambda x, y: torch.clamp(x, min=y), torch.bitwise_left_shift,
]  # fmt: skip


def _traced(function: Callable[..., Any], *operands: Any) -> tuple[torch.dtype, torch.Tensor]:
    """Type and value of `function` when its tensors are loaded by a traced index."""
    seen: list[torch.dtype] = []

    def mod(score, b, h, q, kv):
        loaded = [x.reshape(1)[b] if isinstance(x, torch.Tensor) else x for x in operands]
        result = function(*loaded)
        seen.append(result.dtype)
        return torch.where(q >= 0, result.double(), 0.0)

    bound = trace_score(mod, DType.F64, CPU)
    (value,) = interpret(bound, {name: torch.zeros(1, dtype=torch.int64) for name in ("b", "q")})
    return seen[0], value.reshape(())


def _compare(function: Callable[..., Any], *operands: Any) -> None:
    shown = [x if not isinstance(x, torch.Tensor) else x.dtype for x in operands]
    try:
        expected = function(*operands)
    except (RuntimeError, TypeError, NotImplementedError):
        return  # what torch refuses may be refused or not
    try:
        dtype, value = _traced(function, *operands)
    except TraceError as error:
        # A few functions of bools, to which torch gives a meaning, are refused with advice.
        assert "on a bool" in str(error)
        assert torch.bool in shown
        return
    assert dtype is expected.dtype, f"{shown}: {dtype} instead of {expected.dtype}"
    message = lambda text: f"{shown}: {text}"
    wanted = expected.double()
    torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-6, equal_nan=True, msg=message)


@pytest.mark.parametrize("function", UNARY)
def test_unary_types(function: Callable[[Any], Any]) -> None:
    for dtype, value in itertools.product(DTYPES, (1, 3)):
        _compare(function, torch.tensor(value).to(dtype))


@pytest.mark.parametrize("function", BINARY)
def test_binary_types(function: Callable[[Any, Any], Any]) -> None:
    tensors = [torch.tensor(3).to(dtype) for dtype in DTYPES]
    for x, y in itertools.product(tensors, [*tensors, *NUMBERS]):
        _compare(function, x, y)
        if not isinstance(y, torch.Tensor):
            _compare(function, y, x)


def test_half_captures_are_float32() -> None:
    """Kernels widen half-precision loads; the types of traced values say so."""
    for dtype in (torch.float16, torch.bfloat16):
        seen, value = _traced(lambda x: x + 1, torch.tensor(1.5, dtype=dtype))
        assert seen is torch.float32
        assert value == 2.5


def test_vectors_outrank_scalars() -> None:
    """torch: a vector's type wins over a scalar's of the same kind."""
    row, scalar = torch.ones(1, 3), torch.ones(1, dtype=torch.float64)
    seen: list[torch.dtype] = []

    def mod(score, b, h, q, kv):
        seen.extend(
            [(row[b] * scalar[b]).dtype, (row[b] * score).dtype, (row[b].long() * 1.5).dtype]
        )
        return (row[b] * scalar[b]).sum()

    trace_score(mod, DType.F32, CPU)
    assert seen == [torch.float32, torch.float32, torch.float32]


def test_default_dtype_decides_for_numbers() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        for function in (
            lambda x: x / 2,
            lambda x: x * 1.5,
            lambda x: torch.where(x > 0, 1.0, 0.0),
        ):
            assert _traced(function, torch.tensor(3))[0] is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_questions_about_types_and_shapes() -> None:
    table = torch.ones(2, 3, dtype=torch.float16)

    def mod(score, b, h, q, kv):
        assert isinstance(q, torch.Tensor)
        assert q.dtype is torch.int64
        assert score.dtype is torch.float32
        assert q.shape == ()
        assert q.ndim == q.dim() == 0
        assert q.numel() == 1
        assert score.is_floating_point()
        assert not torch.is_floating_point(q)
        assert not torch.is_complex(q)
        assert score.device == CPU
        assert not q.is_cuda
        row = table[h]
        assert row.shape == (3,)
        assert row.size(0) == len(row) == row.shape[-1] == 3
        assert table.shape == (2, 3)
        assert repr(q) == "<traced int64>"
        assert f"{row}" == "<traced float32 [3]>"
        return score * torch.finfo(score.dtype).eps

    assert trace_score(mod, DType.F32, CPU).numbers == (torch.finfo(torch.float32).eps,)


def test_gradients_flow_to_captures() -> None:
    """Host functions of a parameter run under autograd; loads are differentiable."""
    slope = torch.nn.Parameter(torch.tensor([0.5, 0.25]))

    def mod(score, b, h, q, kv):
        return score * torch.exp(slope)[h] + slope[h]

    bound = trace_score(mod, DType.F32, CPU)
    assert [t.requires_grad for t in bound.program.tensors] == [True, True]
    inputs = {"b": torch.zeros(1).long(), "h": torch.ones(1).long(), "score": torch.full((1,), 2.0)}
    interpret(bound, inputs)[0].sum().backward()
    expected = torch.tensor([0.0, 2 * torch.tensor(0.25).exp() + 1])
    torch.testing.assert_close(slope.grad, expected)


def test_a_detached_position_is_no_error() -> None:
    """detach() of what carries no gradient changes nothing."""
    mod = lambda s, b, h, q, kv: s + q.detach()
    assert trace_score(mod, DType.F32, CPU).program.outputs
    learned = torch.ones(2, requires_grad=True)
    with pytest.raises(TraceError, match="detaches a value that carries a gradient"):
        trace_score(lambda s, b, h, q, kv: s + learned[h].detach(), DType.F32, CPU)
    with torch.no_grad():
        trace_score(lambda s, b, h, q, kv: s + learned[h].detach(), DType.F32, CPU)
