"""Builds the lists of a mask on the device: what masking/classify.py does, in a few launches.

Intervals are asked of every tile: 2^20 tiles (131,072 x 131,072 tokens) take some 10 microseconds
on an H200, less than one more launch. The host waits once, for the number of live tiles. Memory
beyond the lists: a byte a tile, 12 bytes a chunk of up to 128 tiles, and 16 bytes a block for each
one-sided part of the mask.

Left to `classify`: more than _MOST_TILES tiles, which it decides coarse to fine, and blocks above
_LARGEST_BLOCK tokens, which are few and whose scores it evaluates with the whole device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from triton.runtime.jit import JITFunction

from attnloom.backends.cpu.widths import mask_needs_wide_ints
from attnloom.backends.triton.arguments import bind, reaches_far
from attnloom.backends.triton.choice import keep
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.current import on_device
from attnloom.backends.triton.emit import Target
from attnloom.backends.triton.emit_ranges import Sides, emit_ranges
from attnloom.backends.triton.fragments import load_module, mask_fragment
from attnloom.backends.triton.launcher import Launcher, are_aligned
from attnloom.backends.triton.mask_kernels import (
    code_kernel,
    settle_kernel,
    summary_kernel,
    write_kernel,
)
from attnloom.backends.triton.packed import pack_ints
from attnloom.ir.node import BoundProgram
from attnloom.masking.classify import looked_at
from attnloom.masking.lists import BlockLists, TileGrid, lists_of
from attnloom.masking.summaries import one_sided_nodes

_MOST_TILES = 1 << 27
_LARGEST_BLOCK = 1024
_LARGEST_CHUNK = 128
_SMALLEST_CHUNK = 16
_FEW_PROGRAMS = 2048  # below it programs take fewer tiles, so that all processors have some
_PIECE_LANES = 4096
_PIECE_WIDTH = 128
_SETTLERS = 4093  # programs: a prime, which no number of blocks in a row is a multiple of
_LOOK = 512


@dataclass(frozen=True, repr=False)
class MaskConfig(KernelConfig):
    """What the kernels are compiled for; see the glossary of mask_kernels.py."""

    Q_BLOCK: int
    KV_BLOCK: int
    CHUNK: int
    PIECE_M: int
    PIECE_N: int
    HAS_ROWS: bool
    HAS_COLUMNS: bool
    UNDECIDED: int
    LOOK: int
    RANGES: JITFunction
    ROWS: JITFunction | None
    COLUMNS: JITFunction | None
    MASK_HEAD: JITFunction
    MASK_ROW: JITFunction
    MASK_BODY: JITFunction

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, repr=False)
class WriteConfig(KernelConfig):
    """Of write_kernel alone, which is the same for all masks."""

    CHUNK: int
    SEPARATE_FULL: bool

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, slots=True)
class _Ready:
    """Launches for masks of one structure and size. summary: None without one-sided parts. settle:
    None where nothing stays open."""

    summary: Launcher | None
    code: Launcher
    settle: Launcher | None
    num_parts: tuple[int, int]
    num_chunks: int
    chunk: int
    sizes: tuple[float, ...]


_ready: dict[tuple[object, ...], _Ready] = {}
_writers: dict[tuple[object, ...], Launcher] = {}


def build(
    bound: BoundProgram, grid: TileGrid, device: torch.device, separate_full: bool = True
) -> BlockLists | None:
    """What `classify` returns for the same arguments; None where it should be asked."""
    grid = looked_at(bound, grid)
    if not _takes(grid):
        return None
    with on_device(device):
        ready = _find(bound, grid, device)
        codes, counts = _classify(ready, bound, grid, device)
        offsets = torch.cumsum(counts, 0)
        if grid.num_batches * grid.num_heads == 1:
            total = int(offsets[-1])
        else:
            grid, codes, offsets, total = _share(grid, codes, counts, offsets)
        return _write(ready, grid, codes, offsets, total, separate_full)


def _takes(grid: TileGrid) -> bool:
    tiles = grid.num_rows * grid.num_kv_blocks
    return 0 < tiles <= _MOST_TILES and max(_sides(grid)) <= _LARGEST_BLOCK


def _sides(grid: TileGrid) -> tuple[int, int]:
    """Sides of a tile; of a block that overhangs, no more than a short length has a use for."""
    return tuple(  # type: ignore[return-value]
        min(block, _LARGEST_BLOCK) if length <= _LARGEST_BLOCK else block
        for block, length in ((grid.q_block, grid.q_len), (grid.kv_block, grid.kv_len))
    )


def _find(bound: BoundProgram, grid: TileGrid, device: torch.device) -> _Ready:
    sizes = (grid.num_batches, grid.num_heads, grid.q_len, grid.kv_len)
    wide = mask_needs_wide_ints(bound, sizes) or reaches_far(bound)
    key = (bound.program.digest, wide, grid, device)
    found = _ready.get(key)
    if found is None:
        found = _prepare(bound, grid, Target(wide=wide, exact=True))
        keep(_ready, key, found)
    return found


def _prepare(bound: BoundProgram, grid: TileGrid, target: Target) -> _Ready:
    program = bound.program
    sides = Sides.of(program)
    ranges, mask = load_module(emit_ranges(program, target)), mask_fragment(program, target)
    chunk = _chunk(grid)
    num_chunks = -(-grid.num_kv_blocks // chunk)
    units = grid.num_batches * grid.num_heads
    q_block, kv_block = _sides(grid)
    width = min(kv_block, _PIECE_WIDTH)
    # where ranges are exact, what they leave open is mixed
    is_mixed = program.outputs[0] in one_sided_nodes(program)
    config = MaskConfig(
        Q_BLOCK=q_block,
        KV_BLOCK=kv_block,
        CHUNK=chunk,
        PIECE_M=min(q_block, _PIECE_LANES // width),
        PIECE_N=width,
        HAS_ROWS=bool(sides.rows),
        HAS_COLUMNS=bool(sides.columns),
        UNDECIDED=1 if is_mixed else 3,
        LOOK=_LOOK,
        RANGES=ranges.ranges,
        ROWS=getattr(ranges, "rows_summary", None),
        COLUMNS=getattr(ranges, "columns_summary", None),
        MASK_HEAD=mask.head,
        MASK_ROW=mask.row,
        MASK_BODY=mask.body,
    )
    blocks = bool(sides.rows) * grid.num_q_blocks + bool(sides.columns) * grid.num_kv_blocks
    settlers = min(_SETTLERS, grid.num_rows * grid.num_kv_blocks)
    warps = {"num_warps": 4 if max(q_block, kv_block) > 128 else 1}
    return _Ready(
        Launcher(summary_kernel, config, units * blocks, warps) if blocks else None,
        Launcher(code_kernel, config, grid.num_rows * num_chunks, {"num_warps": 4}),
        None if is_mixed else Launcher(settle_kernel, config, settlers, {"num_warps": 1}),
        (len(sides.rows), len(sides.columns)),
        num_chunks,
        chunk,
        _sizes(grid, num_chunks),
    )


def _chunk(grid: TileGrid) -> int:
    chunk = _LARGEST_CHUNK
    while chunk > _SMALLEST_CHUNK and (
        chunk // 2 >= grid.num_kv_blocks
        or grid.num_rows * -(-grid.num_kv_blocks // chunk) < _FEW_PROGRAMS
    ):
        chunk //= 2
    return chunk


def _sizes(grid: TileGrid, num_chunks: int) -> tuple[float, ...]:
    return pack_ints(
        (
            grid.num_batches * grid.num_heads,
            grid.num_heads,
            grid.q_len,
            grid.kv_len,
            grid.num_q_blocks,
            grid.num_kv_blocks,
            num_chunks,
        )
    )


def _classify(
    ready: _Ready, bound: BoundProgram, grid: TileGrid, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of all tiles, and a zero followed by the live tiles of each chunk."""
    args = bind(bound)
    aligned = are_aligned(bound.tensors)
    units = grid.num_batches * grid.num_heads
    codes = torch.empty(grid.num_rows * grid.num_kv_blocks, dtype=torch.int8, device=device)
    counts = torch.empty(grid.num_rows * ready.num_chunks + 1, dtype=torch.int32, device=device)
    tables = counts, counts  # a kernel needs addresses, also to read nothing from
    if ready.summary is not None:
        blocks = (grid.num_q_blocks, grid.num_kv_blocks)
        tables = tuple(
            torch.empty(max(2 * parts * units * n, 1), dtype=torch.int64, device=device)
            for parts, n in zip(ready.num_parts, blocks, strict=True)
        )
        ready.summary(aligned, *tables, args, ready.sizes)
    ready.code(aligned, codes, counts, *tables, args, ready.sizes)
    if ready.settle is not None:
        ready.settle(aligned, codes, counts, args, ready.sizes)
    return codes, counts


