"""The Gluon forward's warps, played through: every order of waits that its forms can meet ends."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.gluon_protocol import Launch, Plan
from tests.kernels.gluon_world import ProtocolError


def form(consumers: int = 2, **changed: Any) -> SimpleNamespace:
    """A configuration, as fields_forward.config_of would give it for documents."""
    cfg = SimpleNamespace(
        CONSUMERS=consumers, WARPS=4, ROWS=4, TILE_N=8, STAGES=2, LOG_STAGES=1, Q_STAGES=2,
        PANELS=1, D=64, DV=64, Q_KEPT=0, REST=0, WIDE=False, NAMED=False, BY_WARP=False,
        TURNS=False, SKIPS=False, SKIPS_ENDS=False, JOINED=False, STRIPS=False, OUT_RING=False,
        BY_LANE=False, LATE=False, AHEAD=False, PACKED=False, OVERLAP=consumers < 3, OUT_IN_Q=False,
        PREFETCH=False, OPERAND=None, SUB=1, HAS_LISTS=True, APART=consumers == 3,
        HAS_SCORE=False, HAS_BIAS=False, HAS_MASK=True, HAS_TAIL=False, MAY_MASK=True,
        NEEDS_KEYS=True, MAY_BE_EMPTY=True, NUM_COLUMNS=1, COLUMN0="int32", BAKED=False,
        WANT_MAX=False, MASK_HEAD=lambda *_: None,
        MASK_COLUMN=lambda args, head, b, h, keys: (keys,),
    )  # fmt: skip
    vars(cfg).update(changed)
    parts = {"PARTS": 3 if cfg.WIDE else cfg.PANELS, "PART": 64}
    vars(cfg).update({"KEY_PANELS": cfg.STAGES * cfg.PANELS} | parts | changed)
    return cfg


PLAIN = {"HAS_LISTS": False, "HAS_MASK": False, "MAY_MASK": False, "NEEDS_KEYS": False}
PLAIN |= {"MAY_BE_EMPTY": False, "NUM_COLUMNS": 0, "APART": False}
FIVE_PANELS = {"PANELS": 3, "KEY_PANELS": 5, "Q_STAGES": 1, "OUT_IN_Q": True, "AHEAD": True}
FIVE_PANELS |= {"LATE": True, "WIDE": True}
EIGHT = {"WARPS": 8, "ROWS": 8, "BY_WARP": True, "OVERLAP": False}
THREE_IN_TURN = {"OVERLAP": True, "AHEAD": True, "PACKED": True, "LATE": True}
THREE_IN_TURN |= {"BY_WARP": True, "TURNS": True, "STAGES": 4, "LOG_STAGES": 2}
QUICK = {"LATE": False, "AHEAD": False, "WIDE": False} | EIGHT
FORMS = {
    "two consumers": form(),
    "three consumers": form(3),
    "two consumers, apart": form(APART=True),
    "no mask": form(**PLAIN),
    "no columns": form(NUM_COLUMNS=0),
    "one tile of queries": form(Q_STAGES=1, OUT_IN_Q=True),
    "four stages": form(STAGES=4, LOG_STAGES=2),
    "one consumer": form(1, OUT_IN_Q=True),
    "one consumer, queries ahead": form(1),
    "one consumer in turn": form(1, OVERLAP=False),
    "short rows": form(1, Q_KEPT=1, Q_STAGES=1),
    "queries in registers": form(Q_KEPT=1),
    "queries left early": form(Q_KEPT=1, Q_STAGES=1),
    "panels": form(PANELS=3, OUT_IN_Q=True, NUM_COLUMNS=0),
    "panels, columns": form(PANELS=3, OUT_IN_Q=True),
    "panels in registers": form(PANELS=3, OUT_IN_Q=True, NUM_COLUMNS=0, Q_KEPT=3),
    "panels left early": form(PANELS=3, NUM_COLUMNS=0, Q_KEPT=3, Q_STAGES=1, LATE=True),
    "output late, one tile": form(NUM_COLUMNS=0, Q_STAGES=1, OUT_IN_Q=True, LATE=True),
    "keys ahead": form(Q_KEPT=1, Q_STAGES=1, AHEAD=True),
    "keys ahead, no columns": form(Q_KEPT=1, Q_STAGES=1, NUM_COLUMNS=0, AHEAD=True),
    "keys ahead, apart": form(APART=True, Q_KEPT=1, Q_STAGES=1, AHEAD=True),
    "keys ahead, no mask": form(AHEAD=True, **PLAIN),
    "packed, three consumers": form(3, OVERLAP=True, AHEAD=True, PACKED=True),
    "packed, three, no columns": form(3, OVERLAP=True, AHEAD=True, PACKED=True, NUM_COLUMNS=0),
    "packed, three, no mask": form(3, OVERLAP=True, AHEAD=True, PACKED=True, **PLAIN),
    "cut": form(Q_KEPT=1, Q_STAGES=1, AHEAD=True, PACKED=True, REST=32, NUM_COLUMNS=0),
    "cut, no mask": form(Q_KEPT=1, Q_STAGES=1, AHEAD=True, PACKED=True, REST=32, **PLAIN),
    "short rows, no columns": form(1, Q_KEPT=1, Q_STAGES=1, NUM_COLUMNS=0),
    "named": form(NAMED=True),
    "named, three consumers": form(3, NAMED=True),
    "named, apart": form(APART=True, NAMED=True),
    "named, no mask": form(NAMED=True, **PLAIN),
    "named, no columns": form(Q_KEPT=1, Q_STAGES=1, NUM_COLUMNS=0, AHEAD=True, NAMED=True),
    "named, short rows": form(1, Q_KEPT=1, Q_STAGES=1, NAMED=True),
    "named, one consumer": form(1, OUT_IN_Q=True, NAMED=True, NUM_COLUMNS=0),
    "named, in turn": form(1, OVERLAP=False, NAMED=True),
    "named, panels": form(
        PANELS=3, NUM_COLUMNS=0, Q_KEPT=3, Q_STAGES=1, LATE=True, AHEAD=True, NAMED=True
    ),
    "named, panels, no mask": form(
        PANELS=3, Q_KEPT=3, Q_STAGES=1, LATE=True, AHEAD=True, NAMED=True, **PLAIN
    ),
    "named, panels, columns": form(PANELS=3, OUT_IN_Q=True, NAMED=True),
    "named, one tile, keys ahead": form(
        NUM_COLUMNS=0, Q_STAGES=1, OUT_IN_Q=True, LATE=True, AHEAD=True, NAMED=True
    ),
    "named, one tile": form(Q_STAGES=1, OUT_IN_Q=True, NAMED=True),
    "named, prefetch": form(Q_STAGES=1, OUT_IN_Q=True, PREFETCH=True, NAMED=True),
    "named, packed, three": form(3, OVERLAP=True, AHEAD=True, PACKED=True, NAMED=True),
    "by warp": form(BY_WARP=True),
    "by warp, three consumers": form(3, BY_WARP=True),
    "by warp, apart": form(APART=True, BY_WARP=True),
    "by warp, no mask": form(BY_WARP=True, **PLAIN),
    "by warp, no columns": form(Q_KEPT=1, Q_STAGES=1, NUM_COLUMNS=0, AHEAD=True, BY_WARP=True),
    "by warp, packed, three": form(3, OVERLAP=True, AHEAD=True, PACKED=True, BY_WARP=True),
    "by warp, wide": form(
        PANELS=3,
        NUM_COLUMNS=0,
        Q_KEPT=3,
        Q_STAGES=1,
        LATE=True,
        AHEAD=True,
        BY_WARP=True,
        WIDE=True,
    ),
    "turns": form(2, BY_WARP=True, TURNS=True),
    "turns, three consumers": form(3, **THREE_IN_TURN),
    "turns, apart": form(3, APART=True, **THREE_IN_TURN),
    "turns, no mask": form(3, **THREE_IN_TURN, **PLAIN),
    "turns, no columns": form(3, **THREE_IN_TURN, NUM_COLUMNS=0),
    "quick": form(1, **EIGHT),
    "quick, apart": form(1, APART=True, **EIGHT),
    "quick, one tile of queries": form(1, OUT_IN_Q=True, Q_STAGES=1, **EIGHT),
    "quick, no columns": form(1, Q_KEPT=1, NUM_COLUMNS=0, **EIGHT),
    "quick, panels": form(1, PANELS=3, Q_KEPT=3, Q_STAGES=1, **EIGHT),
    "quick, no mask": form(1, **EIGHT, **PLAIN),
    "quick, five panels": form(1, **FIVE_PANELS | QUICK, NUM_COLUMNS=0),
    "wide": form(
        PANELS=3, NUM_COLUMNS=0, Q_KEPT=3, Q_STAGES=1, LATE=True, AHEAD=True, NAMED=True, WIDE=True
    ),
    "wide, cut": form(Q_KEPT=1, Q_STAGES=1, AHEAD=True, REST=32, NUM_COLUMNS=0, WIDE=True),
    "wide, cut, named": form(
        Q_KEPT=1, Q_STAGES=1, AHEAD=True, PACKED=True, REST=32, NUM_COLUMNS=0, WIDE=True, NAMED=True
    ),
    "wide, in turn": form(3, Q_STAGES=1, REST=32, OUT_IN_Q=True, NUM_COLUMNS=0, WIDE=True),
    "wide, in turn, named": form(
        3, Q_STAGES=1, REST=32, OUT_IN_Q=True, WIDE=True, NAMED=True, **PLAIN
    ),
    "five panels": form(**FIVE_PANELS, NUM_COLUMNS=0),
    "five panels, named": form(**FIVE_PANELS, NUM_COLUMNS=0, NAMED=True),
    "five panels, apart": form(**FIVE_PANELS, NUM_COLUMNS=0, NAMED=True, APART=True),
    "five panels, no mask": form(**FIVE_PANELS, NAMED=True, **PLAIN),
    "prefetch": form(PREFETCH=True),
    "prefetch, three consumers": form(3, PREFETCH=True),
    "prefetch, no mask": form(PREFETCH=True, **PLAIN | {"NEEDS_KEYS": True}),
}


def plan_of(cfg: Any, draw: random.Random) -> Plan:
    """Tiles of up to seven steps and of none; more programs than tiles are never launched."""
    num_tiles = draw.randint(1, 4)
    if cfg.HAS_LISTS:
        keys = [sorted(draw.sample(range(9), draw.randint(0, 7))) for _ in range(num_tiles)]
    else:
        keys = [list(range(draw.randint(1, 5)))] * num_tiles
    plan = Plan(tuple(map(tuple, keys)), programs=1, listed=cfg.HAS_LISTS)
    programs = draw.randint(1, min(3, plan.total))
    return Plan(plan.keys, programs, plan.listed)


# A warp that looks up keys is not in every form.
LAGGARDS = [
    (name, laggard)
    for name, cfg in FORMS.items()
    for laggard in ("", "load", "consume", *(("columns",) if cfg.NUM_COLUMNS else ()))
]


@pytest.mark.parametrize(("name", "laggard"), LAGGARDS)
def test_every_wait_ends_and_every_product_has_its_operands(name: str, laggard: str) -> None:
    """The warp that looks up keys could fall two phases behind consumers that need none of them:
    it hung, or they read columns of other keys."""
    draw = random.Random(name)
    for seed in range(2):
        Launch(FORMS[name], plan_of(FORMS[name], draw), seed, laggard).run()


@pytest.mark.parametrize("keys", [((),), ((0, 1), ())])
def test_a_tile_without_keys_does_not_wait_for_their_columns(
    keys: tuple[tuple[int, ...], ...],
) -> None:
    """Where consumers have blocks of their own it took a step that is not there for a partial one,
    and waited for ever: documents in blocks of 64 queries, D=128, when the last tile is empty."""
    Launch(form(APART=True), Plan(keys, programs=1), seed=0).run()


LONG = Plan(((0, 1, 2, 3, 4), (2, 3), ()), programs=2)


def told_twice(names: dict[str, Any]) -> dict[str, Any]:
    """A job that is said to be there once more."""

    def give_job(mem, n, *job):
        names["give_job"](mem, n, *job)
        names["mbarrier"].arrive(mem.job_full.index(n & 1))

    return {"give_job": give_job}


def fewer_bytes(names: dict[str, Any]) -> dict[str, Any]:
    return {"box": lambda tile, rows, *rest: names["box"](tile, rows - 1, *rest)}


def late_values(names: dict[str, Any]) -> dict[str, Any]:
    """Values of a step are multiplied before they are waited for."""

    def wait(barrier, phase, pred=True):
        if pred is not True:
            return None
        return names["mbarrier"].wait(barrier, phase)

    return {"mbarrier": SimpleNamespace(**{**vars(names["mbarrier"]), "wait": wait})}


def keys_of_the_step_before(names: dict[str, Any]) -> dict[str, Any]:
    def scores(q, mem, n, *rest):
        return names["scores"](q, mem, n ^ 1, *rest)

    return {"scores": scores}


def pieces_of_the_step_before(names: dict[str, Any]) -> dict[str, Any]:
    """What is looked up ahead is not of the next step, but of the one that does so."""

    def look_up_ahead(mem, n, *rest):
        return names["look_up_ahead"](mem, max(n - 1, 0), *rest)

    return {"look_up_ahead": look_up_ahead}


def queries_given_back_first(names: dict[str, Any]) -> dict[str, Any]:
    """Queries are multiplied from where the next tile's may already be."""

    def queries(mem, at, L, cfg):
        return at, tuple(mem.q.index(at + i) for i in range(cfg.Q_KEPT))

    return {"take_queries": queries}


