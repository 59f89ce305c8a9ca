"""Live blocks as the kernels of the backward read them: of the transposed mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnloom.backends.gluon.configs_backward import KEYS, STEP, TILE_KEYS
from attnloom.backends.gluon.merged_lists import merged_lists
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import list_launches
from attnloom.backends.triton.lists import remembered, work_lists
from attnloom.backends.triton.packed import pack_ints
from attnloom.backends.triton.transposed import transposed_lists
from attnloom.block_mask import BlockLists

_NO_LISTS = (0.0,) * 12
_NO_ROWS = (0.0,) * 10
_PIECES = 3  # of a tile


@dataclass(frozen=True, slots=True)
class SweptLists:
    """What programs that sweep over a head's keys read (backward_sweep.py).

    entries: those of the transposed lists, q_block * 8 + 4 for its last keys + 2 for its first +
        partial, and one more. window: [1] int32, rows. rows: [rows + 1] int32, row_offsets.
    """

    entries: torch.Tensor
    window: torch.Tensor
    rows: torch.Tensor


def key_lists(call: AttentionCall, sweeps: bool = False) -> tuple[Any, ...]:
    """`lists` of backward_kernel and wide_kernel."""
    blocks = call.blocks
    if blocks is None:
        return _NO_LISTS
    turned = transposed_lists(blocks)
    num_key_blocks = pack_ints((turned.blocks.grid.num_q_blocks,))
    work = work_lists(turned.blocks, KEYS)
    if sweeps:
        swept = swept_lists(blocks)
        return turned.offsets, swept.entries, swept.window, *work.steps, *num_key_blocks
    entries = turned.blocks.entries
    # a kernel needs an address, also to read nothing from
    entries = entries if entries.numel() else entries.new_zeros(1)
    return turned.offsets, entries, work.work, *work.steps, *num_key_blocks


def tile_lists(call: AttentionCall) -> tuple[Any, ...]:
    """`lists` of roles_kernel, of tiles of TILE_KEYS: (first entry and last + 1 of each tile,
    entries of merged_lists.py, work, batch step, head step, twice the tiles)."""
    blocks = call.blocks
    if blocks is None:
        return _NO_LISTS
    turned = transposed_lists(blocks).blocks
    found = merged_lists(turned, _PIECES, TILE_KEYS // _PIECES)
    num_bounds = pack_ints((2 * found.work.size(1),))
    return found.bounds, found.entries, found.work, *found.steps, *num_bounds


def expected_tile_lists(call: AttentionCall) -> tuple[Any, ...]:
    """Of the types that `tile_lists` has."""
    if call.blocks is None:
        return _NO_LISTS
    entries = call.blocks.entries
    return call.blocks.row_offsets, entries, entries, *_NO_LISTS[3:]


def expected_key_lists(call: AttentionCall) -> tuple[Any, ...]:
    """Of the types that `key_lists` has, to compile for before lists are derived."""
    if call.blocks is None:
        return _NO_LISTS
    entries = call.blocks.entries
    return entries, entries, entries, *_NO_LISTS[3:]


def row_lists(call: AttentionCall, sweeps: bool) -> tuple[Any, ...]:
    """`rows` of prepare_kernel."""
    blocks = call.blocks
    if blocks is None or not sweeps:
        return _NO_ROWS
    grid = blocks.grid
    batch_step = grid.num_heads if grid.num_batches > 1 else 0
    steps = pack_ints((batch_step, 1 if grid.num_heads > 1 else 0, grid.num_q_blocks))
    return swept_lists(blocks).rows, *steps


def expected_row_lists(call: AttentionCall, sweeps: bool) -> tuple[Any, ...]:
    """Of the types that `row_lists` has."""
    return (call.blocks.entries, *_NO_ROWS[1:]) if call.blocks and sweeps else _NO_ROWS


def most_rows(blocks: BlockLists) -> int:
    """No window has more."""
    return 1 << (_slack(blocks) + blocks.grid.num_q_blocks * blocks.q_block - 1).bit_length()


def _slack(blocks: BlockLists) -> int:
    """Rows of dq are counted through all heads: a block of them may start anywhere."""
    return STEP if blocks.q_len % STEP else 0


def swept_lists(blocks: BlockLists) -> SweptLists:
    """The lists of a mask; computed once a mask, without waiting for the device."""
    return remembered(_sweep, blocks)


def _sweep(blocks: BlockLists) -> SweptLists:
    needed = list_launches.turning(sweeps=True)
    if not (list_launches.takes(blocks) and list_launches.are_at_hand(needed)):
        return swept_by_sort(blocks)
    entries, _, _, window = list_launches.turn(blocks, slack=_slack(blocks))
    return SweptLists(entries, window, blocks.row_offsets.int())


def swept_by_sort(blocks: BlockLists) -> SweptLists:
    """SweptLists by torch's operators."""
    grid, offsets = blocks.grid, blocks.row_offsets
    row, partial, key_block = blocks.entry_rows(), blocks.entries & 1, blocks.entries >> 1
    place = torch.arange(row.numel(), device=row.device)
    first, last = place == offsets[row], place == offsets[row + 1] - 1
    block = row % grid.num_q_blocks
    ends = block * 8 + last * 4 + first * 2 + partial
    column = row // grid.num_q_blocks * grid.num_kv_blocks + key_block
    order = column.argsort(stable=True)
    entries = torch.zeros(row.numel() + 1, dtype=torch.int32, device=row.device)
    entries[:-1] = ends[order].int()
    # blocks that are open while a tile of keys is visited: from `low` to `high` at most
    num_columns = grid.num_batches * grid.num_heads * grid.num_kv_blocks
    # one that sees a single tile leaves nothing, but for steps past Q_LEN
    kept = ~(first & last) | (block == grid.num_q_blocks - 1)
    high = _extreme(num_columns, column, block, first & kept, "amax", -1)
    low = _extreme(num_columns, column, block, last & kept, "amin", grid.num_q_blocks)
    high = high.view(-1, grid.num_kv_blocks).cummax(1).values
    low = low.view(-1, grid.num_kv_blocks).flip(1).cummin(1).values.flip(1)
    rows = (high - low + 1).amax().clamp(min=1) * blocks.q_block + _slack(blocks)
    powers = 2 ** torch.arange(31, device=row.device)
    window = powers.take(torch.searchsorted(powers, rows))  # an index would be read on the host
    return SweptLists(entries, window.int().view(1), offsets.int())


def _extreme(
    size: int, at: torch.Tensor, values: torch.Tensor, live: torch.Tensor, which: str, none: int
) -> torch.Tensor:
    """Of the live values at each place; `none` where there are none."""
    found = torch.full((size,), none, dtype=values.dtype, device=values.device)
    return found.scatter_reduce(0, at, torch.where(live, values, none), which)
