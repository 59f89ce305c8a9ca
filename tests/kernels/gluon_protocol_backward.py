"""The Gluon backward's own source run as Python, as gluon_protocol.py runs the forward's: one
program, whose key tiles are visited by the queries of several heads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from attnloom.backends.gluon import (
    backward_dq,
    backward_jobs,
    backward_load,
    backward_math,
    backward_products,
    backward_shared,
    backward_slots,
    backward_sm90,
    rings,
)
from tests.kernels.gluon_values import Int, Nothing, Pointer
from tests.kernels.gluon_world import ProtocolError, World, held, play, stand_ins

MODULES = (
    backward_dq, backward_jobs, backward_load, backward_math, backward_products, backward_shared,
    backward_slots, backward_sm90, rings,
)  # fmt: skip
TILE_M, HALF, LINES = 4, 4, 8
HEADS, GROUP = 4, 2


@dataclass(frozen=True)
class Visit:
    """Which queries a program visits: live blocks of queries of each of its units, heads of one
    batch entry and the next; `same`: one list for all units. q_len: of queries; a block is SUB
    tiles."""

    blocks: tuple[tuple[int, ...], ...]
    same: bool
    q_len: int

    @property
    def pitch(self) -> int:
        return -(-self.q_len // TILE_M) * TILE_M

    def steps(self, cfg: Any) -> list[tuple[int, int, int, int]]:
        """(b, h, first row, line) of every step."""
        found = []
        for unit, blocks in enumerate(self.blocks):
            b, h = unit // GROUP, GROUP + unit % GROUP
            for block in self.blocks[0] if self.same else blocks:
                for sub in range(cfg.SUB):
                    row = (block * cfg.SUB + sub) * TILE_M
                    line = (b * HEADS + h) * self.pitch + row
                    found.append((b, h, row, line if row < self.q_len else self.spare))
        return found

    @property
    def spare(self) -> int:
        return 2 * HEADS * self.pitch

    def place(self, cfg: Any, tile: int, num_tiles: int) -> SimpleNamespace:
        """A tile of batch entry 0 and key head 1."""
        offsets, entries = [0], []
        for unit in range(2 * HEADS):
            own = unit - GROUP if unit < HEADS else unit - HEADS  # units 2, 3, 6 and 7 are visited
            blocks: tuple[int, ...] = ()
            if self.same:
                blocks = self.blocks[0] if unit == 0 else ()
            elif unit % HEADS in (GROUP, GROUP + 1) and own < len(self.blocks):
                blocks = self.blocks[own]
            entries += [block * 2 + block % 2 for block in blocks]
            offsets.append(len(entries))
        steps = (0, 0) if self.same else (HEADS, 1)
        numbers = {
            "b_kv": 0, "h_kv": 1, "start": tile * 2 * HALF, "block": 0,
            "units": len(self.blocks), "group": GROUP,
            "heads": HEADS, "pitch": self.pitch, "spare": self.spare, "q_len": self.q_len,
            "kv_len": num_tiles * 2 * HALF, "step_b": steps[0], "step_h": steps[1],
            "key_blocks": 1,
        }  # fmt: skip
        memory = {"offsets": Pointer(offsets), "entries": Pointer([*entries, 0])}
        return SimpleNamespace(**{name: Int(n) for name, n in numbers.items()}, **memory)


@dataclass(frozen=True)
class At:
    """The address of tiles, of which this is the first."""

    tile: Any


def is_dk(reads: list[Any]) -> bool:
    """Whether a product takes dscore from shared memory, with queries."""
    return len(reads) == 2 and bool(reads[0] and reads[1]) and (
        reads[0][0] == "ds" and reads[1][0] == "q"
    )  # fmt: skip


class Backward:
    """A program with a configuration, and its tiles one after the other."""

    def __init__(self, cfg: Any, visits: Sequence[Visit], seed: int, laggard: str = "") -> None:
        """laggard: "load", "keys" (the first consumer) or "queries" (who computes dq)."""
        assert cfg.PERSISTENT or len(visits) == 1
        self.cfg, self.visits, self.world, self.laggard = cfg, visits, World(seed), laggard
        self.places = [
            visit.place(cfg, tile, len(visits)) for tile, visit in enumerate(self.visits)
        ]
        self.steps = [
            (tile, *step) for tile, visit in enumerate(visits) for step in visit.steps(cfg)
        ]
        self.added: list[tuple[int, int]] = []  # (number of the step, columns' half) of dq
        self.left: list[tuple[str, int]] = []  # (dk or dv, first key)

    def run(self) -> None:
        """To the end.

        Raises:
            ProtocolError: it would hang or compute something else.
        """
        cfg, counter, mine = self.cfg, Pointer([0]), (Int(0), Int(0), Int(1))
        with held(MODULES, self.names()):
            mem = backward_shared.allocate(cfg)
            roles = {
                "load": functools.partial(
                    backward_load.load_tiles, "q", "do", "k", "v", "stats", mem, None, mine,
                    counter, cfg,
                )
            }  # fmt: skip
            for which in range(2):
                roles[("keys", "keys 1")[which]] = functools.partial(
                    self._own_keys, backward_sm90._own_keys, mem, mine, which
                )
            if cfg.DQ_APART:
                roles["queries"] = functools.partial(
                    self._own_queries, backward_dq.own_queries, mem, mine
                )
            play(self.world, [(role, 0, name == self.laggard) for name, role in roles.items()])
        halves = (0,) if cfg.DQ_APART else (0, 1)
        if sorted(self.added) != [(n, half) for n in range(len(self.steps)) for half in halves]:
            raise ProtocolError(f"dq of {len(self.added)} of {len(self.steps)} steps was added")
        rows = range(0, 2 * HALF * len(self.visits), HALF)
        if sorted(self.left) != sorted((name, row) for name in ("dk", "dv") for row in rows):
            raise ProtocolError(f"results left for {sorted(self.left)}")
        if counter.memory[0]:
            raise ProtocolError("the counter was not put back")
        if self.steps:
            self.world.check_barriers()

    def _own_keys(self, run: Callable[..., Any], mem: Any, mine: Any, which: int) -> None:
        """A consumer, whose products are compared with its steps'."""
        own = self.world.own
        own.log, own.which, own.stores, own.threads = [], which, [], 128
        scales, sizes = (1.0, 1.0, 1.0), (Int(0), Int(0), Int(0))
        run(mem, None, mine, ("dq",), ("dk", "dv"), ((), (), ()), scales, sizes, which, self.cfg)
        if own.stores:
            raise ProtocolError("the program ends before its results have left")
        queries = [("q", b, h, row, 0) for _, b, h, row, _ in self.steps]
        gradients = [("do", b, h, row, 0) for _, b, h, row, _ in self.steps]
        keys = [(*self._key_head(b, h), tile * 2 * HALF + which * HALF, 0)
                for tile, b, h, _, _ in self.steps]  # fmt: skip
        cfg, slices = self.cfg, backward_products.slices
        dscores = [("ds", n, which) for n in range(len(self.steps))]
        wanted = {
            "scores": [[("k", *key), q] for key, q in zip(keys, queries, strict=True)
                       for _ in slices(cfg.COLUMNS)],
            "dp": [[("v", *key), g] for key, g in zip(keys, gradients, strict=True)
                   for _ in slices(cfg.VALUE_COLUMNS)],
            "dv": [[g] for g in gradients],
            "dk": [[ds, q] if cfg.DK_SHARED else [q]
                   for ds, q in zip(dscores, queries, strict=True)],
        }  # fmt: skip
        found: dict[str, list[Any]] = {name: [] for name in wanted}
        for reads in own.log:
            if is_dk(reads):
                found["dk"].append(reads)
            elif len(reads) == 1:
                found["dk" if reads[0][0] == "q" else "dv"].append(reads)
            elif reads[1][0] in ("q", "do"):
                found["scores" if reads[1][0] == "q" else "dp"].append(reads)
        for name, reads in wanted.items():
            if found[name] != reads:
                raise ProtocolError(f"{name} of consumer {which} used {found[name][:3]}")

    def _key_head(self, b: int, h: int) -> tuple[int, int]:
        """Batch entry and head of the keys that a query head reads."""
        return 0, 1

    def _own_queries(self, run: Callable[..., Any], mem: Any, mine: Any) -> None:
        self.world.own.log, self.world.own.which, self.world.own.threads = [], 0, 128
        run(mem, None, mine, ("dq",), self.cfg)

    def names(self) -> dict[str, Any]:
        """What the functions' modules hold in place of the language's."""
        found = stand_ins(self.world, 1, MODULES)
        start_scores, start_dq, product, add_keys, give, keys_of, queries_of = (
            found[name]
            for name in (
                "start_scores", "start_dq", "dq_product", "add_keys", "give_ds", "_keys_of_tile",
                "_queries_of_tile",
            )
        )  # fmt: skip

        def dq_product(mem: Any, n: int, k0: Any, k1: Any, sums: Any, row: int, *rest: Any) -> Any:
            self.world.own.row = row
            return self._counting(product)(mem, n, k0, k1, sums, row, *rest)

        def add(left: Any, tiles: Any, at: Any, slot: int, sums: Any, *rest: Any) -> Any:
            if not self.cfg.NATIVE:
                return add_keys(left, tiles, at, slot, sums, *rest)
            if at.tile is not tiles.index(0):
                raise ProtocolError(f"{tiles.index(0).name} is not at the address of {at}")
            return self.world.multiply(left, tiles.index(slot), sums)

        tma = SimpleNamespace(store_wait=self._wait_for_stores)
        return found | {
            "KEYS": 2 * HALF,
            "HALF": HALF,
            "LINES": LINES,
            "GROUP": 128,
            "STEPS": 8,
            "ROOM": 4,
            "tma": tma,
            "find_tile": lambda plan, t, cfg: (t, Int(0), Int(1)),
            "num_tiles_of": lambda plan: len(self.visits),
            "placed": self._placed,
            "_keys_of_tile": self._within(keys_of, 2),
            "_queries_of_tile": self._within(queries_of, 3),
            "start_scores": self._counting(start_scores),
            "start_dq": self._counting(start_dq),
            "dq_product": dq_product,
            "add_keys": add,
            "addresses": SimpleNamespace(
                **vars(found["addresses"]) | {"find": lambda block, tile, *_: (block, At(tile))}
            )
            if self.cfg.NATIVE
            else found["addresses"],
            # steps of more queries than a product of dq has are split among consumers
            "DQ_ROWS": getattr(self.cfg, "DQ_ROWS", TILE_M),
            "give_ds": lambda mem, n, ds, which, cfg: give(mem, n, ("ds", n, which), which, cfg),
            "add_dq": self._add_dq,
            "dq_places": lambda first, columns, _: (int(first), columns),
            "contexts": lambda _, __, b, h, *rest: (int(b), int(h)),
            "first_sums": lambda *_: (Nothing(),),
            "look_up": lambda context, corner, _: (context, tuple(map(int, corner))),
            "modified": self._modified,
            "subtrahend": lambda less, *_: less,
            "exp2_fast": lambda x: x,
            "masked": lambda p, *_: p,
            "hidden": lambda s, *_: s,
            "rows_ahead": lambda *_: (Nothing(),),
            "weighted": lambda p, *_: p,
            "dscores": lambda weight, dp, rest, sums, *_: (weight, sums),
            "async_store": self._store,
            "barrier": lambda: None,
        }

    @staticmethod
    def _modified(_: Any, context: Any, __: Any, pieces: Any, corner: Any, *rest: Any) -> Any:
        if pieces != (context, corner):
            raise ProtocolError(f"pieces of {pieces} serve {corner} of {context}")
        return Nothing(), Nothing()

    def _placed(self, _: Any, found: Sequence[int], __: Any) -> Any:
        tile, b_kv, h_kv = found
        if (b_kv, h_kv) != (0, 1):
            raise ProtocolError(f"a tile of batch entry {b_kv} and head {h_kv}")
        return self.places[tile]

    def _within(self, run: Callable[..., Any], at: int) -> Callable[..., Any]:
        """A tile's steps are those from its first number on. at: place of (total, num, n)."""

        def within(*args: Any) -> Any:
            total, _, first = args[at : at + 3]
            self.world.own.numbers = range(first, first + total)
            return run(*args)

        return within

    def _counting(self, start: Callable[..., Any]):
        """Products of no step of the tile may read what they like."""

        def started(mem: Any, n: int, *rest: Any) -> Any:
            own = self.world.own
            own.live = n in own.numbers
            before = len(own.log)
            product = start(mem, n, *rest)
            if not own.live:
                del own.log[before:]
            own.live = True
            return product

        return started

    def _add_dq(self, _: Any, part: Any, line: int, ___: Any, ____: Any) -> None:
        """The last two products of dq are those of the step that the line belongs to, of a
        consumer's rows and columns."""
        own, cfg = self.world.own, self.cfg
        first, columns, row = 0, cfg.D, 0
        if cfg.NATIVE:
            first, columns = ((0, 64), (64, cfg.COLUMNS - 64))[own.which]
        elif getattr(cfg, "DQ_ROWS", TILE_M) < TILE_M:
            row = own.which * cfg.DQ_ROWS
            if own.row != row:
                raise ProtocolError(f"consumer {own.which} multiplied rows from {own.row} on")
        elif not cfg.DQ_APART:
            first, columns = own.which * cfg.D // 2, cfg.D // 2
        if part != (first, columns):
            raise ProtocolError(f"consumer {own.which} adds to columns {part}")
        line -= row
        found = [
            reads for reads in own.log
            if len(reads) == 2 and reads[0] and reads[0][0] == "ds" and not is_dk(reads)
        ]  # fmt: skip
        if not found:
            raise ProtocolError(f"dq of line {line} is of no dscore")
        n = found[-1][0][1]
        tile, _, _, _, wanted = self.steps[n]
        row = tile * 2 * HALF
        products = [[("ds", n, i), ("k", 0, 1, row + i * HALF, 0)] for i in range(2)]
        if found[-2:] != products or wanted != line:
            raise ProtocolError(f"dq of line {line} is of {found[-2:]}")
        with self.world.changed:
            self.added.append((int(n), own.which))

    def _store(self, name: str, place: list[int], slot: Any) -> None:
        """A copy to memory, which reads until it is waited for."""
        self.world.own.stores.append((slot, slot.version))
        with self.world.changed:
            self.left.append((name, int(place[2])))

    def _wait_for_stores(self, _: int) -> None:
        for slot, version in self.world.own.stores:
            if slot.version != version:
                raise ProtocolError(f"{slot.content} was copied over results that leave")
        self.world.own.stores.clear()
