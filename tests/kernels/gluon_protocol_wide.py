"""The Gluon kernel for heads of 129 to 192 run as Python, as gluon_protocol_backward.py runs that
for narrower ones: one key tile, whose heads lie in panels."""

from __future__ import annotations

import functools
from typing import Any

from attnloom.backends.gluon import (
    backward_dq,
    backward_load,
    backward_math,
    backward_products,
    backward_shared,
    backward_slots,
    backward_wide,
    rings,
)
from tests.kernels.gluon_protocol_backward import HALF, HEADS, TILE_M, Backward, Visit
from tests.kernels.gluon_values import Int, Nothing
from tests.kernels.gluon_world import ProtocolError, held, play, stand_ins

# Where two have a function of one name, that of the first counts.
MODULES = (
    backward_wide, backward_dq, backward_load, backward_math, backward_products, backward_shared,
    backward_slots, rings,
)  # fmt: skip
PANEL, MIDDLE = "panel", "half of the middle panel"
Panels = list[tuple[str, int, int, int, int]]


class WideVisit(Visit):
    """Lines of a head are in whole blocks, so that no step leaves them."""

    def lines(self, cfg: Any) -> int:
        block = cfg.SUB * TILE_M
        return -(-self.q_len // block) * block

    def steps(self, cfg: Any) -> list[tuple[int, int, int, int]]:
        return [
            (b, h, row, (b * HEADS + h) * self.lines(cfg) + row)
            for b, h, row, _ in super().steps(cfg)
        ]

    def place(self, cfg: Any, tile: int, num_tiles: int) -> Any:
        found = super().place(cfg, tile, num_tiles)
        found.pitch = Int(self.lines(cfg))
        return found


class Wide(Backward):
    """A program with a configuration."""

    def run(self) -> None:
        cfg, at = self.cfg, self.places[0]
        with held(MODULES, self.names()):
            mem = backward_shared.allocate(cfg)
            load = backward_load.load_tile
            roles = {"load": functools.partial(load, "q", "do", "k", "v", "stats", mem, at, cfg)}
            for which in range(2):
                roles[("keys", "keys 1")[which]] = functools.partial(
                    self._keys, backward_wide._own_keys, mem, at, which
                )
            play(self.world, [(role, 0, name == self.laggard) for name, role in roles.items()])
        halves = [half for half in (0, 1) for _ in (PANEL, MIDDLE)]
        if sorted(self.added) != [(n, half) for n in range(len(self.steps)) for half in halves]:
            raise ProtocolError(f"dq of {len(self.added)} of {len(self.steps)} steps was added")
        rows = [row for row in (0, HALF) for _ in range(cfg.PANELS)]
        if sorted(self.left) != [("dk", row) for row in rows]:
            raise ProtocolError(f"results left for {sorted(self.left)}")
        if self.steps:
            self.world.check_barriers()

    def _keys(self, run: Any, mem: Any, at: Any, which: int) -> None:
        """A consumer, whose products are compared with its steps'."""
        own, cfg = self.world.own, self.cfg
        own.log, own.which, own.stores = [], which, []
        own.numbers = range(len(self.steps))
        numbers = ((1.0, 1.0, 1.0), Int(0), Int(0), Int(0))
        run(mem, at, None, "dk", (), (), *numbers, which, cfg)
        steps = [(b, h, row) for _, b, h, row, _ in self.steps]
        keys = (0, 1, which * HALF)
        wanted = {
            "scores": [
                [k, q]
                for step in steps
                for k, q in zip(self._of("k", keys), self._of("q", step), strict=True)
            ],
            "dp": [
                [v, g]
                for step in steps
                for v, g in zip(self._of("v", keys), self._of("do", step), strict=True)
            ],
            "dk": [[q] for step in steps for q in self._of("q", step)],
        }
        found: dict[str, list[Any]] = {name: [] for name in wanted}
        for reads in own.log:
            if len(reads) == 1:
                found["dk"].append(reads)
            elif reads[1][0] in ("q", "do"):
                found["scores" if reads[1][0] == "q" else "dp"].append(reads)
        for name, reads in wanted.items():
            if found[name] != reads:
                raise ProtocolError(f"{name} of consumer {which} used {found[name][:3]}")

    def _of(self, tensor: str, place: tuple[int, int, int]) -> Panels:
        """All panels of rows of a head."""
        values = tensor in ("v", "do")
        count = self.cfg.VALUE_PANELS if values else self.cfg.PANELS
        width = self.cfg.DV if values else self.cfg.D
        return [(tensor, *place, i * width) for i in range(count)]

    def names(self) -> dict[str, Any]:
        found = stand_ins(self.world, 1, MODULES)
        start_scores, start_dq, give = (
            found[name] for name in ("start_scores", "_start_dq", "give_ds")
        )
        return found | {
            "KEYS": 2 * HALF,
            "HALF": HALF,
            "LINES": 8,
            "tma": _Stores(self._wait_for_stores),
            "start_scores": self._counting(start_scores),
            "_start_dq": self._counting(start_dq),
            "give_ds": lambda mem, n, ds, which, cfg: give(mem, n, ("ds", n, which), which, cfg),
            "add_dq": self._add_dq,
            "MIDDLE": 2,
            "dq_places": lambda first, columns, cfg: PANEL if columns == cfg.D else MIDDLE,
            "contexts": lambda _, __, b, h, *rest: (int(b), int(h)),
            "look_up": lambda context, corner, _: (context, tuple(map(int, corner))),
            "modified": self._modified,
            "subtrahend": lambda less, *_: less,
            "exp2_fast": lambda x: x,
            "masked": lambda p, *_: p,
            "weighted": lambda p, *_: p,
            "dscores": lambda weight, dp, rest, sums, *_: (Nothing(), sums),
            "async_store": self._store,
            "barrier": lambda: None,
        }

    def _add_dq(self, _: Any, part: str, line: int, ___: Any, ____: Any) -> None:
        """The last four products of dq are those of the step that the line belongs to, the columns
        of the consumer's panel first."""
        own = self.world.own
        found = [reads for reads in own.log if len(reads) == 2 and reads[0] and reads[0][0] == "ds"]
        found = found[-4:][:2] if part == PANEL else found[-2:]
        if not found:
            raise ProtocolError(f"dq of line {line} is of no dscore")
        n = found[0][0][1]
        panel = 2 * own.which if part == PANEL else 1
        products = [[("ds", n, i), ("k", 0, 1, i * HALF, panel * self.cfg.D)] for i in range(2)]
        if found != products or self.steps[n][-1] != line:
            raise ProtocolError(f"dq of line {line} is of {found}")
        with self.world.changed:
            self.added.append((int(n), own.which))


class _Stores:
    """`tma` of the language."""

    def __init__(self, wait: Any) -> None:
        self.store_wait = wait
