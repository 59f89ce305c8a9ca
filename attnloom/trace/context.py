"""The state of one trace: binding slots, forks of control flow, and how to fail readably."""

from __future__ import annotations

from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import torch

from attnloom.errors import TraceError
from attnloom.ir.builder import Builder
from attnloom.ir.node import DType, TensorSpec
from attnloom.trace import messages
from attnloom.trace.code_facts import is_literal
from attnloom.trace.dtensor import is_dtensor
from attnloom.trace.names import mod_name, name_of
from attnloom.trace.randomness import Source
from attnloom.trace.symbols import Array, Dim, NumberProxy, Symbol, plain_number

MAX_PATHS = 64
_CATEGORY = {DType.BOOL: 0, DType.F32: 2, DType.F64: 2}  # everything else is an integer: 1
_INT64_LIMIT = 1 << 63

Kind = Literal["score_mod", "mask_mod"]


class Trace:
    """Everything that the paths of one traced mod share.

    tensors, numbers: what the slots of the program are bound to, in slot order.
    sources: for each number the position of the proxy that it came from, or None.
    generators: of random numbers, that the mod must leave alone.
    reads_host: the program or its bindings depend on something that was computed or read on the
        host; reads_sizes: on sizes of captured tensors.
    """

    def __init__(self, kind: Kind, mod: Any, score_dtype: DType, device: torch.device) -> None:
        self.kind: Kind = kind
        self.mod = mod
        self.score_dtype = score_dtype
        self.device = device
        self.grad_mode = torch.is_grad_enabled()
        self.default_float = DType.of(torch.get_default_dtype())
        self.builder = Builder()
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[int | float] = []
        self.sources: list[int | None] = []
        self.reads_host = False
        self.reads_sizes = False
        self.generators: tuple[Source, ...] = ()
        self.num_paths = 0
        self._slots: dict[int, int] = {}
        self._number_slots: dict[tuple[object, ...], list[int]] = {}
        self.base_frame: FrameType | None = None
        self.start_path(())

    def start_path(self, decisions: tuple[bool, ...]) -> None:
        """Begin another run of the mod that takes these decisions first."""
        self.num_paths += 1
        if self.num_paths > MAX_PATHS:
            self._too_many_paths()
        self.decisions = decisions
        self.failure: TraceError | None = None
        self.taken: list[bool] = []
        self.conditions: list[int] = []
        self.known: dict[int, bool] = {}
        self._visits: dict[tuple[object, ...], int] = {}

    # Values

    def operand(self, value: Any) -> Array | NumberProxy | int | float:
        """What an operation computes with: numbers stay numbers, tensors become loads."""
        if type(value) is Symbol:
            return value.array
        if type(value) is Array:
            return value
        if isinstance(value, torch.Tensor):
            return self.load(value)
        if type(value) is NumberProxy or isinstance(value, bool | int | float):
            return value
        if hasattr(value, "dtype") and hasattr(value, "item"):
            return value.item()  # a numpy scalar
        raise self.error(
            f"computes with a {type(value).__name__} ({value!r})",
            "a mod computes with tensors and numbers. Convert it outside and capture the result.",
        )

    def load(self, tensor: torch.Tensor) -> Array:
        """A captured tensor as an array of loads."""
        slot = self.slot(tensor)
        dims = tuple(Dim(length, (slot, i)) for i, length in enumerate(tensor.shape))
        dtype = DType.of(tensor.dtype)
        return Array(dtype, dims, lambda index: self.builder.load(slot, *index))

    def slot(self, tensor: torch.Tensor) -> int:
        """The binding slot of a captured tensor: one for each object."""
        slot = self._slots.get(id(tensor))
        if slot is not None:
            return slot
        self._check_capture(tensor)
        differentiable = (
            self.kind == "score_mod"
            and self.grad_mode
            and tensor.requires_grad
            and tensor.is_floating_point()
        )
        slot = self._slots[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.builder.tensors.append(TensorSpec(tensor.dtype, tensor.dim(), differentiable))
        return slot

    def _check_capture(self, tensor: torch.Tensor) -> None:
        if is_dtensor(tensor):
            raise self._refused(
                tensor,
                ", which is a DTensor",
                "kernels read captured tensors of one rank. Capture its to_local(), or call "
                "flex_attention with DTensors.",
            )
        try:
            DType.of(tensor.dtype)
        except KeyError:
            raise self._refused(
                tensor,
                ", whose dtype kernels cannot load",
                "convert it outside, for example with .float() or .int().",
            ) from None
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise self._refused(
                tensor, ", which is not a plain strided tensor", "convert it outside."
            )
        if tensor.device != self.device:
            raise self._refused(
                tensor,
                f" on {tensor.device} while the inputs are on {self.device}",
                f"kernels read captured tensors in place. Move it with .to('{self.device}').",
            )

    def _refused(self, tensor: torch.Tensor, what: str, advice: str) -> TraceError:
        name = name_of(self.mod, tensor)
        named = f"{name!r} " if name else ""
        return self.error(f"uses captured tensor {named}{_describe(tensor)}{what}", advice)

    def number(self, value: NumberProxy | int | float, dtype: DType) -> int:
        """Node of a Python number: a run-time binding unless it is provably a literal."""
        source = value.position if type(value) is NumberProxy else None
        plain = plain_number(value)
        if isinstance(plain, bool):
            return self.builder.const(plain, dtype)
        if isinstance(plain, int) and not -_INT64_LIMIT <= plain < _INT64_LIMIT:
            raise self.error(f"computes with {plain}", "integers in a mod must fit in 64 bits.")
        if source is None:
            frame = messages.user_frame()
            if frame is not None and is_literal(frame.f_code, frame.f_lasti, plain):
                return self.builder.const(plain, dtype)
        return self.builder.number(self._number_slot(plain, dtype, source), dtype)

    def _number_slot(self, value: int | float, dtype: DType, source: int | None) -> int:
        """A slot for this occurrence; paths that pass the same occurrence share it."""
        place = self._place()
        visit = self._visits[place] = self._visits.get(place, -1) + 1
        slots = self._number_slots.setdefault((*place, visit, dtype), [])
        for slot in slots:
            same = repr(self.numbers[slot]) == repr(value) and self.sources[slot] == source
            if same:
                return slot
        slots.append(len(self.numbers))
        self.numbers.append(value)
        self.sources.append(source)
        self.builder.numbers.append(dtype)
        return slots[-1]

    def _place(self) -> tuple[object, ...]:
        """Where the mod's call stack is: (code, instruction) of every frame of the user."""
        place: list[object] = []
        frame = messages.user_frame()
        while frame is not None and frame is not self.base_frame:
            place += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        return tuple(place)

    # Types

    def promote(self, *operands: Array | NumberProxy | int | float) -> DType:
        """torch.result_type of vectors, scalars and Python numbers, in that order of precedence."""
        groups: list[DType | None] = [None, None, None]
        for operand in operands:
            rank = 2 if not isinstance(operand, Array) else 0 if operand.dims else 1
            groups[rank] = _join(groups[rank], self.dtype_of(operand))
        result: DType | None = None
        for group in reversed(groups):
            result = _outrank(group, result)
        assert result is not None
        return result

    def dtype_of(self, operand: Array | NumberProxy | int | float) -> DType:
        if isinstance(operand, Array):
            return operand.dtype
        if isinstance(operand, bool):
            return DType.BOOL
        return DType.I64 if isinstance(operand, int) else self.default_float

    # Control flow

    def decide(self, condition: int) -> bool:
        """The truth of a BOOL node on this path; a new one forks."""
        node = self.builder.nodes[condition]
        if node.op == "const":
            return bool(node.attr)
        if node.op == "not":
            return not self.decide(node.args[0])
        if condition in self.known:
            return self.known[condition]
        place = len(self.taken)
        if place >= MAX_PATHS:
            self._too_many_paths()
        value = self.decisions[place] if place < len(self.decisions) else True
        self.taken.append(value)
        self.conditions.append(condition)
        self.known[condition] = value
        return value

    def _too_many_paths(self) -> NoReturn:
        raise self.error(
            f"branches on traced values in more than {MAX_PATHS} ways",
            "every combination of `if`, `and`, `or`, `min` and `max` is traced as its own path. "
            "Use torch.where, `&`, `|`, torch.minimum and torch.maximum, which do not branch.",
        )

    # Gradients

    def carries_gradient(self, node: int) -> bool:
        """Whether a gradient would flow through `node`: it meets the score or a parameter."""
        pending, seen = [node], set()
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            entry = self.builder.nodes[current]
            if not entry.dtype.is_float:
                continue
            if entry.op == "input" and entry.attr == "score" and self.grad_mode:
                return True
            if entry.op == "load" and self.builder.tensors[entry.attr].requires_grad:  # type: ignore[call-overload]
                return True
            pending += () if entry.op == "load" else entry.args
        return False

    # Failing

    def error(self, what: str, advice: str) -> TraceError:
        """A TraceError that names the mod, the place, `what` and the `advice`."""
        frame = messages.user_frame()
        inside = frame is not None and self._is_inside(frame)
        place, line = messages.mod_place(self.mod), ""
        if inside and frame is not None:
            file = frame.f_code.co_filename
            place = f"{Path(file).name}:{frame.f_lineno}"
            column = messages.column_of(frame.f_code, frame.f_lasti)
            line = messages.source_line(file, frame.f_lineno, column)
        where = f" ({place})" if place else ""
        text = f"{self.kind} '{mod_name(self.mod)}'{where} {what}; {advice}"
        self.failure = TraceError(f"{text}\n    {line}" if line else text)
        return self.failure

    def _is_inside(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame is self.base_frame:
                return True
            frame = frame.f_back
        return False


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# Made at import: while torch.export traces a call it would record the question as an operator.
_PROMOTED = {(a, b): DType.of(torch.promote_types(a.torch, b.torch)) for a in DType for b in DType}


def _join(a: DType | None, b: DType) -> DType:
    return b if a is None else _PROMOTED[a, b]


def _outrank(high: DType | None, low: DType | None) -> DType | None:
    """The type of operands of two precedences: the lower one counts only by being of a higher
    kind (bool < integer < float)."""
    if high is None or low is None:
        return high or low
    return high if _CATEGORY.get(high, 1) >= _CATEGORY.get(low, 1) else _join(high, low)
