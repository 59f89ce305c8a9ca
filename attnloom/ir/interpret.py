"""Runs a Program on torch tensors: the meaning of the IR, against which passes are tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from attnloom.ir.node import REDUCTION_AXES, Axes, BoundProgram, DType, Node
from attnloom.ir.ops import OPS

Tensor = torch.Tensor


def interpret(
    bound: BoundProgram, inputs: Mapping[str, Tensor], *, float64: bool = False
) -> tuple[Tensor, ...]:
    """Evaluate every output of a program.

    Args:
        bound: program and bindings. Tensors may require grad; autograd follows them through.
        inputs: by name (see INPUT_AXES), tensors that broadcast with each other. The positions of
            reductions (r0 .. r3) are made here.
        float64: compute F32 nodes in float64, with constants and captured values unrounded.
    Returns:
        One tensor an output, of the broadcast shape of the inputs that it depends on; an output
        that varies along R axes has one trailing dimension for each of Program.reductions.
    Raises:
        KeyError: the program reads an input that `inputs` lacks.
    """
    run = _Run(bound, inputs, float64)
    values: list[Tensor] = []
    for node in bound.program.nodes:
        leaf = _LEAVES.get(node.op)
        args = [values[a] for a in node.args]
        values.append(leaf(run, node, args) if leaf else OPS[node.op].evaluate(*args))
    return tuple(run.outside(values[i], i) for i in bound.program.outputs)


@dataclass(frozen=True)
class _Run:
    bound: BoundProgram
    inputs: Mapping[str, Tensor]
    float64: bool

    def dtype(self, dtype: DType) -> torch.dtype:
        return torch.float64 if self.float64 and dtype is DType.F32 else dtype.torch

    @property
    def device(self) -> torch.device | None:
        for tensor in (*self.inputs.values(), *self.bound.tensors):
            return tensor.device
        return None

    def length(self, axis: Axes) -> int:
        slot, dim = self.bound.program.reductions[REDUCTION_AXES.index(axis)]
        return self.bound.tensors[slot].shape[dim]

    def dim(self, axis: Axes) -> int:
        """Reduction axes are the trailing dimensions, R0 first."""
        return REDUCTION_AXES.index(axis) - len(self.bound.program.reductions)

    def outside(self, value: Tensor, index: int) -> Tensor:
        """Without the trailing reduction dimensions, unless the node varies along them."""
        inner = len(self.bound.program.reductions)
        if value.ndim < inner or self.bound.program.axes[index] & ~Axes.ALL:
            return value
        return value.reshape(value.shape[: value.ndim - inner])


def _input(run: _Run, node: Node, _: list[Tensor]) -> Tensor:
    inner = len(run.bound.program.reductions)
    name = str(node.attr)
    if name[0] == "r":
        axis = REDUCTION_AXES[int(name[1:])]
        shape = [1] * inner
        shape[run.dim(axis)] = run.length(axis)
        positions = torch.arange(run.length(axis), device=run.device, dtype=run.dtype(node.dtype))
        return positions.reshape(shape)
    value = run.inputs[name].to(run.dtype(node.dtype))
    return value.reshape((*value.shape, *([1] * inner)))


def _const(run: _Run, node: Node, _: list[Tensor]) -> Tensor:
    return torch.tensor(node.attr, dtype=run.dtype(node.dtype), device=run.device)


def _number(run: _Run, node: Node, _: list[Tensor]) -> Tensor:
    value = run.bound.numbers[node.attr]  # type: ignore[index]
    return torch.tensor(value, dtype=run.dtype(node.dtype), device=run.device)


def _load(run: _Run, node: Node, args: list[Tensor]) -> Tensor:
    tensor = run.bound.tensors[node.attr]  # type: ignore[index]
    if tensor.numel() == 0:
        shape = torch.broadcast_shapes(*(a.shape for a in args)) if args else ()
        return tensor.new_zeros(shape, dtype=run.dtype(node.dtype))
    index = []
    for arg, size in zip(args, tensor.shape, strict=True):
        arg = arg.to(torch.int64)
        index.append(torch.where(arg < 0, arg + size, arg).clamp(0, size - 1))
    value = tensor[tuple(index)] if index else tensor
    return value.to(run.dtype(node.dtype))


def _cast(run: _Run, node: Node, args: list[Tensor]) -> Tensor:
    return args[0].to(run.dtype(node.dtype))


def _reduce(run: _Run, node: Node, args: list[Tensor]) -> Tensor:
    kind, axis = node.attr  # type: ignore[misc]
    dim, body = run.dim(axis), args[0]
    body = body.reshape([1] * (len(run.bound.program.reductions) - body.ndim) + list(body.shape))
    shape = list(body.shape)
    shape[dim] = run.length(axis)
    body = body.expand(shape)  # a body that does not depend on the axis still counts once a step
    if run.length(axis) == 0:
        shape[dim] = 1
        return body.new_full(shape, _empty(kind, body.dtype))
    return _REDUCE[kind](body, dim).to(body.dtype)


def _empty(kind: str, dtype: torch.dtype) -> bool | int | float:
    """What a reduction over nothing gives: its neutral element."""
    if kind in ("min", "max"):
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        bounds = (-torch.inf, torch.inf) if dtype.is_floating_point else (info.min, info.max)
        return bounds[kind == "min"]
    return {"sum": 0, "prod": 1, "any": False, "all": True}[kind]


_REDUCE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x.sum(dim, keepdim=True),
    "prod": lambda x, dim: x.prod(dim, keepdim=True),
    "min": lambda x, dim: x.amin(dim, keepdim=True),
    "max": lambda x, dim: x.amax(dim, keepdim=True),
    "any": lambda x, dim: x.any(dim, keepdim=True),
    "all": lambda x, dim: x.all(dim, keepdim=True),
}
_LEAVES: dict[str, Callable[[_Run, Node, list[Tensor]], Tensor]] = {
    "input": _input,
    "const": _const,
    "number": _number,
    "load": _load,
    "cast": _cast,
    "reduce": _reduce,
}
