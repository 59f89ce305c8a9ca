"""Whether tensors have the form that others had, in one step where torch's guards are at hand.

A form is all of a tensor but its address and what it holds: its class, dtype, device, sizes,
strides, requires_grad, whether it is shown negated or conjugated, and under which autocast, modes
and transforms it is looked at. torch's own compiler asks the same at each call of a compiled
graph; its check of three tensors takes 0.3 us, where reading their attributes takes 1.8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

_Guards: Any = None  # private to torch: it may go
with contextlib.suppress(ImportError):
    from torch._C._dynamo.guards import TensorGuards as _Guards

# Tensors, as many as the form has -> whether they have it. Anything else has not.
Holds = Callable[..., bool]


def form_of(tensors: Sequence[torch.Tensor]) -> Holds:
    """The form of tensors, looked at as now; it holds none of them."""
    if _Guards is None:
        return read_form(tensors)
    try:
        guards = _Guards(
            *tensors,
            dynamic_dims_sizes=[list(t.size()) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        )
        return guards.check if guards.check(*tensors) else read_form(tensors)
    except (AttributeError, RuntimeError, TypeError):
        return read_form(tensors)


def read_form(tensors: Sequence[torch.Tensor]) -> Holds:
    """The same from their attributes."""
    form = [_attributes(t) for t in tensors]
    seen_by = _lookers_on(tensors)

    def holds(*others: Any) -> bool:
        try:
            return [_attributes(t) for t in others] == form and _lookers_on(others) == seen_by
        except (AttributeError, RuntimeError):
            return False  # no tensor, or one without strides

    return holds


def _attributes(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.requires_grad,
        tensor.is_neg(),
        tensor.is_conj(),
        tensor._is_zerotensor(),
        tensor.is_inference(),
    )


def _lookers_on(tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
    kinds = {t.device.type for t in tensors}
    return (
        torch._C._are_functorch_transforms_active(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch),
        torch.is_inference_mode_enabled(),
        *(kind != "meta" and torch.is_autocast_enabled(kind) for kind in sorted(kinds)),
    )
