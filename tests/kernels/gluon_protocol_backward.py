"""The Gluon backward's own source run as Python, as gluon_protocol.py runs the forward's: one
program, whose key tile is visited by the queries of several heads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from attnloom.backends.gluon import (
    backward_load,
    backward_math,
    backward_shared,
    backward_sm90,
    rings,
)
from tests.kernels.gluon_world import (
    Int,
    Nothing,
    Pointer,
    ProtocolError,
    World,
    held,
    play,
    stand_ins,
)

MODULES = (backward_load, backward_math, backward_shared, backward_sm90, rings)
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

    def place(self, cfg: Any) -> SimpleNamespace:
        """What `locate` finds for the program of batch entry 0 and key head 1."""
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
            "b_kv": 0, "h_kv": 1, "start": 0, "block": 0, "units": len(self.blocks), "group": GROUP,
            "heads": HEADS, "pitch": self.pitch, "spare": self.spare, "q_len": self.q_len,
            "kv_len": 2 * HALF, "step_b": steps[0], "step_h": steps[1], "key_blocks": 1,
        }  # fmt: skip
        memory = {"offsets": Pointer(offsets), "entries": Pointer([*entries, 0])}
        return SimpleNamespace(**{name: Int(n) for name, n in numbers.items()}, **memory)


class Backward:
    """A program with a configuration."""

    def __init__(self, cfg: Any, visit: Visit, seed: int, laggard: str = "") -> None:
        """laggard: "load", "keys" (the first consumer) or "queries" (who computes dq)."""
        self.cfg, self.visit, self.world, self.laggard = cfg, visit, World(seed), laggard
        self.added: list[tuple[int, int]] = []  # (line, columns' half) of additions to dq

    def run(self) -> None:
        """To the end.

        Raises:
            ProtocolError: it would hang or compute something else.
        """
        cfg, at = self.cfg, self.visit.place(self.cfg)
        with held(MODULES, self.names()):
            mem = backward_shared.allocate(cfg)
            roles = {
                "load": functools.partial(
                    backward_load.load_steps, "q", "do", "k", "v", "stats", mem, at, cfg
                )
            }
            for which in range(2):
                roles[("keys", "keys 1")[which]] = functools.partial(
                    self._own_keys, backward_sm90._own_keys, mem, at, which
                )
            if cfg.DQ_APART:
                roles["queries"] = functools.partial(
                    self._own_queries, backward_sm90._own_queries, mem, at
                )
            play(self.world, [(role, 0, name == self.laggard) for name, role in roles.items()])
        halves = (0,) if cfg.DQ_APART else (0, 1)
        wanted = sorted((step[3], half) for step in self.visit.steps(cfg) for half in halves)
        if sorted(self.added) != wanted:
            raise ProtocolError(f"dq of {len(self.added)} steps was added, not of {len(wanted)}")

    def _own_keys(self, run: Callable[..., Any], mem: Any, at: Any, which: int) -> None:
        """A consumer, whose products are compared with its steps'."""
        own = self.world.own
        own.log, own.which = [], which
        numbers = ((1.0, 1.0, 1.0), Int(0), Int(0), Int(0))
        run(mem, at, None, "dk", "dv", (), (), (), *numbers, which, self.cfg)
        steps = self.visit.steps(self.cfg)
        queries = [("q", b, h, row, 0) for b, h, row, _ in steps]
        gradients = [("do", b, h, row, 0) for b, h, row, _ in steps]
        keys, values = (("k", 0, 1, which * HALF, 0), ("v", 0, 1, which * HALF, 0))
        wanted = {
            "scores": [[keys, q] for q in queries],
            "dp": [[values, g] for g in gradients],
            "dv": [[g] for g in gradients],
            "dk": [[q] for q in queries],
        }
        found: dict[str, list[Any]] = {name: [] for name in wanted}
        for reads in own.log:
            if len(reads) == 1:
                found["dk" if reads[0][0] == "q" else "dv"].append(reads)
            elif reads[0] in (keys, values):
                found["scores" if reads[0] == keys else "dp"].append(reads)
        found["scores"] = found["scores"][: len(steps)]  # one more than steps, of no step
        for name, reads in wanted.items():
            if found[name] != reads:
                raise ProtocolError(f"{name} of consumer {which} used {found[name][:3]}")

    def _own_queries(self, run: Callable[..., Any], mem: Any, at: Any) -> None:
        self.world.own.log, self.world.own.which = [], 0
        run(mem, at, None, self.cfg)

    def names(self) -> dict[str, Any]:
        """What the functions' modules hold in place of the language's."""
        found = stand_ins(self.world, 1, MODULES)
        start_scores, start_dq, give = (
            found[name] for name in ("_start_scores", "_start_dq", "_give_ds")
        )
        total = len(self.visit.steps(self.cfg))
        return found | {
            "KEYS": 2 * HALF,
            "HALF": HALF,
            "LINES": LINES,
            "_start_scores": self._counting(start_scores, lambda n: n < total),
            "_start_dq": self._counting(start_dq, lambda n: n >= 0),
            "_give_ds": lambda mem, n, ds, which, cfg: give(mem, n, ("ds", n, which), which, cfg),
            "_add_dq": self._add_dq,
            "_dq_places": lambda *_: None,
            "contexts": lambda _, __, b, h, *rest: (int(b), int(h)),
            "first_sums": lambda *_: (Nothing(),),
            "look_up": lambda context, corner, _: (context, tuple(map(int, corner))),
            "modified": self._modified,
            "subtrahend": lambda less, *_: less,
            "exp2_fast": lambda x: x,
            "masked": lambda p, *_: p,
            "weighted": lambda p, *_: p,
            "dscores": lambda weight, dp, rest, sums, *_: (weight, sums),
            "async_store": lambda *_: None,
            "barrier": lambda: None,
        }

    @staticmethod
    def _modified(_: Any, context: Any, __: Any, pieces: Any, corner: Any, *rest: Any) -> Any:
        if pieces != (context, corner):
            raise ProtocolError(f"pieces of {pieces} serve {corner} of {context}")
        return Nothing(), Nothing()

    def _counting(self, start: Callable[..., Any], is_step: Callable[[int], bool]):
        """Products of no step may read what they like."""

        def started(mem: Any, n: int, *rest: Any) -> Any:
            self.world.own.live = is_step(n)
            product = start(mem, n, *rest)
            self.world.own.live = True
            return product

        return started

    def _add_dq(self, _: Any, __: Any, line: int, ___: Any, ____: Any) -> None:
        """The last two products of dq are those of the step that the line belongs to."""
        own = self.world.own
        found = [reads for reads in own.log if len(reads) == 2 and reads[1][0] == "k"]
        found = [reads for reads in found if not reads[0] or reads[0][0] == "ds"][-2:]
        n = next((reads[0][1] for reads in found if reads[0]), 0)
        wanted = [[("ds", n, i), ("k", 0, 1, i * HALF, 0)] for i in range(2)]
        steps = self.visit.steps(self.cfg)
        if found != wanted or n >= len(steps) or steps[n][3] != line:
            raise ProtocolError(f"dq of line {line} is of {found}")
        with self.world.changed:
            self.added.append((int(line), own.which))
