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

DTYPE_CODES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float8_e4m3fn: 4,  # keys and values without gradients
    torch.float8_e5m2: 5,
}

_OPERAND = 5  # data, three strides, dtype
_NO_OPERAND = (0,) * _OPERAND
_TENSOR_ARG = struct.Struct("17q")  # TensorArg: data, size[8], stride[8]
_MAX_RANK = 8
_ARGS = struct.Struct(f"{8 * _OPERAND + 4 + 2 + 7 + 8 + 7 + 5 + 3 + 3 + 2}qd")
ARGS_BYTES = _ARGS.size
_INT64 = 1 << 63

Words = tuple[int, ...]


def operand(tensor: torch.Tensor, batch: int, in_pages: bool = False) -> Words:
    """Words of an Operand; a tensor with one batch entry is read by all `batch` of them.

    in_pages: its first dimension counts pages.
    """
    stride = tensor.stride()
    stride_b = stride[0] if tensor.size(0) == batch or in_pages else 0
    return (tensor.data_ptr(), stride_b, stride[1], stride[2], DTYPE_CODES[tensor.dtype])


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its rows are contiguous, else a contiguous copy."""
    return tensor if tensor.stride(3) == 1 or tensor.size(3) == 1 else tensor.contiguous()


def _pack_tensor(tensor: torch.Tensor, memory: bytearray, offset: int) -> None:
    pad = (0,) * (_MAX_RANK - tensor.dim())
    words = (tensor.data_ptr(), *tensor.shape, *pad, *tensor.stride(), *pad)
    _TENSOR_ARG.pack_into(memory, offset, *words)


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


def table_words(call: AttentionCall) -> Words:
    """Addresses and sizes of the page table, zeros without any; places for kernels' own."""
    table = call.table
    if table is None:
        return (0,) * 7
    counts, pages = table.counts, table.pages
    return (
        table.lengths.data_ptr(),
        0 if counts is None else counts.data_ptr(),
        0 if pages is None else pages.data_ptr(),
        0 if pages is None else pages.size(1),
        table.page_size,
        0,
        0,
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """What differs between forward, decode and backward.

    operands: words of query, key, value, out, dout, dq, dk, dv; empty where absent.
    rows: addresses of lse, max_scores, dlse and row_state, 0 where absent.
    grads: address of the table of gradient buffers, 0 without captured gradients.
    """

    operands: Sequence[Words]
    rows: tuple[int, int, int, int]
    schedule: Schedule
    grads: int = 0


class Arguments:
    """AttentionArgs in memory, followed by its TensorArgs and numbers.

    address: what the kernel takes; valid as long as this object lives.
    """

    def __init__(self, call: AttentionCall, parts: Parts) -> None:
        tensors, numbers = bindings(call)
        tensors_at = _ARGS.size
        reals_at = tensors_at + _TENSOR_ARG.size * len(tensors)
        ints_at = reals_at + 8 * len(numbers)
        self._memory = bytearray(ints_at + 8 * len(numbers))
        for i, tensor in enumerate(tensors):
            _pack_tensor(tensor, self._memory, tensors_at + _TENSOR_ARG.size * i)
        if numbers:
            struct.pack_into(f"{len(numbers)}d", self._memory, reals_at, *numbers)
            integers = map(_as_int64, numbers)
            struct.pack_into(f"{len(numbers)}q", self._memory, ints_at, *integers)
        self._start = ctypes.c_char.from_buffer(self._memory)
        self.address = address = ctypes.addressof(self._start)
        at = (address + tensors_at, address + reals_at, address + ints_at)
        _ARGS.pack_into(self._memory, 0, *_words(call, parts, at, len(tensors)), call.scale)

    def set_addresses(
        self,
        operands: Sequence[torch.Tensor],
        rows: tuple[torch.Tensor | None, ...],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Let these be the arguments of another call, of tensors of the same form.

        Args:
            operands, rows: in the order of `Parts`. tensors: captured ones.
        """
        memory = self._memory
        for place, tensor in enumerate(operands):
            _WORD.pack_into(memory, 8 * _OPERAND * place, tensor.data_ptr())
        found = [0 if tensor is None else tensor.data_ptr() for tensor in rows]
        _ROWS.pack_into(memory, _ROWS_OFFSET, *found)
        for place, tensor in enumerate(tensors):
            at = _ARGS.size + _TENSOR_ARG.size * place
            _WORD.pack_into(memory, at, tensor.data_ptr())

    def set_workspace(self, address: int) -> None:
        _WORD.pack_into(self._memory, _WORKSPACE_OFFSET, address)


# Words after the workspace: five of the schedule and the scale.
_WORKSPACE_OFFSET = _ARGS.size - 8 * 7
_ROWS_OFFSET = 8 * 8 * _OPERAND  # behind eight operands
_WORD, _ROWS = struct.Struct("q"), struct.Struct("4q")


def _words(
    call: AttentionCall, parts: Parts, binding_addresses: Words, num_tensors: int
) -> list[int]:
    """Fields of AttentionArgs in order, but for the scale."""
    key = call.key
    words: list[int] = []
    for block in parts.operands:
        words += block or _NO_OPERAND
    words += parts.rows
    words += mask_words(call.blocks)
    batch, heads, q_len, head_dim = call.query.shape
    words += (batch, call.kv_batch, heads, key.size(1), q_len, call.kv_len)
    words += (head_dim, call.value.size(3), *table_words(call))
    words += (*binding_addresses, parts.grads, num_tensors)
    plan = parts.schedule
    words += (parallel_for() if plan.num_threads > 1 else 0, plan.num_threads, 0)
    words += (plan.row_chunks, plan.head_chunks, plan.num_lanes, plan.num_splits, plan.fold)
    return words


def bindings(call: AttentionCall) -> tuple[tuple[torch.Tensor, ...], tuple[int | float, ...]]:
    """Captured tensors and numbers by slot: the score program's first, then the mask program's."""
    score, mask = call.score, call.mask
    if score is None:
        return ((), ()) if mask is None else (mask.tensors, mask.numbers)
    if mask is None:
        return score.tensors, score.numbers
    return score.tensors + mask.tensors, score.numbers + mask.numbers


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
