"""StagedInts: integer tensors in one piece of memory, which new values reach in one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

_ALIGNED = 16  # bytes that each tensor begins at a multiple of, as kernels like it
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Staging:
    """Values on the host, on their way. arrays: by name, zeros to be filled."""

    memory: torch.Tensor
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    dtype: torch.dtype
    shape: Shape
    start: int
    stop: int


class StagedInts:
    """Tensors of integers that stay where they are while their values change, as those that a
    captured CUDA graph reads must.

    Attributes:
        tensors: by name, zeros at first.
        memory: of all of them, bytes.
    """

    def __init__(
        self, fields: Mapping[str, tuple[torch.dtype, Shape]], device: torch.device
    ) -> None:
        """Make them.

        Args:
            fields: name -> (torch.int32 or torch.int64, shape).
        """
        self._places: list[_Place] = []
        self._kept: Staging | None = None
        at = 0
        for name, (dtype, shape) in fields.items():
            stop = at + math.prod(shape) * dtype.itemsize
            self._places.append(_Place(name, dtype, shape, at, stop))
            at = stop + -stop % _ALIGNED
        # Ordinary tensors wherever they are made, so that they may be changed anywhere.
        with torch.inference_mode(False):
            self.memory = torch.zeros(at, dtype=torch.uint8, device=device)
            self.tensors = {
                p.name: self.memory[p.start : p.stop].view(p.dtype).view(p.shape)
                for p in self._places
            }

    def staging(self) -> Staging:
        """Room for new values. On a device it is fresh, as a copy that is under way still reads the
        last one; on the CPU it is there once."""
        if self._kept is not None:
            self._kept.memory.zero_()
            return self._kept
        with torch.inference_mode(False):  # as below
            memory = torch.zeros(
                len(self.memory), dtype=torch.uint8, pin_memory=self.memory.is_cuda
            )
        flat = memory.numpy()
        arrays = {
            p.name: flat[p.start : p.stop].view(_NUMPY[p.dtype]).reshape(p.shape)
            for p in self._places
        }
        staging = Staging(memory, arrays)
        if self.memory.device.type == "cpu":
            self._kept = staging
        return staging

    def take(self, staging: Staging) -> None:
        """Let the tensors hold what was staged, without waiting for the device."""
        self.memory.copy_(staging.memory, non_blocking=True)
