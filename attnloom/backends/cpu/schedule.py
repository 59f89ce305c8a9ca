"""How a call is split into tasks: which kernel, how many shares, whose gradients need copies.

Everything depends on shapes and the number of threads only, so that results repeat.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnloom.backends.cpu.forks import threads_lost
from attnloom.backends.registry import AttentionCall
from attnloom.ir.node import BoundProgram, Program

TILE_M = 64
DECODE_ROWS = 16
DECODE_KEYS = 64
# Lanes a thread: more even out unequal tasks, each costs a copy of the captured gradients.
_LANES_PER_THREAD = 4
_SMALL_COPIES_BYTES = 8 << 20
_COPIES_BYTES = 32 << 20
_PARTS_BYTES = 64 << 20
_SERIAL_PRODUCTS = 1 << 20  # multiply-adds: about 10 us on one core


@dataclass(frozen=True, slots=True)
class Schedule:
    """Fields of AttentionArgs of the same names; see `kernels/args.h`."""

    num_threads: int = 1
    row_chunks: int = 1
    head_chunks: int = 1
    num_lanes: int = 1
    num_splits: int = 1
    fold: int = 1


@dataclass(frozen=True, slots=True)
class BackwardSchedule:
    """A schedule, and for each captured tensor that wants a gradient how many buffers it gets:
    one that all lanes write disjoint parts of, or one a lane."""

    schedule: Schedule
    copies: dict[int, int]


def num_threads(call: AttentionCall) -> int:
    """torch's number of threads, but one for a problem that is done before a second wakes up."""
    if threads_lost():
        return 1
    query = call.query
    width = query.size(3) + call.value.size(3)
    if query.numel() // max(1, query.size(3)) * call.kv_len * width < _SERIAL_PRODUCTS:
        return 1
    return torch.get_num_threads()


