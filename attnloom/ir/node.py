"""The program that a traced mod becomes: a flat list of typed nodes in topological order.

A Program is *structure* only (operations, dtypes, ranks), hashable and stable across processes.
What varies from call to call, captured tensors and Python numbers, is kept beside it in a
BoundProgram and reaches kernels as run-time arguments.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from dataclasses import dataclass

import torch


class DType(enum.Enum):
    """Types of values inside a program. Half-precision loads are widened to F32."""

    BOOL = "bool"
    U8 = "u8"
    I8 = "i8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    F32 = "f32"
    F64 = "f64"

    @property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.F64)

    @property
    def is_int(self) -> bool:
        return self is not DType.BOOL and not self.is_float

    @property
    def torch(self) -> torch.dtype:
        return _TO_TORCH[self]

    @staticmethod
    def of(dtype: torch.dtype) -> DType:
        """The type a value of this torch dtype has once loaded; KeyError if it has none."""
        return _FROM_TORCH[dtype]


_TO_TORCH = {
    DType.BOOL: torch.bool,
    DType.U8: torch.uint8,
    DType.I8: torch.int8,
    DType.I16: torch.int16,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
}
_FROM_TORCH = {v: k for k, v in _TO_TORCH.items()} | {
    torch.float16: DType.F32,
    torch.bfloat16: DType.F32,
}


class Axes(enum.IntFlag):
    """The positions a value depends on. R0..R3 are the inner axes of fused reductions."""

    NONE = 0
    B = 1
    H = 2
    Q = 4
    KV = 8
    R0 = 16
    R1 = 32
    R2 = 64
    R3 = 128
    ALL = 15


# Names of the input nodes. `dscore` exists in gradient programs only: dL / d(score after the mod).
INPUT_AXES: dict[str, Axes] = {
    "b": Axes.B,
    "h": Axes.H,
    "q": Axes.Q,
    "kv": Axes.KV,
    "score": Axes.ALL,
    "dscore": Axes.ALL,
    "r0": Axes.R0,
    "r1": Axes.R1,
    "r2": Axes.R2,
    "r3": Axes.R3,
}
REDUCTION_AXES = (Axes.R0, Axes.R1, Axes.R2, Axes.R3)


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    op: a key of `ops.OPS`, or one of the leaves
        input  attr = name in INPUT_AXES
        const  attr = a Python bool, int or float, baked into the kernel
        number attr = slot into Program.numbers; a run-time scalar
        load   attr = slot into Program.tensors; args = one integer node per dimension.
               A negative index counts from the end; one that is still out of range is clamped,
               so that no lane reads outside the tensor.
        reduce attr = (kind, axis): kind in sum, prod, max, min, any, all; axis an R of Axes;
               args = (body,). The length is that of Program.reductions[axis].
    args: indices of earlier nodes. Apart from `load`, `where` (condition), `reduce`, shifts and
        `cast`, the tracer casts operands so that they share one dtype.
    """

    op: str
    args: tuple[int, ...]
    dtype: DType
    attr: object = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a program knows of a captured tensor: never its sizes, strides or data."""

    dtype: torch.dtype
    rank: int
    requires_grad: bool = False


@dataclass(frozen=True, eq=False)
class Program:
    """A traced function in single-assignment form; equal to those of the same digest, which tells
    apart what is equal in Python: 0.0 and -0.0.

    nodes: topologically ordered, without duplicates and without dead nodes.
    outputs: node indices. A score program has one float output, a mask program one BOOL output.
        A gradient program's first output is dL/d(score before the mod); those of captured tensors
        follow, see `passes/gradient.py`.
    tensors, numbers: the binding slots that `load` and `number` nodes name.
    reductions: (tensor slot, dimension) that gives the length of R0, R1, ... in order.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    tensors: tuple[TensorSpec, ...] = ()
    numbers: tuple[DType, ...] = ()
    reductions: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def axes(self) -> tuple[Axes, ...]:
        """Axes of every node: the union over its operands, less what a reduction sums away."""
        out: list[Axes] = []
        for node in self.nodes:
            if node.op == "input":
                out.append(INPUT_AXES[str(node.attr)])
                continue
            axes = Axes.NONE
            for arg in node.args:
                axes |= out[arg]
            if node.op == "reduce":
                axes &= ~node.attr[1]  # type: ignore[index]
            out.append(axes)
        return tuple(out)

    @functools.cached_property
    def digest(self) -> str:
        """Hex digest of the structure; equal programs agree across processes and machines."""
        text = repr(
            (
                [(n.op, n.args, n.dtype.value, _plain(n.attr)) for n in self.nodes],
                self.outputs,
                [(str(t.dtype), t.rank, t.requires_grad) for t in self.tensors],
                [d.value for d in self.numbers],
                self.reductions,
            )
        )
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def _plain(attr: object) -> object:
    if isinstance(attr, tuple):
        return tuple(_plain(a) for a in attr)
    return int(attr) if isinstance(attr, Axes) else attr


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program with the values of one call.

    tensors: captured tensors, one for each Program.tensors (any stride; may require grad).
    numbers: Python ints or floats, one for each Program.numbers.
    """

    program: Program
    tensors: tuple[torch.Tensor, ...] = ()
    numbers: tuple[int | float, ...] = ()
