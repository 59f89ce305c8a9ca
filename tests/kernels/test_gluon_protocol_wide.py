"""The warps of the Gluon backward of wide heads, played through: every order of waits that its
forms can meet ends, with each product on the operands of its step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.gluon_protocol_backward import TILE_M
from tests.kernels.gluon_protocol_wide import Wide, WideVisit
from tests.kernels.gluon_world import ProtocolError


def form(**changed: Any) -> SimpleNamespace:
    """A configuration, as fields_backward.wide_config would give it."""
    cfg = SimpleNamespace(
        TILE_M=TILE_M, STAGES=2, LOG_STAGES=1, D=4, DV=4, PANELS=3, VALUE_PANELS=2, OPERAND=None,
        SUB=2, TILES_PER_BLOCK=1, SAME_LISTS=False, HAS_LISTS=True, HAS_MASK=True, HAS_TAIL=True,
        MAY_MASK=True, NEEDS_QUERIES=True, BY_HEAD=False, FOLD=False, PERSISTENT=False,
        KV_STAGES=1, STEPS_PAST_END=False, DQ_APART=False, SWEEPS=False,
        ROWS_APART=False, MASK_FIRST=False, NAMED=0, BY_WARP=False, NATIVE=False, COLUMNS=64,
        VALUE_COLUMNS=64,
    )  # fmt: skip
    vars(cfg).update(changed)
    return cfg


FORMS = {
    "plain": form(),
    "from -lse and -delta": form(FOLD=True, VALUE_PANELS=3),
    "by head": form(BY_HEAD=True),
    "one list": form(SAME_LISTS=True, VALUE_PANELS=1),
    "no mask": form(
        HAS_LISTS=False, HAS_MASK=False, MAY_MASK=False, NEEDS_QUERIES=False, HAS_TAIL=False, SUB=1
    ),
}


def visit_of(cfg: Any, draw: random.Random) -> WideVisit:
    """Up to four heads of up to three live blocks each, the last of which may be past the end."""
    units = draw.choice((1, 2, 4))
    if not cfg.HAS_LISTS:
        count = draw.randint(1, 4)
        blocks = [tuple(range(count))] * units
        return WideVisit(tuple(blocks), False, count * TILE_M - draw.randint(0, TILE_M - 1))
    blocks = [tuple(sorted(draw.sample(range(4), draw.randint(0, 3)))) for _ in range(units)]
    return WideVisit(tuple(blocks), cfg.SAME_LISTS, 4 * cfg.SUB * TILE_M - draw.randint(0, 6))


@pytest.mark.parametrize("laggard", ["", "load", "keys"])
@pytest.mark.parametrize("name", FORMS)
def test_every_wait_ends_and_every_product_has_its_operands(name: str, laggard: str) -> None:
    draw = random.Random(name)
    for seed in range(4):
        Wide(FORMS[name], [visit_of(FORMS[name], draw)], seed, laggard).run()


LONG = WideVisit(((0, 1, 2), (1, 3)), False, 4 * 2 * TILE_M)


def dq_of_this_step(names: dict[str, Any]) -> dict[str, Any]:
    """dq is computed before the other half of the keys has given its part."""

    def wait(barrier, phase, pred=True):
        if not barrier.name.startswith("ds_full"):
            names["mbarrier"].wait(barrier, phase, pred)

    return {"mbarrier": SimpleNamespace(**{**vars(names["mbarrier"]), "wait": wait})}


def gradients_given_back_early(names: dict[str, Any]) -> dict[str, Any]:
    """The next step's are copied over those that dP still reads."""

    def start_dp(mem, n, which, layout, cfg):
        names["mbarrier"].arrive(mem.do_empty.index(names["slot_of"](n, cfg)))
        return names["start_dp"](mem, n, which, layout, cfg)

    return {"start_dp": start_dp}


def keys_left_early(names: dict[str, Any]) -> dict[str, Any]:
    """dk takes the keys' place before the other consumer has formed its last dq of them."""

    def wait(barrier, phase, pred=True):
        if not barrier.name.startswith("ds_empty"):
            names["mbarrier"].wait(barrier, phase, pred)

    return {"mbarrier": SimpleNamespace(**{**vars(names["mbarrier"]), "wait": wait})}


@pytest.mark.parametrize("mistake", [dq_of_this_step, gradients_given_back_early, keys_left_early])
def test_planted_mistakes_are_found(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def play(seed: int) -> None:
        program = Wide(FORMS["plain"], [LONG], seed, laggard="keys")
        names = program.names()
        monkeypatch.setattr(program, "names", lambda: names | mistake(names))
        program.run()

    with pytest.raises(ProtocolError):
        for seed in range(8):
            play(seed)
