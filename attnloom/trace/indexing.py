"""Indexing of captured tensors and traced vectors: `t[i, j]`, chained, gather and its kin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnloom.errors import counted
from attnloom.ir.node import DType
from attnloom.trace.context import Trace
from attnloom.trace.symbols import Array, Dim, Index, NumberProxy, Symbol, plain_number

_OUTSIDE = "do this part of the indexing outside the mod and capture the result."


@dataclass(frozen=True, slots=True)
class _Axis:
    """How a dimension of the source is read: at `node`, or along dimension `out` of the result."""

    node: int | None = None
    out: int | None = None


def getitem(trace: Trace, base: Any, key: Any) -> Array:
    """`base[key]`, where base or key is traced: torch's basic indexing."""
    items = list(key) if isinstance(key, tuple) else [key]
    base, items = _host_slices(trace, base, items)
    array = trace.operand(base)
    assert isinstance(array, Array)
    items = _expand(trace, array, items)
    axes: list[_Axis] = []
    dims: list[Dim] = []
    for item in items:
        if item is None:
            dims.append(Dim(1))
            continue
        dim = array.dims[len(axes)]
        if isinstance(item, slice):
            if item != slice(None):
                raise trace.error(f"takes {_show(item)} of a traced row", _OUTSIDE)
            axes.append(_Axis(out=len(dims)))
            dims.append(dim)
        else:
            axes.append(_Axis(node=_index_node(trace, item, dim, len(axes))))

    def at(index: Index) -> int:
        return array.at(tuple(index[a.out] if a.node is None else a.node for a in axes))  # type: ignore[index]

    return Array(array.dtype, tuple(dims), at)


def _host_slices(trace: Trace, base: Any, items: list[Any]) -> tuple[Any, list[Any]]:
    """Slices such as `t[:, 1:5]` of a captured tensor are taken before the kernel runs."""
    partial = [i for i in items if isinstance(i, slice) and i != slice(None)]
    ends = [end for i in partial for end in (i.start, i.stop, i.step)]
    if any(type(end) is Symbol for end in ends):
        raise trace.error(
            "slices a tensor from or to a traced position",
            "how long a slice is must be known before the call. Sum over a range by two elements "
            "of a captured running sum, sums[stop] - sums[start]; take one element by an index.",
        )
    if not partial or type(base) is Symbol:
        return base, items
    trace.reads_host = True
    items = _expand_rank(trace, base.dim(), items)
    key = tuple(i if isinstance(i, slice) else slice(None) for i in items if i is not None)
    return base[key], [slice(None) if isinstance(i, slice) else i for i in items]


def _expand(trace: Trace, array: Array, items: list[Any]) -> list[Any]:
    return _expand_rank(trace, len(array.dims), items)


