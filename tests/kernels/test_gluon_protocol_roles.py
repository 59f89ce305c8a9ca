"""The warps of backward_roles.py, played through: every wait ends, each product has the operands of
its step, and mistakes that are planted are found."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from attnloom.backends.gluon.backward_shared import DS_LEFT, DS_THERE, Q_LEFT, Q_THERE
from attnloom.backends.gluon.roles_shared import P_LEFT, P_THERE
from tests.kernels.gluon_protocol_roles import TILE_M, Roles, RolesVisit
from tests.kernels.gluon_world import ProtocolError

FLAGS = (0b101010, 0b111111, 0b111010, 0b101000, 0b000011)


def form(**changed: Any) -> SimpleNamespace:
    """A configuration, as fields_backward.roles_config would give it."""
    cfg = SimpleNamespace(
        TILE_M=TILE_M, STAGES=2, LOG_STAGES=1, D=64, DV=64, PANELS=3, VALUE_PANELS=3, OPERAND=None,
        SUB=2, SAME_LISTS=False, HAS_LISTS=True, HAS_MASK=True, HAS_TAIL=True, MAY_MASK=True,
        SHIFT=12, STEPS_PAST_END=True, SWEEPS=False, NAMED=0, BY_WARP=True, OVERLAPS=False,
    )  # fmt: skip
    vars(cfg).update(changed)
    return cfg


FORMS = {
    "lists": form(),
    "narrow values": form(VALUE_PANELS=1, SHIFT=0, HAS_TAIL=False),
    "one list": form(SAME_LISTS=True, VALUE_PANELS=2, SUB=1),
    "no mask": form(HAS_LISTS=False, HAS_MASK=False, MAY_MASK=False, HAS_TAIL=False, SUB=1),
}


def visit_of(cfg: Any, draw: random.Random) -> RolesVisit:
    """Up to four heads of up to three live blocks each, the last of which may be past the end."""
    units = draw.choice((1, 2, 4))
    if not cfg.HAS_LISTS:
        count = draw.randint(1, 4)
        blocks = tuple((block, 0b101010) for block in range(count))
        return RolesVisit((blocks,) * units, False, count * TILE_M - draw.randint(0, TILE_M - 1))
    lists = [
        tuple((block, draw.choice(FLAGS)) for block in sorted(draw.sample(range(4), count)))
        for count in (draw.randint(0, 3) for _ in range(units))
    ]
    q_len = 4 * cfg.SUB * TILE_M - draw.randint(0, TILE_M + 6)
    return RolesVisit(tuple(lists), cfg.SAME_LISTS, q_len)


@pytest.mark.parametrize("laggard", ["", "load", "values", "keys"])
@pytest.mark.parametrize("name", FORMS)
def test_every_wait_ends_and_every_product_has_its_operands(name: str, laggard: str) -> None:
    draw = random.Random(name)
    for seed in range(4):
        Roles(FORMS[name], visit_of(FORMS[name], draw), seed, laggard).run()


LONG = RolesVisit((((0, 42), (1, 63), (2, 42)), ((1, 42), (3, 40))), False, 4 * 2 * TILE_M)
# The other consumer's wait that is left out, who is slow then, and why it is waited for.
FORGOTTEN = {
    "p is stored over what dscore is computed from": (P_LEFT, "keys"),
    "dscore before p is there": (P_THERE, "values"),
    "dq before dscore is there": (DS_THERE, "keys"),
    "dscore, or dk, over what dq reads": (DS_LEFT, "values"),
    "scores before queries are there": (Q_THERE, "load"),
}


@pytest.mark.parametrize("mistake", FORGOTTEN)
def test_a_forgotten_wait_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, slow = FORGOTTEN[mistake]
    first = int(place.value)

    def hasty(names: dict[str, Any]) -> dict[str, Any]:
        wait = names["addresses"].wait

        def other(block: Any, number: int, phase: int) -> None:
            if not first <= number < first + 4:
                wait(block, number, phase)

        def other_if(live: Any, block: Any, number: int, phase: int) -> None:
            if live:
                other(block, number, phase)

        changed = {**vars(names["addresses"]), "wait": other, "wait_if": other_if}
        return {"addresses": SimpleNamespace(**changed)}

    find(hasty, slow, monkeypatch)


def test_queries_given_back_before_dk_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(names: dict[str, Any]) -> dict[str, Any]:
        def start_dk(mem: Any, n: int, *rest: Any) -> Any:
            names["addresses"].arrive(mem.block, (n & 1) + int(Q_LEFT.value))
            return names["start_dk"](mem, n, *rest)

        return {"start_dk": start_dk}

    find(early, "keys", monkeypatch)


def find(mistake: Any, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One order of several shows it."""

    def play(seed: int) -> None:
        program = Roles(FORMS["lists"], LONG, seed, laggard=slow)
        names = program.names()
        monkeypatch.setattr(program, "names", lambda: names | mistake(names))
        program.run()

    with pytest.raises(ProtocolError):
        for seed in range(8):
            play(seed)
