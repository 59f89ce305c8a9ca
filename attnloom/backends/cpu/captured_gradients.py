"""Memory that a backward adds the gradients of captured tensors to."""

from __future__ import annotations

import ctypes

import torch

from attnloom.backends.cpu.launch_args import bindings
from attnloom.backends.cpu.schedule import BackwardSchedule
from attnloom.backends.registry import AttentionCall
from attnloom.ir.node import DType

Buffers = dict[int, torch.Tensor]  # by slot, [copies, *shape]


class CapturedGradients:
    """Forms of the buffers of a call and of calls like it, and the table of their addresses that
    kernels read. Holds no buffer.

    address: of the table; 0 where nothing is captured that wants a gradient.
    """

    __slots__ = ("_forms", "_num_lanes", "_num_tensors", "_real", "_table", "_width", "address")

    def __init__(self, call: AttentionCall, plan: BackwardSchedule, real: DType) -> None:
        tensors = () if call.score is None else call.score.tensors
        self._num_tensors = len(tensors)
        self._forms = {
            slot: ((copies, *tensors[slot].shape), tensors[slot].dtype)
            for slot, copies in plan.copies.items()
        }
        self._real = real.torch
        self._width, self._num_lanes = len(bindings(call)[0]), plan.schedule.num_lanes
        self._table = (ctypes.c_int64 * (self._width * self._num_lanes))()
        self.address = ctypes.addressof(self._table) if self._forms else 0

    def buffers(self) -> Buffers:
        """Fresh ones, of zeros, which the table names from now on."""
        made = {}
        for slot, (shape, _) in self._forms.items():
            made[slot] = buffer = torch.zeros(shape, dtype=self._real, device="cpu")
            place, one = buffer.data_ptr(), buffer.stride(0) * buffer.element_size()
            step = one if shape[0] > 1 else 0
            for lane in range(self._num_lanes):
                self._table[lane * self._width + slot] = place + lane * step
        return made

    def total(self, buffers: Buffers) -> tuple[torch.Tensor | None, ...]:
        """Sums over the copies, in order, in the tensors' dtypes; by slot of the score program."""
        found: list[torch.Tensor | None] = [None] * self._num_tensors
        for slot, buffer in buffers.items():
            total = buffer[0] if buffer.size(0) == 1 else buffer.sum(0)
            found[slot] = total.to(self._forms[slot][1])
        return tuple(found)
