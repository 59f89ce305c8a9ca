"""torch.autocast around a call: lower the inputs once, and never what happens inside."""

from __future__ import annotations

import contextlib

import torch


def is_on(tensor: torch.Tensor) -> bool:
    """Whether autocast is on for the tensor's device (the meta device has none)."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def switched_off(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast off for the tensor's device: accumulators stay float32."""
    if is_on(tensor):
        return torch.autocast(tensor.device.type, enabled=False)
    return contextlib.nullcontext()


def lowered(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What autocast makes of an input of torch's scaled_dot_product_attention.

    Floating-point tensors on `device` take autocast's dtype; float64, 8 bits, and what is no
    floating-point tensor, stays as it is.
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return tensor
    if tensor.dtype.itemsize in (1, 8) or tensor.device.type != device.type:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device.type))