def barriers_for_nobody(names: dict[str, Any]) -> dict[str, Any]:
    """Barriers of keys' columns in a form without columns; tiles were lost by it."""

    def allocate(cfg):
        mem = names["allocate"](cfg)
        mem.tag_full = names["gl"].allocate_shared_memory("int64", [1, 1], None)
        mem.tag_full.index(0).name = "tag_full[0]"
        names["mbarrier"].init(mem.tag_full.index(0), count=1)
        return mem

    return {"allocate": allocate}


def no_barriers_for_columns(names: dict[str, Any]) -> dict[str, Any]:
    def allocate(cfg):
        return names["allocate"](SimpleNamespace(**{**vars(cfg), "NUM_COLUMNS": 0}))

    return {"allocate": allocate}


def keys_left_early(names: dict[str, Any]) -> dict[str, Any]:
    """Keys are given back before their product is done."""

    def scores(q, mem, n, L, cfg):
        found = names["scores"](q, mem, n, L, cfg)
        names["bi"].signal(names["slot_of"](n, cfg) + 8, names["readers"](cfg))
        return found

    return {"scores": scores, **values_alone_left(names)}


def values_alone_left(names: dict[str, Any]) -> dict[str, Any]:
    """Nobody gives keys back where that is done."""

    def leave(mem, empty, slot, first, cfg):
        if first != 8:
            names["leave"](mem, empty, slot, first, cfg)

    return {"leave": leave, "leave_if": lambda live, *rest: leave(*rest)}


