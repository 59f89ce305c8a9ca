"""What launch_backward.py, launch_roles.py and launch_wide.py share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from attnloom.backends.gluon import ready_backward
from attnloom.backends.gluon.ready_backward import Ready
from attnloom.backends.registry import Gradients
from attnloom.backends.triton.beside import wait_for_all
from attnloom.backends.triton.choice import keep
from attnloom.backends.triton.launcher import Launcher
from attnloom.backends.triton.operands import Operands


class HasMain(Protocol):
    """A launch whose main kernel may spill."""

    @property
    def main(self) -> Launcher: ...


R = TypeVar("R", bound=HasMain)


def unless_it_spills(
    found: dict[tuple[Any, ...], R | None],
    operands: Operands,
    prepare: Callable[[Operands], R],
    run: Callable[[Operands, R], Gradients],
    few_spills: int,
) -> Gradients | None:
    """What `run` gives with the launch remembered in `found`, or prepared now; None where its main
    kernel spills, the first time too."""
    key = ready_backward.key_of(operands)
    ready = found.get(key)
    if ready is None:
        if key in found:
            return None
        wait_for_all()
        ready = prepare(operands)
    gradients = run(operands, ready)
    if ready.main.spills > few_spills:
        keep(found, key, None)
        return None
    keep(found, key, ready)
    return gradients


def buffers(operands: Operands, ready: Ready) -> tuple[torch.Tensor, torch.Tensor]:
    """Row statistics, and the memory that dq is added to."""
    device = operands.dq.device
    stats = torch.empty(2, ready.lines, dtype=torch.float32, device=device)
    return stats, torch.empty(ready.sum_lines, ready.width, dtype=torch.float32, device=device)


def prepare_arguments(
    operands: Operands,
    ready: Ready,
    stats: torch.Tensor,
    dq_sum: torch.Tensor,
    lists: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Of prepare_kernel but for its config. lists: of rows."""
    lse, sweeps = operands.lse, ready.finish is None
    return (
        operands.out, operands.dout, lse if operands.dlse is None else operands.dlse, lse, stats,
        operands.dq if sweeps else dq_sum, lists, ready.around_shape, ready.strides,
    )  # fmt: skip


def descriptors(operands: Operands, ready: Ready) -> tuple[Any, ...]:
    """Of query, dout, key, value, dk and dv."""
    query, key, value, dout = operands.inputs
    tensors = (query, dout, key, value, operands.dk, operands.dv)
    return tuple(blank.at(tensor) for blank, tensor in zip(ready.blanks, tensors, strict=True))
