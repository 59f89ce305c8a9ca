"""gluon_protocol.py for steps of boxes (forward_boxes.py): a step's keys are those of the next live
boxes of its list, and a consumer that applies the mask is told their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.kernels.gluon_protocol import GROUP, HEADS, Launch, Plan
from tests.kernels.gluon_values import Int, Nothing
from tests.kernels.gluon_world import ProtocolError

BOXES = 3
NUM_BLOCKS = 9


@dataclass(frozen=True)
class BoxPlan(Plan):
    """keys: of listed tiles, blocks; else steps. Every third block is partial, and so is the last
    one, which overhangs, or the last step without a list."""

    def arguments(self, cfg: Any) -> tuple[Any, Any]:
        lists, plan = super().arguments(cfg)
        last = NUM_BLOCKS - 1 if self.listed else len(self.keys[0]) - 1
        return lists, (*plan[:8], Int(last), Int(self.kv_len(cfg)))

    def kv_len(self, cfg: Any) -> int:
        keys = NUM_BLOCKS * cfg.SUB * cfg.BOX if self.listed else len(self.keys[0]) * cfg.TILE_N
        return keys - 1

    def steps(self, tile: int, cfg: Any) -> list[tuple[tuple[int, ...], bool]]:
        """Of each: rows of its boxes, and whether the mask is applied."""
        if not self.listed:
            starts = [t * cfg.TILE_N for t in self.keys[tile]]
            rows = [tuple(row + i * cfg.BOX for i in range(BOXES)) for row in starts]
            partial = [cfg.HAS_MASK or (cfg.MAY_MASK and row == starts[-1]) for row in starts]
            return list(zip(rows, partial, strict=True))
        boxes = [
            ((block * cfg.SUB + i) * cfg.BOX, block % 3 == 0 or block == NUM_BLOCKS - 1)
            for block in self.keys[tile]
            for i in range(cfg.SUB)
        ]
        boxes += [(self.kv_len(cfg), True)] * (-len(boxes) % BOXES)
        threes = [boxes[i : i + BOXES] for i in range(0, len(boxes), BOXES)]
        return [(tuple(row for row, _ in three), any(p for _, p in three)) for three in threes]


class BoxLaunch(Launch):
    plan: BoxPlan

    def names(self) -> dict[str, Any]:
        found = super().names()
        self._rows_of = found["rows_of"]
        return found | {
            "add_output": self._add,
            "scores": self._scores,
            "modified": lambda s, *_: s,  # which is told no keys: those of boxes are masked_strips'
            "masked_strips": self._masked_strips,
            "three_parts": lambda acc, *_: acc,
            "arrived": lambda pending, s, _: self.world.finish(pending, [s]),
            "both_waited": lambda acc, p: self.world.finish(0, [acc, p]),
        }

    def _one_group(self, multiply: Callable[[int], Any], count: int) -> None:
        groups = self.world.own.groups
        before = len(groups)
        for i in range(count):
            multiply(i)
        groups[before:] = [[read for group in groups[before:] for read in group]]

    def _scores(self, q: Any, mem: Any, n: int, _: Any, cfg: Any) -> Nothing:
        first = (n & (cfg.STAGES - 1)) * cfg.PANELS * BOXES

        def multiply(i: int) -> None:
            left = mem.q.index(q[0] + i // BOXES)
            self.world.multiply(left, mem.k.index(first + i), Nothing())

        self._one_group(multiply, cfg.PANELS * BOXES)
        return Nothing()

    def _add(self, p: Any, mem: Any, _: Any, slot: int, acc: Any, cfg: Any) -> Any:
        first = slot * cfg.PANELS * BOXES
        self._one_group(
            lambda i: self.world.multiply(p, mem.v.index(first + i), acc), cfg.PANELS * BOXES
        )
        return acc

    def _masked_strips(self, s: Any, _: Any, mem: Any, n: int, *rest: Any) -> Any:
        """Rows are those of the keys that were multiplied last, which have been given back."""
        with self.world.changed:
            self.world._let_others()
        told = self._rows_of(mem, n, self.cfg)
        log = [reads for reads in self.world.own.log if len(reads) == 2]
        used = tuple(key[3] for _, key in log[-self.cfg.PANELS * BOXES :][:BOXES])
        if self.world.own.live and told != used:
            raise ProtocolError(f"rows {told} are said to be those of keys {used}")
        self.world.own.masked += 1
        return s

    def _watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        watched = super()._watched(run)

        def tile(*args: Any) -> Any:
            self.world.own.masked = 0
            return watched(*args)

        return tile

    def _compare(self, log: list[Any], tile: int, unit: int, consumer: int) -> None:
        cfg = self.cfg
        b, h = unit // HEADS, unit % HEADS
        row = (tile * cfg.CONSUMERS + consumer) * cfg.ROWS
        steps = self.plan.steps(tile, cfg)
        keys = b, h // GROUP
        wanted_scores = [
            [("q", b, h, row, i * cfg.D), ("k", *keys, at, i * cfg.D)]
            for rows, _ in steps
            for i in range(cfg.PANELS)
            for at in rows
        ]
        wanted_out = [
            [("v", *keys, at, i * cfg.DV)]
            for rows, _ in steps
            for i in range(cfg.PANELS)
            for at in rows
        ]
        scores, out = ([r for r in log if len(r) == length] for length in (2, 1))
        if scores != wanted_scores or out != wanted_out:
            raise ProtocolError(f"tile {tile} of unit {unit} used {log[:4]}")
        if self.world.own.masked != sum(partial for _, partial in steps):
            raise ProtocolError(f"tile {tile} of unit {unit} masked {self.world.own.masked} steps")