def last_panel_early(names: dict[str, Any]) -> dict[str, Any]:
    """The last panel of a step is copied, as the others are, to where keys are multiplied still."""

    def wait_left(empty, n, first, cfg):
        return names["wait_left"](empty, n - 1 if first == 8 and n else n, first, cfg)

    return {"wait_left": wait_left}


def panels_of_the_step_before(names: dict[str, Any]) -> dict[str, Any]:
    def scores(q, mem, n, *rest):
        return names["scores"](q, mem, max(n - 1, 0), *rest)

    return {"scores": scores}


def keys_left_early_by_warp(names: dict[str, Any]) -> dict[str, Any]:
    def scores(q, mem, n, L, cfg):
        found = names["scores"](q, mem, n, L, cfg)
        names["addresses"].arrive(mem.block, names["slot_of"](n, cfg) + 8)
        return found

    return {"scores": scores, **values_alone_left(names)}


def turn_kept(names: dict[str, Any]) -> dict[str, Any]:
    """The second consumer does not say that its products are issued."""

    def pass_turn(consumer, cfg):
        if consumer != 1:
            names["pass_turn"](consumer, cfg)

    return {"pass_turn": pass_turn}


def nobody_begins(names: dict[str, Any]) -> dict[str, Any]:
    return {"first_turn": lambda *_: None}


