"""Values while a mod is being traced.

An Array is what an operation computes with; a Symbol is the face it shows to the user's function,
a torch.Tensor without data, so that `isinstance`, operators, methods and torch functions work.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnloom.errors import TraceError
from attnloom.ir.node import DType

if TYPE_CHECKING:
    from attnloom.trace.context import Trace

Index = tuple[int, ...]
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a small vector: its length now, and the (tensor slot, dimension) that it
    is the length of in every call; None for a dimension of length 1 that broadcasts."""

    length: int
    source: tuple[int, int] | None = None


class Array:
    """One scalar a score, or a short vector of them that a reduction will sum away.

    dims: () for a scalar.
    at: node of the element at the given index nodes, one for each dimension. Operations on vectors
        stay lazy, so that indexing, transposing and reducing are plain changes of index.
    """

    __slots__ = ("_at", "_memo", "dims", "dtype")

    def __init__(self, dtype: DType, dims: tuple[Dim, ...], at: Callable[[Index], int]) -> None:
        self.dtype = dtype
        self.dims = dims
        self._at = at
        self._memo: dict[Index, int] = {}

    @classmethod
    def scalar(cls, dtype: DType, node: int) -> Array:
        array = cls(dtype, (), lambda _: node)
        array._memo[()] = node
        return array

    def at(self, index: Index = ()) -> int:
        node = self._memo.get(index)
        if node is None:
            node = self._memo[index] = self._at(index)
        return node

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(d.length for d in self.dims)


class Symbol(torch.Tensor):
    """A traced value. The active trace sees every torch operation on it."""

    array: Array
    trace: Trace

    @staticmethod
    def of(trace: Trace, array: Array) -> Symbol:
        symbol = torch.Tensor._make_wrapper_subclass(
            Symbol, array.shape, dtype=array.dtype.torch, device=_CPU
        )
        symbol.array = array
        symbol.trace = trace
        return symbol

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.array.dtype.torch

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.trace.device

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        if self.array.dims:
            self.trace.reads_sizes = True
        return torch.Size(self.array.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.array.dims)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.array.dtype.is_float and self.trace.grad_mode

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape = f" {list(self.array.shape)}" if self.array.dims else ""
        return f"<traced {str(self.array.dtype.torch).removeprefix('torch.')}{shape}>"

    __str__ = __repr__

    def __format__(self, _: str) -> str:
        return repr(self)

    def __round__(self, ndigits: int | None = None) -> Any:
        raise self.trace.error("calls round() on a traced value", "use torch.round.")

    __hash__ = torch.Tensor.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _first_trace(args).error(
            f"lets a traced value out, which then meets {getattr(func, '__name__', func)}",
            "traced values mean something during the call of the mod only. Do not store them.",
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _first_trace(args).error(
            f"gives a traced value to {func}, which attnloom cannot see into",
            "torch.func transforms and custom operators have no place in a mod. Use torch "
            "functions on scalars, or compute it outside and capture the result.",
        )


def _first_trace(args: Any) -> Trace:
    """The trace of a Symbol among the arguments of a torch function."""
    pending = list(args)
    while pending:
        value = pending.pop(0)
        if type(value) is Symbol:
            return value.trace
        if isinstance(value, tuple | list):
            pending += value
    raise TraceError("a traced value left its mod; do not store what a mod is called with.")


class NumberProxy:
    """A captured Python number that reports where it goes.

    Given to a mod in place of its number `position`, it reaches an operation on a traced value as
    itself, which proves where that operation's number comes from. Whatever looks at the value
    (arithmetic, comparison, range(), formatting) sets `observed`: the trace then depends on it.
    """

    __slots__ = ("observed", "position", "value")

    def __init__(self, value: int | float, position: int) -> None:
        self.value = value
        self.position = position
        self.observed = False

    def observe(self) -> int | float:
        self.observed = True
        return self.value

    @property
    def __class__(self) -> type:  # isinstance() answers as for the number
        return type(self.value)

    # Makes torch's argument parser take a proxy where it takes a tensor, and call the active mode.
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented

    def __getattr__(self, name: str) -> Any:
        return getattr(self.observe(), name)

    def __hash__(self) -> int:
        return hash(self.observe())


def plain_number(value: NumberProxy | int | float) -> int | float:
    """The number, without noting that it was looked at."""
    return value.value if type(value) is NumberProxy else value  # type: ignore[return-value]


def _looking(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    """`function` on the number, after noting that the value was looked at."""

    def method(self: NumberProxy, *others: Any) -> Any:
        if any(isinstance(o, torch.Tensor) for o in others):
            return NotImplemented
        plain = [o.observe() if type(o) is NumberProxy else o for o in others]
        return function(*plain, self.observe()) if reflected else function(self.observe(), *plain)

    return method


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name.strip("_"): getattr(operator, name)
    for name in (
        "add sub mul truediv floordiv mod pow and_ or_ xor lshift rshift "
        "eq ne lt le gt ge neg pos abs invert index"
    ).split()
} | {
    "int": int,
    "float": float,
    "bool": bool,
    "complex": complex,
    "round": round,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "str": str,
    "repr": repr,
    "format": format,
    "divmod": divmod,
}
for _name, _function in _FUNCTIONS.items():
    setattr(NumberProxy, f"__{_name}__", _looking(_function, reflected=False))
for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift divmod".split():
    setattr(NumberProxy, f"__r{_name}__", _looking(_FUNCTIONS[_name], reflected=True))
