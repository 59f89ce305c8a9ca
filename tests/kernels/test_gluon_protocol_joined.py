"""Joined tiles of the Gluon forward (forward_joined.py), played through."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.gluon_protocol import Launch, Plan
from tests.kernels.gluon_world import ProtocolError
from tests.kernels.test_gluon_protocol import PLAIN, form, plan_of

JOINED = PLAIN | {"JOINED": True, "OVERLAP": True, "AHEAD": True, "PACKED": True}
FOUR = {"STAGES": 4, "LOG_STAGES": 2}
TAIL = {"NEEDS_KEYS": True, "MAY_MASK": True, "HAS_TAIL": True}
FORMS = {
    "in use": form(3, BY_WARP=True, **JOINED, **FOUR),
    "tail": form(3, BY_WARP=True, **JOINED | TAIL, **FOUR),
    "two stages": form(3, BY_WARP=True, **JOINED | TAIL),
    "one tile of queries": form(3, BY_WARP=True, Q_STAGES=1, **JOINED | TAIL),
    "barriers of Triton": form(3, **JOINED | TAIL, **FOUR),
    "late": form(3, BY_WARP=True, LATE=True, **JOINED | TAIL, **FOUR),
}


@pytest.mark.parametrize("laggard", ["", "load", "consume"])
@pytest.mark.parametrize("name", FORMS)
def test_every_wait_ends_and_every_product_has_its_operands(name: str, laggard: str) -> None:
    draw = random.Random(name)
    for seed in range(4):
        Launch(FORMS[name], plan_of(FORMS[name], draw), seed, laggard).run()


def tag_read_late(names: dict[str, Any]) -> dict[str, Any]:
    """After keys are given back, when that of a later step may lie there: LLVM had moved the load
    to where its value is used."""

    def finish_scores(s, mem, n, there, cfg):
        slot = names["slot_of"](n, cfg)
        s = names["warpgroup_mma_wait"](0, [s])
        names["leave_if"](there, mem, mem.k_empty, slot, 8, cfg)
        if there:
            slot_there, phase = names["slot_of"](n + 1, cfg), names["phase_of"](n + 1, cfg)
            names["wait_there"](mem, mem.k_full, slot_there, phase, 0, cfg)
        return s, names["get"](mem.tags.index(slot))

    return {"_finish_scores": finish_scores}


def nothing_waited_for(names: dict[str, Any]) -> dict[str, Any]:
    """The next tile's queries and keys are multiplied before they are there."""

    def wait_for_tile(mem, num_tiles, n, there, consumer, L, cfg):
        return names["take_queries"](
            mem, names["query_slot"](num_tiles, consumer, cfg), L, cfg
        )  # fmt: skip

    return {"_wait_for_tile": wait_for_tile}


def queries_kept(names: dict[str, Any]) -> dict[str, Any]:
    return {"leave_queries": lambda *_: None}


def queries_of_another_tile(names: dict[str, Any]) -> dict[str, Any]:
    def wait_for_tile(mem, num_tiles, n, there, consumer, L, cfg):
        names["_wait_for_tile"](mem, num_tiles, n, there, consumer, L, cfg)
        slot = names["query_slot"](num_tiles + 1, consumer, cfg)
        return names["take_queries"](mem, slot, L, cfg)

    return {"_wait_for_tile": wait_for_tile}


@pytest.mark.parametrize(
    ("name", "mistake", "said"),
    [
        ("tail", tag_read_late, "was used for keys"),
        ("two stages", tag_read_late, "was used for keys"),
        ("in use", nothing_waited_for, "used|copied over|more often|every warp"),
        ("in use", queries_kept, "every warp waits"),
        ("in use", queries_of_another_tile, "used|copied over"),
    ],
)
def test_planted_mistakes_are_found(
    name: str, mistake: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which warp goes on first is the threads' affair, so that one play may end well."""
    plan = Plan(((0, 1, 2, 3, 4),) * 3, programs=2, listed=False)
    named = Launch.names
    monkeypatch.setattr(Launch, "names", lambda self: (n := named(self)) | mistake(n))
    with pytest.raises(ProtocolError, match=said):
        for seed in range(12):
            Launch(FORMS[name], plan, seed, ("", "consume")[seed % 2]).run()
