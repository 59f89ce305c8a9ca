"""TMA descriptors of [B, H, L, D] tensors and their parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnloom.backends.triton.arguments import steps

TILES = NVMMASharedLayout(128, 16, 4)
NARROW = NVMMASharedLayout(64, 16, 4)  # rows of 64 bytes


@dataclass(frozen=True, slots=True)
class Blank:
    """A descriptor but for its address, checked: the checks take longer than the rest."""

    descriptor: TensorDescriptor

    @staticmethod
    def of(tensor: torch.Tensor, rows: int, width: int, layout: NVMMASharedLayout = TILES) -> Blank:
        """Of boxes of one head's rows; what lies outside the tensor is read as zeros."""
        # a dimension of one entry may have any stride in torch; TMA wants an aligned one
        stride = [step or 16 for step in steps(tensor)]
        box = [1, 1, rows, width]
        found = TensorDescriptor(tensor, list(tensor.shape), [*stride, 1], box, layout)
        found.base = None
        return Blank(found)

    def at(self, tensor: torch.Tensor) -> TensorDescriptor:
        """A fresh descriptor of a tensor: this one may be in use by other threads."""
        fresh = TensorDescriptor.__new__(TensorDescriptor)
        fresh.__dict__.update(self.descriptor.__dict__)
        fresh.base = tensor
        return fresh