def _share(
    grid: TileGrid, codes: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor
) -> tuple[TileGrid, torch.Tensor, torch.Tensor, int]:
    """Keep one head and one batch entry where all are equal; still one wait for the device.

    Returns:
        grid, codes, offsets and number of live tiles of what is kept.
    """
    B, H = grid.num_batches, grid.num_heads
    by_unit = codes.view(B, H, -1)
    chunks = (counts.numel() - 1) // (B * H)
    facts = torch.cat(
        [
            (by_unit == by_unit[:, :1]).all().view(1).long(),
            (by_unit == by_unit[:1]).all().view(1).long(),
            offsets[::chunks],
        ]
    ).tolist()
    equal_heads, equal_batches, *ends = facts
    kept_b, kept_h = (1 if equal_batches else B), (1 if equal_heads else H)
    if kept_b * kept_h == B * H:
        return grid, codes, offsets, ends[-1]
    kept_counts = counts[1:].view(B, H, chunks)[:kept_b, :kept_h].flatten()
    offsets = torch.nn.functional.pad(torch.cumsum(kept_counts, 0), (1, 0))
    total = sum(ends[b * H + h + 1] - ends[b * H + h] for b in range(kept_b) for h in range(kept_h))
    grid = replace(grid, num_batches=kept_b, num_heads=kept_h)
    return grid, by_unit[:kept_b, :kept_h].flatten(), offsets, total


def _write(
    ready: _Ready,
    grid: TileGrid,
    codes: torch.Tensor,
    offsets: torch.Tensor,
    total: int,
    separate_full: bool,
) -> BlockLists:
    device = codes.device
    entries = torch.empty(total, dtype=torch.int32, device=device)
    row_offsets = torch.empty(grid.num_rows + 1, dtype=torch.int64, device=device)
    programs = grid.num_rows * ready.num_chunks
    key = (ready.chunk, separate_full, programs, device)
    launch = _writers.get(key)
    if launch is None:
        config = WriteConfig(ready.chunk, separate_full)
        launch = Launcher(write_kernel, config, programs, {"num_warps": 1})
        keep(_writers, key, launch)
    launch(True, entries, row_offsets, codes, offsets, ready.sizes)
    return lists_of(grid, row_offsets, entries)
