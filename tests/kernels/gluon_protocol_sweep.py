"""Programs of the Gluon backward that sweep over a head's keys, run as gluon_protocol_backward.py
runs the others, with the lists that a mask gives: sums of dq are found where they were left, and
all queries get those of all their keys, in order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from attnloom.backends.gluon import (
    backward_dq,
    backward_load,
    backward_shared,
    backward_sm90,
    backward_sweep,
    lists_backward,
)
from attnloom.backends.triton.transposed import transposed_lists
from attnloom.block_mask import BlockLists
from tests.kernels import gluon_protocol_backward
from tests.kernels.gluon_protocol_backward import HALF, TILE_M
from tests.kernels.gluon_world import Int, Nothing, Pointer, ProtocolError, held, play

MODULES = (*gluon_protocol_backward.MODULES, backward_sweep)
KEYS = 2 * HALF


def mask_of(live: Sequence[Sequence[Sequence[int]]], num_tiles: int, sub: int, q_len: int):
    """BlockLists of heads (one: of all) whose blocks of queries see these tiles of keys."""
    rows = [tiles for head in live for tiles in head]
    offsets = torch.tensor([0, *(len(tiles) for tiles in rows)]).cumsum(0)
    entries = [tile * 2 + tile % 2 for tiles in rows for tile in tiles]
    block, kv_len = sub * TILE_M, num_tiles * KEYS
    entries = torch.tensor(entries, dtype=torch.int32)
    return BlockLists(offsets, entries, 1, len(live), block, KEYS, q_len, kv_len)


class Sweep(gluon_protocol_backward.Backward):
    """One program and its heads, of one batch entry."""

    def __init__(
        self, cfg: Any, blocks: BlockLists, heads: int, seed: int, laggard: str = ""
    ) -> None:
        super().__init__(cfg, (), seed, laggard)
        self.blocks, self.heads = blocks, heads
        self.num_tiles, self.q_len = blocks.grid.num_kv_blocks, blocks.q_len
        with mock.patch.object(lists_backward, "STEP", TILE_M):
            swept = lists_backward.swept_lists(blocks)
        self.window = int(swept.window)
        self.offsets = Pointer(transposed_lists(blocks).offsets.tolist())
        self.entries = Pointer(swept.entries.tolist())
        self.steps = [
            (tile, 0, h, (block * cfg.SUB + sub) * TILE_M, None)
            for h in range(heads)
            for tile in range(self.num_tiles)
            for block in self._visitors(h, tile)
            for sub in range(cfg.SUB)
        ]
        # of a consumer (columns of dq): place -> (row, tiles summed)
        self.memory: dict[tuple[int, int], tuple[int, list[int]]] = {}
        self.rounded: dict[tuple[int, int], list[int]] = {}

    def _seen(self, h: int, block: int) -> list[int]:
        """Tiles of keys that a block of queries sees."""
        grid = self.blocks.grid
        row = h % grid.num_heads * grid.num_q_blocks + block
        first, last = self.blocks.row_offsets[row : row + 2].tolist()
        return [entry >> 1 for entry in self.blocks.entries[first:last].tolist()]

    def _visitors(self, h: int, tile: int) -> list[int]:
        return [b for b in range(self.blocks.grid.num_q_blocks) if tile in self._seen(h, b)]

    def run(self) -> None:
        """To the end.

        Raises:
            ProtocolError: it would hang or compute something else.
        """
        cfg, counter = self.cfg, Pointer([0])
        plan = (Int(self.num_tiles), None, Int(self.heads), Int(self.heads))
        with held(MODULES, self.names()):
            mem = backward_shared.allocate(cfg)
            load = functools.partial(
                backward_load.load_tiles, "q", "do", "k", "v", "stats", mem, plan, None, counter,
                cfg,
            )  # fmt: skip
            roles = {"load": load}
            for which in range(2):
                roles[("keys", "keys 1")[which]] = functools.partial(
                    self._own_keys, backward_sm90._own_keys, mem, None, which
                )
            if cfg.DQ_APART:
                roles["queries"] = functools.partial(
                    self._own_queries, backward_dq.own_queries, mem, None
                )
            play(self.world, [(role, 0, name == self.laggard) for name, role in roles.items()])
        self._compare_dq()
        rows = [tile * KEYS + half * HALF for tile in range(self.num_tiles) for half in range(2)]
        wanted = sorted((name, row) for name in ("dk", "dv") for row in rows * self.heads)
        if sorted(self.left) != wanted:
            raise ProtocolError(f"results left for {sorted(self.left)}")
        if counter.memory[0]:
            raise ProtocolError("the counter was not put back")
        if self.steps:
            self.world.check_barriers()

    def _key_head(self, b: int, h: int) -> tuple[int, int]:
        return b, h

    def _compare_dq(self) -> None:
        halves = (0,) if self.cfg.DQ_APART else (0, 1)
        wanted = {}
        for h in range(self.heads):
            for row in range(0, self.q_len, TILE_M):
                seen = self._seen(h, row // (self.cfg.SUB * TILE_M))
                if seen:
                    wanted |= {(h * self.q_len + row, half): seen for half in halves}
        if self.rounded != wanted:
            raise ProtocolError(f"dq is the sums of {self.rounded}, not {wanted}")

    def names(self) -> dict[str, Any]:
        found = super().names()
        return found | {
            "FIRST": 1,
            "LAST": 2,
            "sums_so_far": self._sums_so_far,
            "leave_dq": self._leave_dq,
        }

    def _placed(self, _: Any, found: Sequence[int], __: Any) -> Any:
        tile, b, h = found
        by_head = self.blocks.num_heads > 1
        numbers = {
            "b_kv": b, "h_kv": h, "start": tile * KEYS, "block": tile, "units": 1, "group": 1,
            "heads": self.heads, "pitch": -(-self.q_len // TILE_M) * TILE_M, "spare": 777 * TILE_M,
            "q_len": self.q_len, "kv_len": self.num_tiles * KEYS, "step_b": 0,
            "step_h": int(by_head), "key_blocks": self.num_tiles,
        }  # fmt: skip
        memory = {"offsets": self.offsets, "entries": self.entries}
        return SimpleNamespace(**{name: Int(n) for name, n in numbers.items()}, **memory)

    def _sums_so_far(self, _: Any, __: Any, line: int, ___: Any, ____: Any) -> Nothing:
        """Read now: what is left there later does not count."""
        own = self.world.own
        row = line >> 2
        own.line, own.sums = line, []
        if not line & 1:
            found = self.memory.get((row & (self.window - 1), own.which))
            if found is None or found[0] != row:
                raise ProtocolError(f"sums of row {row} are not there, but {found}")
            own.sums = found[1]
        return Nothing()

    def _leave_dq(self, _: Any, __: Any, line: int, ___: Any, first: int, ____: Any) -> None:
        own = self.world.own
        if own.line != line:
            raise ProtocolError(f"dq of line {line} was added to line {own.line}")
        found = [reads for reads in own.log if len(reads) == 2 and reads[0] and reads[0][0] == "ds"]
        n = found[-1][0][1]
        tile, b, h, row, _ = self.steps[n]
        keys = tile * KEYS
        products = [[("ds", n, i), ("k", b, h, keys + i * HALF, 0)] for i in range(2)]
        if found[-2:] != products or line >> 2 != h * self.q_len + row:
            raise ProtocolError(f"dq of line {line} is of {found[-2:]}")
        sums = [*own.sums, int(tile)]
        key = (int(line >> 2), own.which)
        if not line & 2:
            self.memory[int(line >> 2) & (self.window - 1), own.which] = (key[0], sums)
        elif key in self.rounded:
            raise ProtocolError(f"row {key[0]} of dq was written twice")
        else:
            self.rounded[key] = sums
