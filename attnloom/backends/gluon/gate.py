"""Which devices, versions and problems the Gluon kernels take. Imports nothing of Gluon.

Gluon is experimental: its functions change between minor versions of Triton, so that kernels run
with versions they were compiled and measured with, and no other.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re

import torch

from attnloom.backends.registry import AttentionCall
from attnloom.errors import counted

MAX_HEAD_DIM = 256
_TESTED = ((3, 6),)
_ARCH = (9, 0)
_DTYPES = (torch.float16, torch.bfloat16)
_POSITIONS = 2**31 - 256  # row and key numbers of the last tile fit int32
_TMA_BYTES = 16  # alignment of addresses and strides


def refusal(call: AttentionCall) -> str | None:
    """Why no call of this kind (device, dtypes, head dimensions, options) can run."""
    query, key, value = call.query, call.key, call.value
    why = _device(query.device) or _version()
    if why is not None:
        return why
    if call.table is not None:
        return "keys and values lie in pages, or have a length for each sequence."
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _DTYPES:
        return (
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; the kernels "
            "take one of float16 and bfloat16 for all three."
        )
    for name, tensor in (("query", query), ("value", value)):
        if not 1 <= tensor.size(3) <= MAX_HEAD_DIM:
            return (
                f"{name} has head dimension {tensor.size(3)}; the kernels take 1 to {MAX_HEAD_DIM}."
            )
    return None


def call_refusal(call: AttentionCall) -> str | None:
    """Why this call cannot run though its kind can: what planning does not see."""
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        address = tensor.data_ptr() % _TMA_BYTES
        if not _is_readable(tensor.shape, tensor.stride(), tensor.element_size(), address):
            return (
                f"TMA cannot read {name}, whose strides are {tuple(tensor.stride())} elements: "
                "rows must start at multiples of 16 bytes, with neighbouring elements in a row "
                "and no expanded dimension. Pass a contiguous copy."
            )
        if tensor.size(2) > _POSITIONS:
            return f"{name} has {counted(tensor.size(2), 'row')} (the kernels take {_POSITIONS})."
    return None


@functools.lru_cache(maxsize=4096)
def _is_readable(shape: torch.Size, stride: tuple[int, ...], itemsize: int, address: int) -> bool:
    """Whether TMA can read a tensor that lies so; address: what is left of it beyond 16 bytes."""
    if address or (stride[3] != 1 and shape[3] > 1):
        return False
    # a dimension of one entry may have any stride
    return all(
        size == 1 or (step > 0 and step * itemsize % _TMA_BYTES == 0)
        for size, step in zip(shape[:3], stride[:3], strict=True)
    )


@functools.cache
def _device(device: torch.device) -> str | None:
    needed = "the kernels are for NVIDIA GPUs of compute capability 9.0 (Hopper)."
    if device.type != "cuda" or torch.version.hip is not None:
        return f"query is on {device}; {needed}"
    found = torch.cuda.get_device_capability(device)
    if found != _ARCH:
        return f"{device} has compute capability {found[0]}.{found[1]}; {needed}"
    return None


@functools.cache
def _version() -> str | None:
    found = importlib.metadata.version("triton")
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if numbers in _TESTED:
        return None
    tested = ", ".join(".".join(map(str, v)) for v in _TESTED)
    return f"triton {found} is installed; the kernels were tested with {tested}."