def a_lane_for_all_warps(names: dict[str, Any]) -> dict[str, Any]:
    """Arrivals are counted by consumer, as if its warps had met."""

    def arrive(block, number, live=True):
        names["mbarrier"].arrive(block.index(number), pred=live)

    by_lane = {"arrive": arrive, "arrive_if": lambda live, *rest: arrive(*rest, live)}
    return {"addresses": SimpleNamespace(**{**vars(names["addresses"]), **by_lane})}


def late_values_by_warp(names: dict[str, Any]) -> dict[str, Any]:
    nothing = {"wait": lambda *_: None}
    return {"addresses": SimpleNamespace(**{**vars(names["addresses"]), **nothing})}


def readers_forgotten(names: dict[str, Any]) -> dict[str, Any]:
    """The warp of columns is not waited for, and passes in another's place."""
    return {"readers": lambda cfg: names["readers"](cfg) - 32}


@pytest.mark.parametrize(
    ("cfg", "mistake", "said"),
    [
        (form(1, Q_KEPT=1, Q_STAGES=1), queries_given_back_first, "used|copied over"),
        (form(NUM_COLUMNS=0), barriers_for_nobody, "nobody waits for tag_full"),
        (form(), no_barriers_for_columns, r"tags\[\d\] is no barrier"),
        (form(PREFETCH=True), pieces_of_the_step_before, "pieces|copied over|used"),
        (form(), told_twice, "every warp waits|more often|used|computed|columns"),
        (form(), fewer_bytes, "every warp waits"),
        (form(), late_values, "used|copied over|more often"),
        (form(), keys_of_the_step_before, "used|copied over"),
        (form(NUM_COLUMNS=0, NAMED=True), keys_left_early, "used|copied over|sees"),
        (
            form(NUM_COLUMNS=0, BY_WARP=True),
            keys_left_early_by_warp,
            "used|copied|more often|every|computed|columns",
        ),
        (
            form(1, NUM_COLUMNS=0, **EIGHT | {"OVERLAP": True}),
            keys_left_early_by_warp,
            "used|copied|more often|every|computed|columns",
        ),
        (form(1, NUM_COLUMNS=0, **EIGHT), late_values_by_warp, "used|copied|more often|every"),
        (form(BY_WARP=True), a_lane_for_all_warps, "every warp waits"),
        (
            form(BY_WARP=True),
            late_values_by_warp,
            "used|copied over|more often|columns|computed|every",
        ),
        (form(3, **THREE_IN_TURN), turn_kept, "every warp waits"),
        (form(3, **THREE_IN_TURN), nobody_begins, "every warp waits"),
        (
            form(3, **THREE_IN_TURN),
            late_values_by_warp,
            "used|copied|more often|columns|computed|every",
        ),
        (form(NAMED=True), readers_forgotten, "sees|more often|copied over|every warp"),
        (form(**FIVE_PANELS, NUM_COLUMNS=0), last_panel_early, "used|copied|more often"),
        (form(**FIVE_PANELS, NUM_COLUMNS=0, NAMED=True), last_panel_early, "used|sees|more often"),
        (form(**FIVE_PANELS, NUM_COLUMNS=0), panels_of_the_step_before, "used|copied over"),
        (form(**FIVE_PANELS, NUM_COLUMNS=0, NAMED=True), keys_left_early, "used|copied|sees"),
    ],
)
def test_planted_mistakes_are_found(
    cfg: Any, mistake: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which warp goes on first is the threads' affair, so that one play may end well."""
    named = Launch.names
    monkeypatch.setattr(Launch, "names", lambda self: (n := named(self)) | mistake(n))
    with pytest.raises(ProtocolError, match=said):
        for seed in range(12):
            Launch(cfg, LONG, seed).run()
