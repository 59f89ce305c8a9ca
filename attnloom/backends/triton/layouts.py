"""What the sizes of a call prove about captured tensors; fragments then read them with less.

A layout has one letter for the tensor

    n   64-bit integers, all within +-2**29: 32-bit lanes hold them, and whatever Target.wide has
        proved of what is computed from them (ir/passes/bounds.py)
    -   anything else

and three for each dimension:

    i   every index is a position, q or kv, and in no lane of a tile outside the tensor: neither
        clamped nor wrapped. Clamping hides from the compiler that neighbours are neighbours.
    -   anything else
    1   stride 1
    v   the stride is a multiple of 16 bytes
    -   anything else
    m   the size is a multiple of 16, and the dimension the last of several: rows of a gradient,
        which lies contiguous, are whole vectors
    -   anything else

A [B, H, Q, KV] bias of whole tiles is "--v--v-iv-i1m", and is read in vectors. Facts that are of no
use alone are left out, or each would compile a kernel more as sizes change: v and m are said
together, of a tensor whose rows are whole vectors, and so is the i of neighbours. Of a tensor that
is not read for each score they are said where tiles are inside alone, as nothing else is read in
vectors.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.configs import MAX_TILE
from attnloom.ir.node import Axes, BoundProgram, Program

VECTOR_BYTES = 16
_MULTIPLE = 16
_NARROW = 2**29
_MAX_SCANNED = 1 << 24
_UNKNOWN_LENGTH = 1 << 62
Layouts = tuple[str, ...]
UNKNOWN = "---"
_LIMIT = 4096
_known: dict[tuple[object, ...], Layouts] = {}
_matters: dict[str, bool] = {}  # by program digest: whether there is anything to prove


@dataclass(frozen=True, slots=True)
class _Spans:
    """First and one past the last position that any lane of a kernel may have."""

    q: tuple[int, int]
    kv: tuple[int, int]

    @staticmethod
    def of(call: AttentionCall, offsets: tuple[int, int], rows: int) -> _Spans:
        """rows: of queries in a tile, where no power of two."""
        sides = [1, 1] if call.blocks is None else [call.blocks.q_block, call.blocks.kv_block]
        lengths = call.query.size(2), call.key.size(2)
        if call.table is not None:
            lengths = _UNKNOWN_LENGTH, _UNKNOWN_LENGTH  # the lengths are in the device's memory
        ends = (
            offset + -(-length // side) * side
            for offset, length, side in zip(
                offsets, lengths, (max(side, MAX_TILE) for side in sides), strict=True
            )
        )
        q, kv = zip(offsets, ends, strict=True)
        return _Spans((q[0], max(q[1], offsets[0] + -(-lengths[0] // rows) * rows)), kv)


def score_layouts(call: AttentionCall, rows: int = MAX_TILE) -> Layouts:
    """Of the tensors that the score_mod captures. rows: of queries in a tile, if none of those of
    configs.py."""
    return _layouts(call.score, call, (0, 0), rows)


def mask_layouts(call: AttentionCall) -> Layouts:
    """Of the tensors that the mask_mod captures."""
    blocks = call.blocks
    offsets = (0, 0) if blocks is None else (blocks.q_offset, blocks.kv_offset)
    return _layouts(call.mask, call, offsets, MAX_TILE)


def _layouts(
    bound: BoundProgram | None, call: AttentionCall, offsets: tuple[int, int], rows: int
) -> Layouts:
    if bound is None or not bound.tensors:
        return ()
    digest = bound.program.digest
    if digest not in _matters:
        _matters[digest] = _reads_by_position(bound.program)
    if not _matters[digest]:
        return ()
    blocks = call.blocks
    key = (
        digest,
        offsets,
        rows,
        call.query.size(2),
        call.key.size(2),
        None if blocks is None else (blocks.q_block, blocks.kv_block),
        call.table is None,
        *[(t.shape, t.stride(), is_narrow_now(t)) for t in bound.tensors],
    )
    found = _known.get(key)
    if found is None:
        if len(_known) >= _LIMIT:
            _known.clear()
        spans = _Spans.of(call, offsets, rows)
        found = _known[key] = tuple(
            _layout(bound, slot, spans) for slot in range(len(bound.tensors))
        )
    return found


def _reads_by_position(program: Program) -> bool:
    """Whether a load has a position for an index, or 64-bit integers for elements."""
    return any(spec.dtype is torch.int64 for spec in program.tensors) or any(
        position_name(program, index) in ("q", "kv")
        for node in program.nodes
        if node.op == "load"
        for index in node.args
    )


def _layout(bound: BoundProgram, slot: int, spans: _Spans) -> str:
    tensor = bound.tensors[slot]
    if not tensor.numel():
        return "-" + UNKNOWN * tensor.dim()  # kernels are given another, see arguments.bind
    unit = VECTOR_BYTES // tensor.element_size()
    fits = [
        all(_fits(name, size, spans) for name in _names(bound.program, slot, dim))
        for dim, size in enumerate(tensor.shape)
    ]
    steps, is_table = tensor.stride(), tensor.dim() > 1
    in_vectors = (
        1 in steps
        and all(step == 1 or step % unit == 0 for step in steps)
        and not (is_table and tensor.size(-1) % _MULTIPLE)
        and (
            _is_read_for_each_score(bound.program, slot)
            or any(inside and step == 1 for inside, step in zip(fits, steps, strict=True))
        )
    )
    text = "n" if is_narrow_now(tensor) else "-"
    for inside, step in zip(fits, steps, strict=True):
        text += "i" if inside and (in_vectors or step != 1) else "-"
        text += "1" if step == 1 else "v" if in_vectors else "-"
        text += "-"
    return text[:-1] + "m" if in_vectors and is_table else text


def _is_read_for_each_score(program: Program, slot: int) -> bool:
    return any(
        node.op == "load" and node.attr == slot and axes & Axes.Q and axes & Axes.KV
        for node, axes in zip(program.nodes, program.axes, strict=True)
    )


def _fits(name: str | None, size: int, spans: _Spans) -> bool:
    if name not in ("q", "kv"):
        return False
    first, end = spans.q if name == "q" else spans.kv
    return first >= 0 and end <= size


def _names(program: Program, slot: int, dim: int) -> set[str | None]:
    """What indexes a dimension of a captured tensor: positions by name, None for anything else."""
    return {
        position_name(program, node.args[dim])
        for node in program.nodes
        if node.op == "load" and node.attr == slot
    }


def letters(layouts: Layouts, slot: int, dim: int) -> str:
    """The three letters of a dimension; UNKNOWN without layouts."""
    return layouts[slot][3 * dim + 1 : 3 * dim + 4] if layouts else UNKNOWN


def is_narrow(layouts: Layouts, slot: int) -> bool:
    return bool(layouts) and layouts[slot][0] == "n"


def elements_only(layouts: Layouts) -> Layouts:
    """What layouts say of elements; nothing of where they lie, for tiles of other sizes."""
    return tuple(text[0] + "-" * (len(text) - 1) for text in layouts)


# id of a tensor -> its version when it was looked at, and what was found
_ranges: dict[int, tuple[int, bool]] = {}


def is_narrow_now(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds 64-bit integers within +-_NARROW. Waits for the device once a tensor
    and version; while a CUDA graph is captured, what is not known yet counts as wide."""
    if tensor.dtype is not torch.int64:
        return False
    key = id(tensor)
    known = _ranges.get(key)
    if known is not None and known[0] == tensor._version:
        return known[1]
    if tensor.is_inference():
        return False  # writes to it are not counted
    version = tensor._version
    if not 0 < tensor.numel() <= _MAX_SCANNED:
        return False
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    low, high = torch.stack(torch.aminmax(tensor)).tolist()
    found = low >= -_NARROW and high <= _NARROW
    if known is None:
        weakref.finalize(tensor, _ranges.pop, key, None)
    _ranges[key] = version, found
    return found


def position_name(program: Program, index: int) -> str | None:
    """b, h, q or kv if a node is that position, cast or not."""
    node = program.nodes[index]
    while node.op == "cast":
        node = program.nodes[node.args[0]]
    return str(node.attr) if node.op == "input" else None
