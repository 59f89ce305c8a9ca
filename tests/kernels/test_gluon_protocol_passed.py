"""Consumers of the Gluon forward that pass over steps (forward_passed.py), played through."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.gluon_protocol import Launch, Plan
from tests.kernels.gluon_world import ProtocolError
from tests.kernels.test_gluon_protocol import PLAIN, THREE_IN_TURN, form, plan_of

SKIPS = {"SKIPS": True, "SKIPS_ENDS": True}
NO_MASK = PLAIN | {"SKIPS": True, "MAY_BE_EMPTY": True}
PACKED = {"OVERLAP": True, "AHEAD": True, "PACKED": True, "STAGES": 4, "LOG_STAGES": 2}
TWO_STAGES = {"STAGES": 2, "LOG_STAGES": 1}
IN_TURN = {"Q_STAGES": 1, "REST": 32, "OUT_IN_Q": True, "WIDE": True}
FORMS = {
    "columns": form(3, **SKIPS),
    "no columns": form(3, NUM_COLUMNS=0, **SKIPS),
    "overlapped, columns": form(3, **PACKED, **SKIPS),
    "overlapped": form(3, NUM_COLUMNS=0, **PACKED, **SKIPS),
    "by warp": form(3, NUM_COLUMNS=0, BY_WARP=True, **PACKED, **SKIPS),
    "overlapped, two stages": form(3, NUM_COLUMNS=0, BY_WARP=True, **PACKED | TWO_STAGES, **SKIPS),
    "turns": form(3, NUM_COLUMNS=0, **THREE_IN_TURN, **SKIPS),
    "turns, columns": form(3, **THREE_IN_TURN, **SKIPS),
    "turns, two stages": form(3, NUM_COLUMNS=0, **THREE_IN_TURN | TWO_STAGES, **SKIPS),
    "named": form(3, NAMED=True, **SKIPS),
    "no mask": form(3, **NO_MASK),
    "overlapped, no mask": form(3, BY_WARP=True, **PACKED, **NO_MASK),
    "turns, no mask": form(3, **THREE_IN_TURN, **NO_MASK),
    "wide, no mask": form(3, NAMED=True, **IN_TURN, **NO_MASK),
}  # fmt: skip
LAGGARDS = [
    (name, laggard)
    for name, cfg in FORMS.items()
    for laggard in ("", "load", "consume", *(("columns",) if cfg.NUM_COLUMNS else ()))
]


@pytest.mark.parametrize(("name", "laggard"), LAGGARDS)
def test_every_wait_ends_and_every_product_has_its_operands(name: str, laggard: str) -> None:
    draw = random.Random(name)
    for seed in range(4):
        Launch(FORMS[name], plan_of(FORMS[name], draw), seed, laggard).run()


# Tile 0: the second consumer has no block in the first step, the second and third none in the last.
ENDS = Plan(((0, 1, 2, 4), (4, 6), (), (5,)), programs=2)


def test_which_steps_are_passed_over() -> None:
    launch = Launch(FORMS["turns"], ENDS, seed=0)
    wanted = {0: [(0, 1, 2, 4), (1, 2), (0, 1, 2)], 1: [(4,), (4,), (6,)]}
    wanted |= {2: [()] * 3, 3: [(5,), (5,), ()]}
    found = {tile: [launch._keys_of(tile, c) for c in range(3)] for tile in range(4)}
    assert found == wanted
    launch.run()


def values_not_waited_for(names: dict[str, Any]) -> dict[str, Any]:
    """They are given back while those that lay in their slot before may be read."""

    def pass_over_values(mem, n, live, cfg):
        if live:
            names["leave"](mem, mem.v_empty, names["slot_of"](n, cfg), 12, cfg)
        return n + int(live)

    return {"pass_over_values": pass_over_values}


def turn_not_taken(names: dict[str, Any]) -> dict[str, Any]:
    return {"leave_turn_if": lambda *_: None}


def a_turn_for_the_first_step(names: dict[str, Any]) -> dict[str, Any]:
    """Which has none where products are issued either."""

    def leave_turn_if(live, consumer, cfg):
        names["leave_turn_if"](True, consumer, cfg)

    return {"leave_turn_if": leave_turn_if}


def keys_kept(names: dict[str, Any]) -> dict[str, Any]:
    return {"pass_over_keys": lambda *_: None}


def step_not_counted(names: dict[str, Any]) -> dict[str, Any]:
    def pass_over_values(mem, n, live, cfg):
        names["pass_over_values"](mem, n, live, cfg)
        return n

    return {"pass_over_values": pass_over_values}


def ends_of_another_consumer(names: dict[str, Any]) -> dict[str, Any]:
    def own_steps(steps, dead, consumer, *rest):
        return names["own_steps"](steps, dead, (consumer + 1) % 3, *rest)

    return {"own_steps": own_steps}


def ends_of_the_next_tile(names: dict[str, Any]) -> dict[str, Any]:
    """The producer, which reads them a tile ahead, gives them out a tile too soon."""
    held: list[Any] = [0]

    def dead_ends(*args):
        held.append(names["dead_ends"](*args))
        return held[-2]

    return {"dead_ends": dead_ends}


def idle_step_missed(names: dict[str, Any]) -> dict[str, Any]:
    def pass_over_all(mem, n, steps, consumer, cfg):
        return names["pass_over_all"](mem, n, max(steps - 1, 0), consumer, cfg)

    return {"pass_over_all": pass_over_all}


def idle_and_at_work(names: dict[str, Any]) -> dict[str, Any]:
    return {"pass_over_all": lambda mem, n, steps, consumer, cfg: n}


ANY = "every warp waits|more often|used|copied over|computed"


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("overlapped, two stages", values_not_waited_for),
        ("no columns", values_not_waited_for),
        ("turns", turn_not_taken),
        ("turns, no mask", turn_not_taken),
        ("turns", a_turn_for_the_first_step),
        ("overlapped", keys_kept),
        ("turns", keys_kept),
        ("overlapped", step_not_counted),
        ("no columns", step_not_counted),
        ("turns", ends_of_another_consumer),
        ("turns", ends_of_the_next_tile),
        ("overlapped, no mask", idle_step_missed),
        ("wide, no mask", idle_step_missed),
        ("turns", idle_and_at_work),
    ],
)
def test_planted_mistakes_are_found(
    name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which warp goes on first is the threads' affair, so that one play may end well."""
    cfg: SimpleNamespace = FORMS[name]
    plan = ENDS if cfg.HAS_LISTS else Plan(((0, 1, 2),) * 3, programs=2, listed=False)
    named = Launch.names
    monkeypatch.setattr(Launch, "names", lambda self: (n := named(self)) | mistake(n))
    with pytest.raises(ProtocolError, match=ANY):
        for seed in range(12):
            Launch(cfg, plan, seed, ("", "consume")[seed % 2]).run()
