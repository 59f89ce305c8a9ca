"""Plays the Gluon forward's steps of boxes, see gluon_protocol_strips.py."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.gluon_protocol_strips import NUM_BLOCKS, BoxLaunch, BoxPlan
from tests.kernels.gluon_world import ProtocolError
from tests.kernels.test_gluon_protocol import PLAIN, form, late_values_by_warp, turn_kept

STRIPS = {"STRIPS": True, "WIDE": True, "BY_WARP": True, "AHEAD": True, "PACKED": True}
STRIPS |= {"OVERLAP": True, "NUM_COLUMNS": 0, "PARTS": 3, "PANELS": 3, "Q_STAGES": 1, "LATE": True}
STRIPS |= {"OUT_RING": True, "TILE_N": 12, "BOX": 4, "SUB": 4}
IN_QUERIES = {"OUT_RING": False, "OUT_IN_Q": True}
QUICK = {"OVERLAP": False, "AHEAD": False, "PACKED": False, "LATE": False} | IN_QUERIES
QUICK |= {"WARPS": 8, "ROWS": 8}
FORMS = {
    "blocks of four boxes": form(**STRIPS),
    "blocks of two": form(**STRIPS | {"SUB": 2}),
    "blocks of eight": form(**STRIPS | {"SUB": 8}),
    "in turn": form(**STRIPS, TURNS=True),
    "in turn, no mask": form(**STRIPS | PLAIN | {"MAY_MASK": True, "NEEDS_KEYS": True}, TURNS=True),
    "in turn, no lists": form(**STRIPS, TURNS=True, HAS_LISTS=False, MAY_BE_EMPTY=False),
    "no mask, no tail": form(**STRIPS | PLAIN, TURNS=True),
    "quick": form(1, **STRIPS | QUICK),
    "quick, no lists": form(1, **STRIPS | QUICK, HAS_LISTS=False, MAY_BE_EMPTY=False),
}


def plan_of(cfg: Any, draw: random.Random) -> BoxPlan:
    num_tiles = draw.randint(1, 4)
    if cfg.HAS_LISTS:
        blocks = range(NUM_BLOCKS)
        keys = [sorted(draw.sample(blocks, draw.randint(0, 5))) for _ in range(num_tiles)]
    else:
        keys = [list(range(draw.randint(1, 5)))] * num_tiles
    plan = BoxPlan(tuple(map(tuple, keys)), programs=1, listed=cfg.HAS_LISTS)
    return BoxPlan(plan.keys, draw.randint(1, min(3, plan.total)), plan.listed)


@pytest.mark.parametrize("laggard", ["", "load", "consume"])
@pytest.mark.parametrize("name", FORMS)
def test_every_wait_ends_and_every_product_has_its_operands(name: str, laggard: str) -> None:
    draw = random.Random(name)
    for seed in range(3):
        BoxLaunch(FORMS[name], plan_of(FORMS[name], draw), seed, laggard).run()


def test_tiles_without_keys() -> None:
    for keys in (((),), ((0, 1), ()), ((), (8,))):
        BoxLaunch(FORMS["blocks of four boxes"], BoxPlan(keys, programs=1), seed=0).run()


LONG = BoxPlan(((0, 1, 2, 4, 5), (2, 8), ()), programs=2)


def room_for_two_places(names: dict[str, Any]) -> dict[str, Any]:
    """Rows are written over while a consumer that has given back the keys still asks for them."""
    return {"PLACES": 2}


def a_step_less(names: dict[str, Any]) -> dict[str, Any]:
    return {"steps_of": lambda first, last, cfg: (last - first) // 3}


def the_first_entry_again(names: dict[str, Any]) -> dict[str, Any]:
    """The second box of a step has the block of its first."""

    def entries_at(lists, first, last, cfg):
        left, _, right = names["entries_at"](lists, first, last, cfg)
        return left, left, right

    return {"entries_at": entries_at}


def whole_lists(names: dict[str, Any]) -> dict[str, Any]:
    """Boxes past a list's end are live."""

    def box_of(entry, at, last, *rest):
        return names["_box_of"](entry, at, at + 1, *rest)

    return {"_box_of": box_of}


def overhang_forgotten(names: dict[str, Any]) -> dict[str, Any]:
    def box_of(entry, at, last, kv_len, overhang, cfg):
        return names["_box_of"](entry, at, last, kv_len, -1, cfg)

    return {"_box_of": box_of}


def queries_left_early(names: dict[str, Any]) -> dict[str, Any]:
    """Queries are given back when a tile begins, and not when its last scores are there."""

    def take_queries(mem, at, L, cfg):
        names["leave_queries"](mem, at // cfg.PANELS, cfg)
        return names["take_queries"](mem, at, L, cfg)

    return {"take_queries": take_queries}


def keys_left_early(names: dict[str, Any]) -> dict[str, Any]:
    def scores(q, mem, n, L, cfg):
        found = names["scores"](q, mem, n, L, cfg)
        names["addresses"].arrive(mem.block, names["slot_of"](n, cfg) + 8)
        return found

    return {"scores": scores}


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (room_for_two_places, "are said to be"),
        (a_step_less, "used"),
        (the_first_entry_again, "used"),
        (whole_lists, "used|said|masked|range"),
        (overhang_forgotten, "masked"),
        (queries_left_early, "used|copied over|more often|every"),
        (keys_left_early, "used|copied over|more often|every"),
        (late_values_by_warp, "used|copied over|more often|every|computed"),
    ],
)
def test_planted_mistakes_are_found(
    mistake: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = BoxLaunch.names
    monkeypatch.setattr(BoxLaunch, "names", lambda self: (n := named(self)) | mistake(n))
    with pytest.raises((ProtocolError, IndexError), match=said):
        for seed in range(12):
            for laggard in ("", "consume"):
                BoxLaunch(form(**STRIPS | {"TURNS": False}), LONG, seed, laggard).run()


def test_a_turn_that_is_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    named = BoxLaunch.names
    monkeypatch.setattr(BoxLaunch, "names", lambda self: (n := named(self)) | turn_kept(n))
    with pytest.raises(ProtocolError, match="every warp waits"):
        BoxLaunch(FORMS["in turn"], LONG, seed=0).run()
