"""Boxes of keys that the Gluon forward loads for a mask's lists, against its scores one by one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnloom import create_block_mask
from attnloom.backends.gluon import forward_load
from attnloom.backends.triton.lists import work_lists
from attnloom.block_mask import BlockLists
from tests.kernels.gluon_protocol import MODULES
from tests.kernels.gluon_values import Int, Pointer
from tests.kernels.gluon_world import World, held, stand_ins

TILE_M, BOX = 128, 32
Mask = Callable[..., Any]


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 200)


def sinks_by_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & ((q - kv < 70 * (h + 1)) | (kv < 3 + 300 * b))


def some_rows(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q // 200 % 2 == 1) & (kv < 500)


def tiles_of(blocks: BlockLists) -> list[tuple[int, int, list[tuple[tuple[int, ...], int]]]]:
    """(unit, tile, its steps: rows of their boxes, and whether the mask is asked)."""
    cfg = SimpleNamespace(
        HAS_LISTS=True, HAS_MASK=True, STRIPS=True, BOX=BOX, TILE_N=3 * BOX,
        SUB=blocks.kv_block // BOX,
    )  # fmt: skip
    ragged = blocks.kv_len % blocks.kv_block
    overhang = blocks.kv_len // blocks.kv_block if ragged else -1
    work = work_lists(blocks, TILE_M).work
    units, num_tiles = blocks.num_batches * blocks.num_heads, work.size(1)
    lists = (Pointer(blocks.entries.tolist()), Pointer(work.flatten().tolist()), Int(0), Int(1))
    plan = tuple(map(Int, (units, 1, num_tiles, units, units, 0, units * num_tiles, 1, overhang)))
    steps: list[tuple[tuple[int, ...], int]] = []

    def note(k: Any, v: Any, mem: Any, b: Any, h: Any, rows: Any, flag: Any, *rest: Any) -> None:
        steps.append((tuple(map(int, rows)), int(flag)))

    found = []
    with held(MODULES, stand_ins(World(0), 1, (*MODULES,)) | {"_load_three": note}):
        load = dict(vars(forward_load))
        for t in range(units * num_tiles):
            tile, unit, first, last = load["_look_up"](lists, plan, Int(t), cfg)
            entries = load["_first_entry"](lists, first, last, cfg)
            ends = Int(blocks.kv_len), Int(overhang)
            steps = []
            args = None, None, lists, None, 0, 0, first, last, entries, ends, Int(0), cfg
            count = load["load_boxes"](*args)
            assert count == len(steps) == load["steps_of"](first, last, cfg)
            found.append((int(unit), int(tile), steps))
    return found


LENGTHS = [(700, 900), (512, 640), (129, 257), (1, 1000), (1000, 31)]


@pytest.mark.parametrize("block", [128, (128, 64), (256, 256), (128, 512)], ids=str)
@pytest.mark.parametrize("mask", [causal, window, sinks_by_head, some_rows])
def test_steps_have_every_key_once_and_the_mask_where_it_is_needed(mask: Mask, block: Any) -> None:
    for q_len, kv_len in LENGTHS:
        made = create_block_mask(mask, 2, 3, q_len, kv_len, "cpu", BLOCK_SIZE=block)
        check(made.lists(), mask)


def test_parts_of_a_mask_begin_within_its_lists() -> None:
    made = create_block_mask(window, 2, 3, 1000, 900, "cpu", BLOCK_SIZE=128)
    part = made.rows(256, 900)
    check(part.lists(), part.mask_mod)


def check(blocks: BlockLists, mask: Mask) -> None:
    q, kv = (torch.arange(n) for n in (blocks.q_len, blocks.kv_len))
    tiles = tiles_of(blocks)
    num_tiles = -(-blocks.q_len // TILE_M)
    units = blocks.num_batches * blocks.num_heads
    assert {(unit, tile) for unit, tile, _ in tiles} == {
        (unit, tile) for unit in range(units) for tile in range(num_tiles)
    }
    for unit, tile, steps in tiles:
        b, h = unit // blocks.num_heads, unit % blocks.num_heads
        rows = q[tile * TILE_M : (tile + 1) * TILE_M, None] + blocks.q_offset
        kept = mask(b, h, rows, kv[None, :] + blocks.kv_offset)
        kept = torch.as_tensor(kept).expand(rows.size(0), blocks.kv_len)
        seen = torch.zeros(blocks.kv_len, dtype=torch.int64)
        for boxes, flag in steps:
            for row in boxes:
                seen[row : row + BOX] += 1
            inside = all(row + BOX <= blocks.kv_len for row in boxes)
            keys = [k for row in boxes for k in range(row, min(row + BOX, blocks.kv_len))]
            assert flag or (inside and bool(kept[:, keys].all()))
        assert int(seen.max()) <= 1
        assert bool(seen[kept.any(0)].all())
