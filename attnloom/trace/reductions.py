"""Small reductions over captured rows: each becomes a `reduce` node, a short loop in the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from attnloom.errors import counted
from attnloom.ir.node import REDUCTION_AXES, Axes, DType
from attnloom.trace import elementwise
from attnloom.trace.context import Trace
from attnloom.trace.elementwise import Rule, map_arrays, op, to_bool, to_dtype
from attnloom.trace.indexing import getitem, permuted
from attnloom.trace.symbols import Array, Dim, Index

MAX_ELEMENTS = 256
_AXIS_NAMES = {axis: f"r{i}" for i, axis in enumerate(REDUCTION_AXES)}


def _vector(trace: Trace, value: Any) -> Array:
    array = trace.operand(value)
    if not isinstance(array, Array):
        raise trace.error(f"reduces {value!r}", "only rows of captured tensors can be reduced.")
    return array


def _reduce_one(trace: Trace, kind: str, array: Array, place: int) -> Array:
    """`array` without dimension `place`."""
    dim = array.dims[place]
    rest = array.dims[:place] + array.dims[place + 1 :]

    def at(index: Index) -> int:
        return _reduce_node(
            trace, kind, dim, lambda i: array.at((*index[:place], i, *index[place:]))
        )

    return Array(array.dtype, rest, at)


def _reduce_node(trace: Trace, kind: str, dim: Dim, element: Callable[[int], int]) -> int:
    builder = trace.builder
    if dim.source is None:
        return element(builder.const(0, DType.I64))
    for axis in REDUCTION_AXES:
        place = REDUCTION_AXES.index(axis)
        if place == len(builder.reductions):
            builder.reductions.append(dim.source)
        if builder.reductions[place] != dim.source:
            continue
        body = element(builder.input(_AXIS_NAMES[axis]))
        # A loop inside a loop needs an index of its own, even over the same row.
        if not _reduces_over(trace, body, axis):
            return builder.reduce(kind, axis, body)
    raise trace.error(
        f"reduces over more than {len(REDUCTION_AXES)} different rows",
        "kernels have four inner loops. Reduce what does not depend on traced values outside.",
    )


def _reduces_over(trace: Trace, node: int, axis: Axes) -> bool:
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        entry = trace.builder.nodes[current]
        if entry.op == "reduce" and entry.attr[1] is axis:  # type: ignore[index]
            return True
        pending += entry.args
    return False


def _reduce(trace: Trace, kind: str, array: Array, dim: Any, keepdim: bool) -> Array:
    rank = len(array.dims)
    if dim is None or (isinstance(dim, tuple | list) and not dim):
        chosen = list(range(rank))
    else:
        chosen = sorted({int(d) % rank for d in (dim if isinstance(dim, tuple | list) else (dim,))})
    trace.reads_sizes = trace.reads_sizes or bool(rank)
    count = math.prod(array.dims[d].length for d in chosen)
    if count > MAX_ELEMENTS:
        raise trace.error(
            f"reduces {counted(count, 'element')} (shape {list(array.shape)})",
            f"a reduction runs once a score and may have {MAX_ELEMENTS} elements at most. Reduce "
            "outside, or fold the sum into the query and key as extra head dimensions.",
        )
    if count == 0 and kind in ("min", "max"):
        raise trace.error(f"takes the {kind} of an empty row", "it has none.")
    for place in reversed(chosen):
        array = _reduce_one(trace, kind, array, place)
        if keepdim:
            array = _insert_dim(array, place)
    return array


def _insert_dim(array: Array, place: int) -> Array:
    dims = (*array.dims[:place], Dim(1), *array.dims[place:])
    return Array(array.dtype, dims, lambda i: array.at((*i[:place], *i[place + 1 :])))


def _cast_to(trace: Trace, array: Array, dtype: torch.dtype | None) -> Array:
    if dtype is not None:
        return to_dtype(trace, array, DType.of(dtype))
    return array if array.dtype.is_float else to_dtype(trace, array, DType.I64)


def reduce_sum(
    trace: Trace, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Array:
    return _reduce(trace, "sum", _cast_to(trace, _vector(trace, x), dtype), dim, keepdim)


def reduce_prod(
    trace: Trace, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Array:
    return _reduce(trace, "prod", _cast_to(trace, _vector(trace, x), dtype), dim, keepdim)


def reduce_mean(
    trace: Trace, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Array:
    array = _vector(trace, x)
    if not array.dtype.is_float and dtype is None:
        raise trace.error("takes the mean of integers", "cast with .float() first, as torch asks.")
    total = _reduce(trace, "sum", _cast_to(trace, array, dtype), dim, keepdim)
    kept = math.prod(total.shape) or 1
    count = Array.scalar(total.dtype, trace.number(math.prod(array.shape) // kept, total.dtype))
    return map_arrays(trace, op("div"), [total, count])


def _extreme(kind: str) -> Callable[..., Array]:
    def reduce_extreme(trace: Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Array:
        array = _vector(trace, x)
        if array.dtype is DType.BOOL:
            raise trace.error(f"takes the {kind} of bools", "use any() or all().")
        return _reduce(trace, kind, array, dim, keepdim)

    return reduce_extreme


amax, amin = _extreme("max"), _extreme("min")


def max_or_reduce(kind: str) -> Callable[..., Array]:
    """torch.max and torch.min: of two values elementwise, of one row over all elements."""

    def lower(trace: Trace, x: Any, *others: Any, **kwargs: Any) -> Array:
        other = kwargs.pop("other", others[0] if others else None)
        if isinstance(other, torch.Tensor) and not kwargs and len(others) <= 1:
            return elementwise.apply(trace, f"torch.{kind}", Rule(op(kind), "any"), x, other)
        if others or kwargs:
            raise trace.error(
                f"calls torch.{kind} with a dimension, which also returns indices",
                f"use torch.a{kind}(x, dim).",
            )
        return (amax if kind == "max" else amin)(trace, x)

    return lower


def _logical(kind: str) -> Callable[..., Array]:
    def reduce_logical(trace: Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Array:
        array = _vector(trace, x)
        result = _reduce(trace, kind, to_bool(trace, array), dim, keepdim)
        # torch keeps uint8, which once stood for bool.
        return to_dtype(trace, result, DType.U8) if array.dtype is DType.U8 else result

    return reduce_logical


reduce_any, reduce_all = _logical("any"), _logical("all")


def matmul(trace: Trace, x: Any, y: Any) -> Array:
    """`x @ y` of vectors and matrices: the products summed over the shared dimension."""
    a, b = _vector(trace, x), _vector(trace, y)
    if not (1 <= len(a.dims) <= 2 and 1 <= len(b.dims) <= 2):
        raise trace.error(
            f"multiplies shapes {list(a.shape)} and {list(b.shape)} as matrices",
            "use `*` for scalars; `@` takes vectors and matrices.",
        )
    if a.dims[-1].length != b.dims[0].length:
        raise trace.error(
            f"multiplies shapes {list(a.shape)} and {list(b.shape)} as matrices",
            "the shared dimension must agree.",
        )
    if a.dtype is not b.dtype:
        raise trace.error(
            f"multiplies {a.dtype.torch} by {b.dtype.torch} with `@`", "cast one of them."
        )
    if len(b.dims) == 2:
        b = permuted(b, [1, 0])
        if len(a.dims) == 2:
            a = getitem(trace, a, (slice(None), None))
    product = map_arrays(trace, op("mul"), [a, b])
    return _reduce(trace, "sum", product, -1, False)
