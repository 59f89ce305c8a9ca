"""Checks of single arguments that many public functions take, with one text for each mistake."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import numpy as np
import torch

from attnloom.errors import DeviceError, ModError, OptionError, ShapeError, counted

_MOST_SHOWN = 60


def shown(value: object) -> str:
    """A value in a message: short, and on one line."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"a {type(value).__name__}"


def read_int(name: str, value: object) -> int:
    """A size or position. Raises ShapeError unless it is an int, OptionError for a bool."""
    if isinstance(value, (bool, np.bool_)):
        raise OptionError(
            f"{name} is {value}, which is a flag; it must be an int. The arguments may be in "
            "another order."
        )
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError, ValueError):
        raise ShapeError(f"{name} is {shown(value)}; it must be an int.") from None


def read_lengths(name: str, value: Any) -> tuple[int, int]:
    """(Q_LEN, KV_LEN). Raises ShapeError unless it is a pair of ints, 0 or more."""
    try:
        first, second = value
        lengths = operator.index(first), operator.index(second)
        if min(lengths) >= 0:
            return lengths
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ShapeError(
        f"{name} is {shown(value)}; it must be a pair (Q_LEN, KV_LEN) of ints, 0 or more."
    )


def check_tensor(name: str, value: object) -> None:
    """Raises OptionError unless it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise OptionError(f"{name} is {shown(value)}; it must be a torch.Tensor.")


def check_flag(name: str, value: object) -> None:
    """Raises OptionError unless it is True or False (or 1 or 0)."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return
    raise OptionError(f"{name} is {shown(value)}; it must be True or False.")


def check_mask_mod(value: object) -> None:
    """Raises ModError unless it can be called, or is None."""
    if value is not None and not callable(value):
        raise ModError(
            f"mask_mod is {shown(value)}; it must be a function mask_mod(b, h, q_idx, kv_idx) that "
            "returns True where a score is kept, or None."
        )


def read_device(device: Any) -> torch.device:
    """A device that tensors can be made on.

    Raises:
        DeviceError: torch does not know it, or it is not there.
    """
    found = None
    if isinstance(device, (str, torch.device)):
        with contextlib.suppress(RuntimeError):
            found = torch.device(device)
    if found is None:
        raise DeviceError(
            f"device is {shown(device)}, which torch does not know; pass 'cpu', 'cuda', 'cuda:1', "
            "or a torch.device."
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"device is '{found}', but torch sees "
            f"{counted(torch.cuda.device_count(), 'CUDA device')} here. Use device='cpu', or look "
            "at torch.cuda.is_available()."
        )
    return found


def read_data_device(device: Any) -> torch.device:
    """A device that tensors with values can be made on; as `read_device`.

    Raises:
        DeviceError: also the meta device.
    """
    found = read_device(device)
    if found.type == "meta":
        raise DeviceError(
            "device is 'meta', whose tensors have no values; what a mask keeps follows from them. "
            "Build it with device='cpu', then move it with .to('meta')."
        )
    return found


def paired_ids(
    of_queries: tuple[str, torch.Tensor], of_keys: tuple[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, Q_LEN] and [B, KV_LEN] of two tables [L] or [B, L], each beside its name.

    Raises:
        ShapeError: their batches differ, and neither is 1. DeviceError: their devices differ.
    """
    check_one_device(of_queries, of_keys)
    (q_name, ids_q), (kv_name, ids_kv) = of_queries, of_keys
    rows = [t[None] if t.dim() == 1 else t for t in (ids_q, ids_kv)]
    batches = [t.shape[0] for t in rows]
    if batches[0] != batches[1] and 1 not in batches:
        raise ShapeError(
            f"{q_name} has {counted(batches[0], 'batch entry')} and {kv_name} {batches[1]}; they "
            "must be equal, or 1 to share."
        )
    batch = batches[1] if batches[0] == 1 else batches[0]
    return rows[0].expand(batch, -1), rows[1].expand(batch, -1)


def check_one_device(*named: tuple[str, torch.Tensor]) -> None:
    """Raises DeviceError unless all tensors, each beside its name, are on one device."""
    (first, one), *others = named
    for name, other in others:
        if other.device != one.device:
            raise DeviceError(
                f"{first} is on {one.device}, {name} on {other.device}; both must be on one "
                "device. Move them with .to(device)."
            )
