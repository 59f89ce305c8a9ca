"""The Gluon forward's own source run as Python, a thread for each warp (or warpgroup).

Gluon has no interpreter. Here its kernel's functions are called as what they are before they are
compiled, Python functions, with barriers, copies and products in place of the language's: numbers
are numbers, what lies in a slot of a ring is the name of what was copied there, and scores are
nothing at all. Copies land late and in any order, and one warp of a program may be a laggard,
which does nothing while any other can go on: a barrier knows of phases by parity alone, so that who
is two of them behind waits for what is over, or does not wait for what is not.

Found out: a wait that nobody ends, a slot that is overwritten while a product still reads it, a
product with other queries, keys or values than its step's, scores taken for those of other keys,
a tile left out or done twice, bytes that a barrier expects and that do not come, barriers that
nobody uses or that are none, and a counter that is not put back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnloom.backends.gluon import (
    forward_boxes,
    forward_columns,
    forward_joined,
    forward_load,
    forward_math,
    forward_passed,
    forward_products,
    forward_shared,
    forward_sm90,
    forward_steps,
    rings,
)
from tests.kernels.gluon_values import Int, Nothing, Pointer, Vec
from tests.kernels.gluon_world import ProtocolError, Slot, World, held, play, stand_ins

MODULES = (
    forward_boxes, forward_columns, forward_joined, forward_load, forward_math, forward_passed,
    forward_products, forward_shared, forward_sm90, forward_steps, rings,
)  # fmt: skip
HEADS, GROUP, BATCH = 4, 2, 2
# APART: a bit for each consumer whose block of a key tile is live, by the tile's number.
_LIVE = (0b101, 0b011, 0b110, 0b111, 0b001, 0b010, 0b100)


@dataclass(frozen=True)
class Plan:
    """A launch: its tiles, and the key tiles of each row tile; the same for all units."""

    keys: tuple[tuple[int, ...], ...]
    programs: int
    listed: bool = True

    @property
    def total(self) -> int:
        return BATCH * HEADS * len(self.keys)

    def arguments(self, cfg: Any) -> tuple[Any, Any]:
        """`listed` and `plan` of the producer. Tiles are listed longest first; every third block is
        partial."""
        entries: list[int] = []
        work: list[int] = []
        for tile in sorted(range(len(self.keys)), key=lambda t: -len(self.keys[t])):
            first = len(entries)
            for block in self.keys[tile]:
                partial = int(block % 3 == 0)
                flags = partial
                if cfg.APART:
                    flags = sum((2 + partial) << (2 * c) for c in range(3) if is_live(block, c))
                entries.append(block << (6 if cfg.APART else 1) | flags)
            work += [tile, first, len(entries)]
        lists = (Pointer([*entries, 0]), Pointer(work), Int(0), Int(0))
        steps = 0 if self.listed else len(self.keys[0])
        numbers = (HEADS, GROUP, len(self.keys), 4, BATCH * HEADS, steps, self.total, 1, -1)
        return lists, tuple(map(Int, numbers))


def is_live(block: int, consumer: int) -> bool:
    """Of a key tile, APART."""
    return bool(_LIVE[block % len(_LIVE)] >> consumer & 1)


class Launch:
    """A launch of `plan` with a configuration."""

    def __init__(self, cfg: Any, plan: Plan, seed: int, laggard: str = "") -> None:
        """laggard: "load", "consume" (the first) or "columns"; nobody otherwise."""
        self.cfg, self.plan, self.laggard = cfg, plan, laggard
        self.world = World(seed, drains=False)  # slots given back last are asked for by nobody
        self.counter = [0]
        self.done: list[tuple[int, int, int]] = []
        # the last tile's last consumer has no query
        self.q_len = len(plan.keys) * cfg.CONSUMERS * cfg.ROWS - cfg.ROWS

    def run(self) -> None:
        """To the end.

        Raises:
            ProtocolError: see above.
        """
        cfg, sizes = self.cfg, (Int(HEADS), Int(self.q_len), Int(0), Int(0), Int(0))
        listed, plan = self.plan.arguments(cfg)
        names = self.names()
        with held(MODULES, names):
            warps: list[tuple[Callable[[], None], int, bool, int]] = []
            consume = forward_joined.consume_joined if cfg.JOINED else forward_sm90.consume
            for program in range(self.plan.programs):
                mem = forward_shared.allocate(cfg)
                roles = [
                    functools.partial(
                        forward_load.load_tiles, "q", "k", "v", mem, Pointer(self.counter), listed,
                        plan, cfg,
                    ),
                    *(
                        functools.partial(
                            consume, "out", (None, None), mem, sizes, (), (), (1, 1), consumer, cfg
                        )
                        for consumer in range(cfg.CONSUMERS)
                    ),
                ]  # fmt: skip
                if cfg.NUM_COLUMNS:
                    roles.append(
                        functools.partial(
                            forward_columns.write_columns, mem, Int(HEADS), Int(0), (), cfg
                        )
                    )
                late = {"load": 0, "consume": 1, "columns": len(roles) - 1}.get(self.laggard, -1)
                warps += [
                    (role, program, i == late, cfg.WARPS if 0 < i <= cfg.CONSUMERS else 1)
                    for i, role in enumerate(roles)
                ]
            play(self.world, warps)
        self._check()
        if any(self.plan.keys):
            self.world.check_barriers()

    def _check(self) -> None:
        wanted = [
            (unit, tile, consumer)
            for unit in range(BATCH * HEADS)
            for tile in range(len(self.plan.keys))
            for consumer in range(self.cfg.CONSUMERS)
        ]
        if sorted(self.done) != wanted:
            raise ProtocolError(f"{len(self.done)} of {len(wanted)} parts of tiles were computed")
        if self.counter != [0]:
            raise ProtocolError(f"the counter is left at {self.counter[0]}")

    def names(self) -> dict[str, Any]:
        """What the functions' modules hold in place of the language's."""
        found = stand_ins(self.world, self.plan.programs, MODULES)
        found |= {"FLAG_BITS": 6, "ALL_FULL": 42}
        found |= {name: self._watched(found[name]) for name in ("overlapped_tile", "plain_tile")}
        return (
            found
            | {
                "take_job": self._remembered(found["take_job"]),
                "contexts": lambda *_: None,
                "empty_state": lambda *_: (self._accumulators(), Nothing(), Nothing()),
                "take_queries": self._queries,
                "rescaled": lambda acc, *_: acc,
                "caught_up": lambda acc, *_: acc,
                "only_if": lambda _, acc, __: acc,
                "columns": lambda *_: None,
                "look_up": lambda _, tag, cfg: found["key_tile"](tag, cfg) * cfg.TILE_N,
                "row_bias": lambda *_: None,
                "carried": lambda weights, *_: weights,
                "operand": lambda p, *_: p,
                "modified": self._modified,
                "masked": self._masked,
                "softmax_step": lambda *_: (Nothing(), Nothing(), Nothing(), Nothing()),
                "store_results": self._stored,
            }
            | self._wide(found["add_output"])
            | self._joined(found)
        )

    def _remembered(self, take: Callable[..., Any]) -> Callable[..., Any]:
        def job(mem: Any, n: int, cfg: Any) -> Any:
            found = take(mem, n, cfg)
            own = self.world.own
            own.job, own.log = found, own.log if n else []
            return found

        return job

    def _accumulators(self) -> Any:
        return (Nothing(),) * 3 if self.cfg.PARTS == 3 else Nothing()

    def _wide(self, add_output: Callable[..., Any]) -> dict[str, Any]:
        """In place of addresses, and one group for all panels of a step's values."""

        def add(p: Any, mem: Any, values_at: Any, slot: int, acc: Any, cfg: Any) -> Any:
            if not cfg.WIDE:
                return add_output(p, mem, values_at, slot, acc, cfg)
            groups = self.world.own.groups
            before = len(groups)
            for i in range(cfg.PANELS):
                self.world.multiply(p, mem.v.index(slot * cfg.PANELS + i), acc)
            groups[before:] = [[read for group in groups[before:] for read in group]]
            return acc

        return {"add_output": add}

    def _queries(self, mem: Any, at: int, *_: Any) -> Any:
        """Where they lie, and those that lie in registers besides."""
        tiles = [at, at] if self.cfg.REST else range(at, at + self.cfg.Q_KEPT)
        kept = (mem.q.index(i).content for i in tiles)
        return at, tuple(Slot(content=content) for content in kept)

    def _modified(self, s: Any, _: Any, __: Any, pieces: int, keys: Vec, *rest: Any) -> Any:
        if not self.cfg.NEEDS_KEYS:
            return s
        if pieces != keys[0]:
            raise ProtocolError(f"pieces of keys from {pieces} on serve those from {keys[0]} on")
        if not self.world.own.live:
            return s
        used = next(reads[1] for reads in reversed(self.world.own.log) if len(reads) == 2)
        if used is None or used[3] != keys[0]:
            raise ProtocolError(f"{used} was used for keys from {keys[0]} on")
        return s

    def _masked(self, s: Any, _: Any, mem: Any, n: int, __: Any, keys: Vec, *rest: Any) -> Any:
        if self.cfg.NUM_COLUMNS:
            (found,) = forward_columns.read_columns(mem, n, None, self.cfg)
            if isinstance(found, Nothing) or [*found] != [*keys]:
                raise ProtocolError(f"columns of other keys serve those from {keys[0]} on")
        return s

    def _watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A tile's steps, whose products are compared with its list afterwards."""

        def tile(q: int, mem: Any, n: int, steps: int, passed: Any, *rest: Any) -> Any:
            own = self.world.own
            own.log, own.live = [], bool(steps)
            tile_number, unit, _, _ = own.job
            consumer = rest[2]
            found = run(q, mem, n, steps, passed, *rest)
            if steps or self._keys_of(tile_number, consumer):
                self._compare(own.log, tile_number, unit, consumer)
            with self.world.changed:
                self.done.append((int(unit), int(tile_number), int(consumer)))
            return found

        return tile

    def _stored(self, out: Any, outs: Any, mem: Any, consumer: int, *rest: Any) -> None:
        """JOINED: compared here, where scores of the next tile are the last product."""
        if self.cfg.JOINED:
            _, _, unit, row, *_ = rest[3]
            own, tile = self.world.own, row // (self.cfg.ROWS * self.cfg.CONSUMERS)
            *log, following = own.log
            own.log = [following]
            self._compare(log, tile, unit, consumer)
            with self.world.changed:
                self.done.append((int(unit), int(tile), int(consumer)))

    def _joined(self, names: dict[str, Any]) -> dict[str, Any]:
        """Which products count: all but scores of a tile that is not there."""

        def scores(*args: Any) -> Any:
            self.world.own.live = self.world.own.job[0] >= 0
            return names["scores"](*args)

        def add_output(*args: Any) -> Any:
            self.world.own.live = True
            return names["add_output"](*args)

        return {"scores": scores, "add_output": add_output} if self.cfg.JOINED else {}

    def _keys_of(self, tile: int, consumer: int) -> tuple[int, ...]:
        """Key tiles that a consumer multiplies: without those at the ends in which it has no
        block, the last one first, but not without all of them."""
        cfg, keys = self.cfg, self.plan.keys[tile]
        if cfg.SKIPS and (tile * cfg.CONSUMERS + consumer) * cfg.ROWS >= self.q_len:
            return ()
        if cfg.SKIPS_ENDS and len(keys) > 1:
            leads, trails = (not is_live(keys[i], consumer) for i in (0, -1))
            keys = keys[:-1] if trails else keys
            keys = keys[1:] if leads and len(keys) > 1 else keys
        return keys

    def _compare(self, log: list[Any], tile: int, unit: int, consumer: int) -> None:
        cfg = self.cfg
        b, h = unit // HEADS, unit % HEADS
        row = (tile * cfg.CONSUMERS + consumer) * cfg.ROWS
        b_kv, h_kv = b, h // GROUP
        panels, keys = range(cfg.PANELS), self._keys_of(tile, consumer)
        wanted_scores = [
            [("q", b, h, row, i * cfg.D), ("k", b_kv, h_kv, block * cfg.TILE_N, i * cfg.D)]
            for block in keys
            for i in ([0, 0] if cfg.REST else panels)
        ]
        wanted_out = [
            [("v", b_kv, h_kv, block * cfg.TILE_N, i * cfg.DV)] for block in keys for i in panels
        ]
        scores, out = ([r for r in log if len(r) == length] for length in (2, 1))
        if scores != wanted_scores or out != wanted_out:
            raise ProtocolError(f"tile {tile} of unit {unit} used {log[:4]}")
