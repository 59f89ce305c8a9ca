"""AttentionArgs of `kernels/args.h`, filled by one struct.pack a call.

Every field has eight bytes, so the layout is a flat list of words. Filling a ctypes structure field
by field costs a quarter of a microsecond a field; one pack of all words costs two in total.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attnloom.backends.cpu.schedule import Schedule
from attnloom.backends.registry import AttentionCall
from attnloom.block_mask import BlockLists

DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

_OPERAND = 5  # data, three strides, dtype
_NO_OPERAND = (0,) * _OPERAND
_TENSOR_ARG = struct.Struct("17q")  # TensorArg: data, size[8], stride[8]
_MAX_RANK = 8
_ARGS = struct.Struct(f"{8 * _OPERAND + 3 + 2 + 7 + 8 + 5 + 3 + 3 + 2}qd")
_INT64 = 1 << 63

Words = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bindings:
    """Captured tensors and numbers of a call in the form that kernels read, kept alive together.

    words: addresses of the TensorArg array, the reals and the integers.
    """

    words: Words
    num_tensors: int
    keep: tuple[object, ...]


def operand(tensor: torch.Tensor, batch: int) -> Words:
    """Words of an Operand; a tensor with one batch entry is read by all `batch` of them."""
    stride = tensor.stride()
    stride_b = stride[0] if tensor.size(0) == batch else 0
    return (tensor.data_ptr(), stride_b, stride[1], stride[2], DTYPE_CODES[tensor.dtype])


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its rows are contiguous, else a contiguous copy."""
    return tensor if tensor.stride(3) == 1 or tensor.size(3) == 1 else tensor.contiguous()


def bind(call: AttentionCall) -> Bindings:
    """Binding slots of a call: the score program's first, then the mask program's."""
    tensors: tuple[torch.Tensor, ...] = ()
    numbers: tuple[int | float, ...] = ()
    for bound in (call.score, call.mask):
        if bound is not None:
            tensors += bound.tensors
            numbers += bound.numbers
    table = b"".join(_tensor_arg(t) for t in tensors)
    reals = struct.pack(f"{len(numbers)}d", *numbers) if numbers else b""
    ints = struct.pack(f"{len(numbers)}q", *map(_as_int64, numbers)) if numbers else b""
    buffers = (_buffer(table), _buffer(reals), _buffer(ints))
    words = tuple(ctypes.addressof(b) for b in buffers)
    return Bindings(words, len(tensors), (buffers, tensors))


def _buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * max(8, len(data))).from_buffer(bytearray(data.ljust(8, b"\0")))


def _tensor_arg(tensor: torch.Tensor) -> bytes:
    pad = (0,) * (_MAX_RANK - tensor.dim())
    return _TENSOR_ARG.pack(tensor.data_ptr(), *tensor.shape, *pad, *tensor.stride(), *pad)


def _as_int64(number: int | float) -> int:
    """Truncated and saturated; 0 for what has no integer value."""
    if isinstance(number, float) and not math.isfinite(number):
        return 0
    return max(-_INT64, min(_INT64 - 1, int(number)))


def mask_words(blocks: BlockLists | None) -> Words:
    """Addresses and sizes of the block lists, zeros without any."""
    if blocks is None:
        return (0,) * 9
    return (
        blocks.row_offsets.data_ptr(),
        blocks.entries.data_ptr(),
        blocks.num_batches,
        blocks.num_heads,
        blocks.q_block,
        blocks.kv_block,
        blocks.q_len,
        blocks.q_offset,
        blocks.kv_offset,
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """What differs between forward, decode and backward.

    operands: words of query, key, value, out, dout, dq, dk, dv; empty where absent.
    rows: addresses of lse, max_scores and dlse, 0 where absent.
    grads: address of the table of gradient buffers, 0 without captured gradients.
    """

    operands: Sequence[Words]
    rows: tuple[int, int, int]
    schedule: Schedule
    grads: int = 0


class Arguments:
    """AttentionArgs in memory; `address` is what the kernel takes."""

    def __init__(self, call: AttentionCall, bound: Bindings, parts: Parts) -> None:
        query, key, value = call.query, call.key, call.value
        words: list[int] = []
        for block in parts.operands:
            words += block or _NO_OPERAND
        words += parts.rows
        words += mask_words(call.blocks)
        batch, heads, q_len, head_dim = query.shape
        words += (batch, key.size(0), heads, key.size(1), q_len, key.size(2))
        words += (head_dim, value.size(3), *bound.words, parts.grads, bound.num_tensors)
        threads = torch.get_num_threads()
        # A region costs a microsecond, and one thread needs none.
        words += (parallel_for() if threads > 1 else 0, threads, 0)
        plan = parts.schedule
        words += (plan.row_chunks, plan.head_chunks, plan.num_lanes, plan.num_splits, plan.fold)
        self._memory = bytearray(_ARGS.size)
        _ARGS.pack_into(self._memory, 0, *words, call.scale)
        self._array = (ctypes.c_char * _ARGS.size).from_buffer(self._memory)
        self.address = ctypes.addressof(self._array)
        self._keep = bound

    def set_workspace(self, address: int) -> None:
        struct.pack_into("q", self._memory, _WORKSPACE_OFFSET, address)


_WORKSPACE_OFFSET = _ARGS.size - 8 * 7


@functools.cache
def parallel_for() -> int:
    """Address of torch_parallel_for, a C symbol of torch's library since 2.10.

    Opening the library again by its path gives the copy that is already loaded.
    """
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            symbol = ctypes.CDLL(str(folder / name)).torch_parallel_for
            return ctypes.cast(symbol, ctypes.c_void_p).value or 0
    return 0
