"""The kernel of backward_roles.py run as Python, as gluon_protocol_backward.py runs those whose
consumers are alike: one key tile, whose weights and dscore go from consumer to consumer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from attnloom.backends.gluon import (
    backward_load,
    backward_roles,
    backward_shared,
    backward_slots,
    rings,
    roles_load,
    roles_shared,
)
from tests.kernels.gluon_protocol_backward import GROUP, HEADS
from tests.kernels.gluon_values import Int, Pointer, Vec
from tests.kernels.gluon_world import ProtocolError, World, held, play, stand_ins

# Where two have a function of one name, that of the first counts.
MODULES = (
    backward_roles, roles_shared, roles_load, backward_load, backward_shared, backward_slots, rings,
)  # fmt: skip
TILE_M, COLUMNS, PIECES = 64, 64, 3
P_AT, DS_AT, EXACT_AT = (Int(i << 20) for i in (1, 2, 3))
DS_BYTES = 64 * 96 * 2


@dataclass(eq=False)
class Token(Vec):
    """What stands for numbers of a step: "s", "p", "dp", "ds", "dq", "dv", "dk", or "stats" of a
    line, whose `n` is (which, line)."""

    kind: str
    n: Any
    steps: Any = ()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Token) and (self.kind, self.n) == (other.kind, other.n)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, _: Any) -> Token:  # type: ignore[override]
        return self

    def __mul__(self, other: Any) -> Token:  # type: ignore[override]
        if not isinstance(other, Token):
            return self
        if (self.kind, other.kind) != ("p", "dp") or self.n != other.n:
            raise ProtocolError(f"{self} times {other}")
        return Token("ds", self.n)

    def __sub__(self, other: Any) -> Token:
        if not isinstance(other, Token):
            return self  # a number that all are lessened by
        kind, which = {"s": ("p", 0), "dp": ("dp", 1)}[self.kind]
        if other.n != (which, self.steps[self.n][-1]):
            raise ProtocolError(f"{self} less {other}")
        return Token(kind, self.n)

    def __str__(self) -> str:
        return f"{self.kind} of {self.n}"


@dataclass(frozen=True)
class RolesVisit:
    """Which queries a tile is visited by: of each unit (block of queries, flags of its pieces)."""

    blocks: tuple[tuple[tuple[int, int], ...], ...]
    same: bool
    q_len: int

    @property
    def pitch(self) -> int:
        return -(-self.q_len // TILE_M) * TILE_M

    def steps(self, cfg: Any) -> list[tuple[int, int, int, int, int]]:
        """(b, h, first row, tag, line) of every step."""
        found = []
        for unit, blocks in enumerate(self.blocks):
            b, h = unit // GROUP, GROUP + unit % GROUP
            for block, flags in self.blocks[0] if self.same else blocks:
                for sub in range(cfg.SUB):
                    row = (block * cfg.SUB + sub) * TILE_M
                    line = (b * HEADS + h) * self.pitch + row
                    tag = row * 2 + flags * 2 + (flags != 0b101010)
                    past = 2 * HEADS * self.pitch
                    found.append((b, h, row, tag, line if row < self.q_len else past))
        return found

    def place(self) -> SimpleNamespace:
        """The tile, of batch entry 0 and key head 1, is the last of two: bounds are of both."""
        bounds, entries = [], []
        for unit in range(2 * HEADS):
            blocks: tuple[tuple[int, int], ...] = ()
            own = unit - GROUP if unit < HEADS else unit - HEADS
            if self.same:
                blocks = self.blocks[0]
            elif unit % HEADS in (GROUP, GROUP + 1) and own < len(self.blocks):
                blocks = self.blocks[own]
            first = len(entries)
            entries += [block << 6 | flags for block, flags in blocks]
            bounds += [0, 0, first, len(entries)]
        steps = (0, 0) if self.same else (HEADS, 1)
        numbers = {
            "b_kv": 0, "h_kv": 1, "start": 96, "block": 2, "units": len(self.blocks),
            "group": GROUP, "heads": HEADS, "pitch": self.pitch,
            "spare": 2 * HEADS * self.pitch, "q_len": self.q_len, "kv_len": 192,
            "step_b": steps[0], "step_h": steps[1], "key_blocks": 4,
        }  # fmt: skip
        memory = {"offsets": Pointer(bounds), "entries": Pointer([*entries, 0])}
        return SimpleNamespace(**{name: Int(n) for name, n in numbers.items()}, **memory)


class Roles:
    """A program with a configuration."""

    def __init__(self, cfg: Any, visit: RolesVisit, seed: int, laggard: str = "") -> None:
        """laggard: "load", "values" or "keys"."""
        self.cfg, self.world, self.laggard = cfg, World(seed), laggard
        self.place, self.steps = visit.place(), visit.steps(cfg)
        self.total = len(self.steps)
        self.mem: Any = None
        self.added: list[tuple[int, int]] = []
        self.left: list[tuple[str, int, int]] = []
        self.masked: list[tuple[int, int]] = []

    def run(self) -> None:
        """To the end.

        Raises:
            ProtocolError: it would hang or compute something else.
        """
        cfg, numbers = self.cfg, (1.0, 1.0, Int(192), Int(0), Int(0))
        with held(MODULES, self.names()):
            self.mem = mem = roles_shared.allocate(cfg)
            at = self.place
            values = backward_roles._own_values, (mem, at, "dq", "dv", (), numbers, cfg)
            keys = backward_roles._own_keys, (mem, at, "dq", "dk", 1.0, cfg)
            load = functools.partial(roles_load.load, "q", "do", "k", "v", "stats", mem, at, cfg)
            warps = [(load, 0, self.laggard == "load")]
            for name, (role, args) in {"values": values, "keys": keys}.items():
                warps.append((functools.partial(role, *args), 0, self.laggard == name, 4))
            play(self.world, warps)
        if sorted(self.added) != [(n, half) for n in range(self.total) for half in (0, 1)]:
            raise ProtocolError(f"dq of {len(self.added)} of {self.total} steps was added")
        panels = {"dk": cfg.PANELS, "dv": cfg.VALUE_PANELS}
        if sorted(self.left) != [
            (name, 96 + 32 * piece, 64 * i)
            for name, count in panels.items() for piece in range(PIECES) for i in range(count)
        ]:  # fmt: skip
            raise ProtocolError(f"results left for {sorted(self.left)}")
        tags = [tag for _, _, _, tag, _ in self.steps]
        if sorted(self.masked) != sorted((t, i) for t in tags if t & 1 for i in range(PIECES)):
            raise ProtocolError(f"masked: {self.masked}")
        unused = [i for i, slot in enumerate(self.block.slots) if slot.count and not slot.completed]
        if self.total > 1 and unused:
            raise ProtocolError(f"nobody arrives at barriers {unused}")

    def names(self) -> dict[str, Any]:
        """What the functions' modules hold in place of the language's."""
        found = stand_ins(self.world, 1, MODULES)
        vars(found["bi"])["async_load"] = self._copy
        vars(found["addresses"])["find_all"] = self._find_all
        return found | {
            "tma": SimpleNamespace(store_wait=lambda _: None),
            "start_scores": functools.partial(self._first_product, "s", "q", "k"),
            "start_dp": functools.partial(self._first_product, "dp", "do", "v"),
            "start_dv": functools.partial(self._sum, "dv", "do"),
            "start_dk": functools.partial(self._sum, "dk", "q"),
            "start_dq": self._start_dq,
            "done": lambda pending, acc: self.world.finish(pending, [acc]),
            "zeros": lambda _: Token("zeros", -1),
            "dq_places": lambda *_: None,
            "add_dq": self._add_dq,
            "lane_place": lambda: None,
            "store_96": self._store_96,
            "exp2_fast": lambda x: x,
            "_masked": self._mask,
            "async_store": self._leave,
        }

    def _find_all(self, block: Any, _: Any) -> tuple[Any, ...]:
        self.block = block
        return (block, None, None, None, None, P_AT, DS_AT, EXACT_AT)

    def _copy(self, tensor: str, place: list[int], barrier: Any, slot: Any) -> None:
        """As World.copy; row statistics are known as such."""
        size, world = slot.size, self.world
        world._use(barrier)
        content: Any = (tensor, *map(int, place))
        if tensor == "stats":
            content = Token("stats", (int(place[0]), int(place[1])))

        def land() -> None:
            slot.store(content)
            world._complete(barrier, 0, size)

        with world.changed:
            world.copies.append(land)

    def _panels(self, tensor: str, n: int) -> list[tuple[Any, Any]]:
        """(slot of memory, what it is to hold) of a step's rows, or of the tile's."""
        values = tensor in ("do", "v")
        count = self.cfg.VALUE_PANELS if values else self.cfg.PANELS
        memory = getattr(self.mem, {"do": "dout"}.get(tensor, tensor))
        if tensor in ("q", "do"):
            b, h, row, _, _ = self.steps[n]
            return [
                (memory.index((n & 1) * count + i), (tensor, b, h, row, i * COLUMNS))
                for i in range(count)
            ]
        width = 32 if tensor == "k" else COLUMNS
        return [
            (memory.index(i * PIECES + g), (tensor, 0, 1, 96 + 32 * g, i * width))
            for i in range(count * COLUMNS // width) for g in range(PIECES)
        ]  # fmt: skip

    def _product(self, what: Any, reads: list[tuple[Any, Any]]) -> Token:
        """One group, on operands that are there."""
        for slot, wanted in reads:
            if slot.content != wanted:
                raise ProtocolError(f"{what} reads {slot.content} for {wanted}")
        self.world.own.groups.append([(slot, slot.version, True) for slot, _ in reads])
        return what

    def _first_product(self, kind: str, rows: str, keys: str, mem: Any, n: int, _: Any) -> Token:
        there = n < self.total
        reads = self._panels(rows, n) + self._panels(keys, n) if there else []
        return self._product(Token(kind, int(n), self.steps), reads)

    def _sum(self, kind: str, rows: str, mem: Any, n: int, live: bool, acc: Token, _: Any) -> Token:
        if bool(live) != (n > 0) or (n > 0 and acc != Token(kind, n - 1)):
            raise ProtocolError(f"{kind} of {n} is added to {acc}, {live}")
        other = mem.p.index(0), Token("p", n)
        if kind == "dk":
            other = mem.ds.index((n & 1) * PIECES), Token("ds", n)
        return self._product(Token(kind, int(n)), [*self._panels(rows, n), other])

    def _start_dq(self, mem: Any, n: int, which: int, _: Any) -> Token:
        reads = []
        if n >= 0:
            ds = mem.ds.index((n & 1) * PIECES), Token("ds", n)
            half = self.cfg.PANELS * PIECES
            reads = [ds, *self._panels("k", n)[which * half : (which + 1) * half]]
        return self._product(Token("dq", (int(n), which)), reads)

    def _add_dq(self, _: Any, __: Any, line: int, dq: Token, ___: Any) -> None:
        n, which = dq.n
        if dq.kind != "dq" or self.steps[n][-1] != line:
            raise ProtocolError(f"{dq} goes to line {line}")
        with self.world.changed:
            self.added.append((n, which))

    def _store_96(self, x: tuple[Token, ...], address: int, _: Any) -> None:
        memory, first = self.mem.exact, 0
        if address < EXACT_AT:
            memory = self.mem.ds if address >= DS_AT else self.mem.p
            first = (address - DS_AT) // DS_BYTES * PIECES if address >= DS_AT else 0
        for i, piece in enumerate(x):
            memory.index(first + i).store(piece)

    def _mask(self, p: Token, tag: int, first: int, part: int, *_: Any) -> Token:
        if tag != self.steps[p.n][3] or first != 96:
            raise ProtocolError(f"{p} is masked by {tag}, from {first} on")
        with self.world.changed:
            self.masked.append((int(tag), int(part)))
        return p

    def _leave(self, name: str, place: list[int], slot: Any) -> None:
        wanted = Token(name, self.total - 1) if self.total else Token("zeros", -1)
        if slot.content != wanted:
            raise ProtocolError(f"{slot.content} leaves for {wanted}")
        with self.world.changed:
            self.left.append((name, int(place[2]), int(place[3])))