def decode_schedule(call: AttentionCall, threads: int) -> Schedule | None:
    """Schedule of the decode kernel, or None where rows are too many for it."""
    batch, heads, q_len, _ = call.query.shape
    if q_len > DECODE_ROWS:
        return None
    group = heads // call.key.size(1)
    fold = 1
    if call.blocks is None or call.blocks.num_heads == 1:
        fold = max(f for f in range(1, group + 1) if group % f == 0 and f * q_len <= DECODE_ROWS)
    units = batch * heads // fold
    tiles = -(-call.kv_len // DECODE_KEYS)
    splits = min(-(-4 * threads // max(1, units)), max(1, tiles // 2))
    return Schedule(threads, num_splits=splits, fold=fold)


def backward_schedule(call: AttentionCall, threads: int) -> BackwardSchedule:
    """Split a backward into tasks and lanes.

    A lane runs its tasks in order, so lanes alone need private buffers; none are needed for a
    tensor whose elements belong to one lane each (a bias read at [h, q, kv], say).
    """
    batch, heads, q_len, _ = call.query.shape
    kv_heads = call.key.size(0) * call.key.size(1)
    shape = _Shape(kv_heads, batch * heads // max(1, kv_heads), _row_tiles(call), threads)
    slots = gradient_slots(call.score)
    if not slots or call.score is None:
        return BackwardSchedule(_free(shape, _part_bytes(call)), {})
    owned = {slot: _owned_axes(call.score, slot, (batch, heads, q_len)) for slot in slots}
    distinct = {axis for axis, size in (("b", batch), ("h", heads)) if size > 1}
    by_head = {slot for slot, axes in owned.items() if distinct <= axes}
    by_row = {slot for slot, axes in owned.items() if "q" in axes}
    if by_head == by_row == set(slots):
        return BackwardSchedule(_free(shape, _part_bytes(call)), dict.fromkeys(slots, 1))
    if by_row == set(slots):
        lanes = min(threads * _LANES_PER_THREAD, shape.row_tiles)
        return BackwardSchedule(
            Schedule(threads, row_chunks=lanes, num_lanes=lanes), dict.fromkeys(slots, 1)
        )
    if by_head == set(slots) and kv_heads >= threads:
        return BackwardSchedule(Schedule(threads, num_lanes=kv_heads), dict.fromkeys(slots, 1))
    return _with_copies(call, shape, slots)


def gradient_slots(score: BoundProgram | None) -> tuple[int, ...]:
    """Slots of captured tensors that want a gradient."""
    if score is None:
        return ()
    return tuple(i for i, spec in enumerate(score.program.tensors) if spec.requires_grad)


@dataclass(frozen=True, slots=True)
class _Shape:
    """kv_heads: independent tasks. queries: query heads of each. row_tiles: of a query head."""

    kv_heads: int
    queries: int
    row_tiles: int
    threads: int


def _row_tiles(call: AttentionCall) -> int:
    rows = TILE_M if call.blocks is None else min(TILE_M, call.blocks.q_block)
    return max(1, -(-call.query.size(2) // rows))


def _part_bytes(call: AttentionCall) -> int:
    """Bytes of one share of the key and value gradients, over all key heads."""
    return 4 * (call.key.numel() + call.value.numel())


def _free(shape: _Shape, part_bytes: int) -> Schedule:
    """Every task a lane; split heads only as far as the threads would idle otherwise."""
    limit = max(1, min(shape.row_tiles * shape.queries, _PARTS_BYTES // max(1, part_bytes)))
    chunks = 1
    while chunks < limit and _idle_share(shape.kv_heads * chunks, shape.threads) > 0.1:
        chunks += 1
    row_chunks = min(chunks, shape.row_tiles)
    head_chunks = min(-(-chunks // row_chunks), shape.queries)
    return Schedule(
        shape.threads, row_chunks, head_chunks, shape.kv_heads * row_chunks * head_chunks
    )


def _idle_share(tasks: int, threads: int) -> float:
    """Part of the threads' time that is lost if equal tasks are drawn one by one."""
    rounds = -(-tasks // threads)
    return 1 - tasks / (rounds * threads)


def _with_copies(call: AttentionCall, shape: _Shape, slots: tuple[int, ...]) -> BackwardSchedule:
    """A few lanes, each with buffers of its own for every captured gradient."""
    assert call.score is not None
    dtypes = (call.query.dtype, call.key.dtype, call.value.dtype)
    element_bytes = 8 if torch.float64 in dtypes else 4
    one = element_bytes * sum(call.score.tensors[slot].numel() for slot in slots)
    lanes = 1 if shape.threads == 1 else shape.threads * _LANES_PER_THREAD
    if lanes * one > _SMALL_COPIES_BYTES:
        lanes = min(shape.threads, max(1, _COPIES_BYTES // one))
    chunks = 1 if shape.kv_heads % lanes == 0 else min(lanes, shape.row_tiles)
    lanes = max(1, min(lanes, shape.kv_heads * chunks))
    schedule = Schedule(shape.threads, row_chunks=chunks, num_lanes=lanes)
    return BackwardSchedule(schedule, dict.fromkeys(slots, lanes))


def _owned_axes(score: BoundProgram, slot: int, extents: tuple[int, int, int]) -> set[str]:
    """Axes among b, h, q that name a dimension of the tensor in every load of it: positions that
    differ there touch different elements. A dimension shorter than the axis is clamped, so no."""
    sizes: dict[str, int] = dict(zip(("b", "h", "q"), extents, strict=True))
    tensor: torch.Tensor = score.tensors[slot]
    return {
        axis for axis, dim in _plain_dims(score.program, slot) if tensor.size(dim) >= sizes[axis]
    }


def _plain_dims(program: Program, slot: int) -> frozenset[tuple[str, int]]:
    """(axis, dimension) pairs by which every load of a slot is indexed with the bare position."""
    common: frozenset[tuple[str, int]] | None = None
    for node in program.nodes:
        if node.op != "load" or node.attr != slot:
            continue
        inputs = ((program.nodes[arg], dim) for dim, arg in enumerate(node.args))
        plain = frozenset(
            (str(leaf.attr), dim)
            for leaf, dim in inputs
            if leaf.op == "input" and leaf.attr in ("b", "h", "q")
        )
        common = plain if common is None else common & plain
    return common or frozenset()