def _expand_rank(trace: Trace, rank: int, items: list[Any]) -> list[Any]:
    """One item for each dimension, plus Nones for new ones."""
    given = sum(i is not None and i is not Ellipsis for i in items)
    if given > rank:
        raise trace.error(
            f"indexes a tensor of {counted(rank, 'dimension')} with {counted(given, 'index')}",
            "use one index for each dimension at most.",
        )
    fill = [slice(None)] * (rank - given)
    dots = [place for place, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1:
        raise trace.error("uses `...` twice in one index", "torch allows one.")
    place = dots[0] if dots else len(items)
    return items[:place] + fill + items[place + len(dots) :]


def _index_node(trace: Trace, item: Any, dim: Dim, place: int) -> int:
    """The node of one index; Python numbers are checked against the length now."""
    if hasattr(item, "dtype") and not isinstance(item, torch.Tensor):
        item = item.item()  # a numpy scalar
    if not isinstance(item, torch.Tensor | int) or isinstance(item, bool):
        raise trace.error(f"indexes dimension {place} with {_show(item)}", _OUTSIDE)
    value = trace.operand(item)
    if not isinstance(value, Array):
        _check_number(trace, value, dim, place)
        return trace.number(value, DType.I64)
    if value.dims:
        raise trace.error(
            f"indexes dimension {place} with a tensor of shape {list(value.shape)}",
            f"an index must be a number or a scalar; {_OUTSIDE}",
        )
    if value.dtype.is_float:
        raise trace.error(
            f"indexes dimension {place} with a {_name(value.dtype)}",
            "indices must be integers. Use .long(), after torch.floor or torch.round if meant.",
        )
    if value.dtype in (DType.BOOL, DType.U8):
        raise trace.error(
            f"indexes dimension {place} with a {_name(value.dtype)}",
            "torch reads bool and uint8 indices as masks. Use .long() to index by value.",
        )
    return value.at()


def _check_number(trace: Trace, value: NumberProxy | int | float, dim: Dim, place: int) -> None:
    plain = plain_number(value)
    trace.reads_sizes = True
    if not -dim.length <= plain < dim.length:
        raise trace.error(
            f"indexes dimension {place} of length {dim.length} with {plain}",
            f"valid are {-dim.length} to {dim.length - 1}.",
        )


def check_host_index(trace: Trace, base: torch.Tensor, key: Any) -> None:
    """Raises the TraceError of `base[key]`, which torch refused: too many indices, or one that is a
    number out of range. Keys of other kinds are left to torch's own words."""
    items = _expand_rank(trace, base.dim(), list(key) if isinstance(key, tuple) else [key])
    if any(isinstance(item, bool | torch.Tensor | list) for item in items):
        return
    for place, item in enumerate(item for item in items if item is not None):
        if isinstance(item, int):
            _check_number(trace, item, Dim(base.size(place)), place)


def select(trace: Trace, base: Any, dim: int, index: Any) -> Array:
    """torch.select: `index` along `dim`."""
    rank = len(trace.operand(base).dims)  # type: ignore[union-attr]
    return getitem(trace, base, (*[slice(None)] * (dim % max(rank, 1)), index))


def index_select(trace: Trace, base: Any, dim: int, index: Any) -> Array:
    """torch.index_select by one traced index: a dimension of length 1 stays."""
    rank = len(trace.operand(base).dims)  # type: ignore[union-attr]
    return getitem(trace, base, (*[slice(None)] * (dim % max(rank, 1)), None, index))


def gather(trace: Trace, base: Any, dim: int, index: Any) -> Array:
    """torch.gather on one row by one traced index."""
    row = trace.operand(base)
    if not isinstance(row, Array) or len(row.dims) != 1 or dim not in (0, -1):
        raise trace.error(
            "calls torch.gather on more than a row", "index it: t[i, j] reads one element."
        )
    return getitem(trace, base, index)


def take(trace: Trace, base: Any, index: Any) -> Array:
    """torch.take: an index into the flattened tensor."""
    if type(base) is not Symbol and base.dim() != 1:
        trace.reads_host = True
        base = base.reshape(-1)
    return getitem(trace, base, index)


def embedding(trace: Trace, index: Any, weight: Any, *args: Any, **kwargs: Any) -> Array:
    """torch.nn.functional.embedding: a row of `weight`. padding_idx only changes its gradient."""
    defaults = {"padding_idx": None, "max_norm": None, "norm_type": 2.0}
    extra = dict(zip(defaults, args, strict=False)) | kwargs
    for name, default in defaults.items():
        if name != "norm_type" and extra.get(name, default) is not default:
            raise trace.error(
                f"calls embedding with {name}", "apply it to the table outside the mod."
            )
    return getitem(trace, weight, index)


def unbind(trace: Trace, base: Any, dim: int = 0) -> list[Array]:
    """The elements along a dimension, as a loop over a traced row sees them."""
    array = trace.operand(base)
    assert isinstance(array, Array)
    if not array.dims:
        raise trace.error("loops over a traced scalar", "only rows such as table[h] have elements.")
    trace.reads_sizes = True
    dim %= len(array.dims)
    return [getitem(trace, base, (*[slice(None)] * dim, i)) for i in range(array.dims[dim].length)]


def permuted(array: Array, order: list[int]) -> Array:
    """Dimensions in another order."""

    def at(index: Index) -> int:
        inner = [0] * len(order)
        for out, source in enumerate(order):
            inner[source] = index[out]
        return array.at(tuple(inner))

    return Array(array.dtype, tuple(array.dims[i] for i in order), at)


def transpose(trace: Trace, base: Any, dim0: int, dim1: int) -> Array:
    """torch.transpose."""
    array = trace.operand(base)
    assert isinstance(array, Array)
    order = list(range(len(array.dims)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permuted(array, order)


def reversed_dims(trace: Trace, base: Any) -> Array:
    """Tensor.T and torch.t."""
    array = trace.operand(base)
    assert isinstance(array, Array)
    return permuted(array, list(range(len(array.dims)))[::-1])


def unsqueeze(trace: Trace, base: Any, dim: int) -> Array:
    """torch.unsqueeze."""
    array = trace.operand(base)
    assert isinstance(array, Array)
    place = dim % (len(array.dims) + 1)
    return getitem(trace, base, (*[slice(None)] * place, None, Ellipsis))


def squeeze(trace: Trace, base: Any, dim: int | None = None) -> Array:
    """torch.squeeze of dimensions that have length 1."""
    array = trace.operand(base)
    assert isinstance(array, Array)
    if not array.dims:
        return array
    trace.reads_sizes = True
    rank = len(array.dims)
    chosen = range(rank) if dim is None else [dim % rank]
    gone = [i for i in chosen if array.dims[i].length == 1]
    key = tuple(0 if i in gone else slice(None) for i in range(rank))
    return getitem(trace, base, key)


def _name(dtype: DType) -> str:
    return str(dtype.torch).removeprefix("torch.")


def _show(item: Any) -> str:
    if isinstance(item, slice):
        parts = ["" if p is None else str(p) for p in (item.start, item.stop, item.step)]
        return f"[{':'.join(parts[: 3 if item.step is not None else 2])}]"
    return f"a {type(item).__name__} ({item!r})"
