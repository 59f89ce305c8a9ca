"""The Gluon backward's warps, played through: every order of waits that its forms can meet ends."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.gluon_protocol_backward import HALF, TILE_M, Backward, Visit
from tests.kernels.gluon_world import ProtocolError


def form(**changed: Any) -> SimpleNamespace:
    """A configuration, as fields_backward.main_config would give it."""
    cfg = SimpleNamespace(
        TILE_M=TILE_M, STAGES=2, LOG_STAGES=1, D=2 * HALF, DV=2 * HALF, OPERAND=None, SUB=2,
        TILES_PER_BLOCK=1, SAME_LISTS=False, HAS_LISTS=True, HAS_SCORE=False,
        HAS_BIAS=False, HAS_MASK=True, HAS_TAIL=True, MAY_MASK=True, NEEDS_QUERIES=True,
        PANELS=1, VALUE_PANELS=1, STEPS_PAST_END=True,
        BY_HEAD=False, HAS_SINKS=False, PERSISTENT=False, KV_STAGES=1, DQ_APART=False, EARLY=False,
        FOLD=False, PREFETCH=False, SWEEPS=False, ROWS_APART=False, MASK_FIRST=False,
        LEAVES_LATE=False, NAMED=0, BY_WARP=False, DK_SHARED=False, COLUMNS=128, VALUE_COLUMNS=128,
        DV_EARLY=False, NATIVE=False,
    )  # fmt: skip
    vars(cfg).update(changed)
    return cfg


FOUR = {"STAGES": 4, "LOG_STAGES": 2}
DRAWN = {"PERSISTENT": True, "KV_STAGES": 2}
TRIMMED = {"COLUMNS": 96, "VALUE_COLUMNS": 80, "FOLD": True, "NAMED": 3}
NATIVE = {"NATIVE": True, "COLUMNS": 96, "VALUE_COLUMNS": 96, "DV_EARLY": True, "NAMED": 3}
LONG_STEPS = {"DQ_ROWS": TILE_M // 2, "DV_EARLY": True, "NAMED": 3, "SUB": 1}
FORMS = {
    "wide": form(),
    "wide, from -lse and -delta": form(FOLD=True),
    "wide, by head": form(BY_HEAD=True),
    "wide, from -lse and -delta, by head": form(FOLD=True, BY_HEAD=True),
    "wide, one list": form(SAME_LISTS=True),
    "wide, prefetch": form(PREFETCH=True),
    "wide, by head, prefetch": form(BY_HEAD=True, PREFETCH=True),
    "narrow": form(DQ_APART=True),
    "narrow, by head, prefetch": form(DQ_APART=True, BY_HEAD=True, PREFETCH=True),
    "no mask, prefetch": form(
        HAS_LISTS=False, HAS_MASK=False, MAY_MASK=False, HAS_TAIL=False, SUB=1, PREFETCH=True
    ),
    "narrow, by head": form(DQ_APART=True, BY_HEAD=True),
    "narrow, early": form(DQ_APART=True, EARLY=True, FOLD=True, **FOUR),
    "wide, tiles drawn": form(**DRAWN),
    "wide, tiles drawn, by head": form(BY_HEAD=True, **DRAWN),
    "wide, tiles drawn, one list": form(SAME_LISTS=True, **DRAWN),
    "wide, by warp": form(FOLD=True, BY_WARP=True),
    "wide, tiles drawn, by warp": form(FOLD=True, BY_WARP=True, **DRAWN),
    "wide, tiles drawn, by warp, by head": form(BY_WARP=True, BY_HEAD=True, **DRAWN),
    "wide, tiles drawn, by warp, late": form(LEAVES_LATE=True, FOLD=True, BY_WARP=True, **DRAWN),
    "narrow, by warp": form(DQ_APART=True, BY_WARP=True),
    "narrow, tiles drawn, by warp": form(DQ_APART=True, BY_WARP=True, **DRAWN),
    "narrow, tiles drawn, early, by warp": form(
        DQ_APART=True, EARLY=True, FOLD=True, STAGES=4, LOG_STAGES=2, BY_WARP=True, **DRAWN
    ),
    "wide, named 1": form(FOLD=True, NAMED=1),
    "wide, named 2": form(FOLD=True, NAMED=2),
    "wide, named": form(FOLD=True, NAMED=3),
    "wide, tiles drawn, named": form(FOLD=True, NAMED=3, **DRAWN),
    "wide, tiles drawn, named, by head": form(NAMED=3, BY_HEAD=True, **DRAWN),
    "wide, tiles drawn, named, late": form(LEAVES_LATE=True, FOLD=True, NAMED=3, **DRAWN),
    "narrow, named": form(DQ_APART=True, NAMED=2),
    "narrow, tiles drawn, early, named": form(
        DQ_APART=True, EARLY=True, FOLD=True, STAGES=4, LOG_STAGES=2, NAMED=2, **DRAWN
    ),
    "wide, tiles drawn, late": form(LEAVES_LATE=True, FOLD=True, ROWS_APART=True, **DRAWN),
    "wide, tiles drawn, late, whole steps": form(
        LEAVES_LATE=True, FOLD=True, ROWS_APART=True, **DRAWN | {"SUB": 1}
    ),
    "trimmed": form(**TRIMMED),
    "trimmed, in mbarriers": form(**TRIMMED | {"NAMED": 0}),
    "trimmed, three slices": form(**TRIMMED | {"COLUMNS": 112}),
    "trimmed, tiles drawn, late": form(LEAVES_LATE=True, **TRIMMED | {"NAMED": 0}, **DRAWN),
    "trimmed, tiles drawn, dk shared": form(DK_SHARED=True, **TRIMMED, **DRAWN),
    "dk shared": form(DK_SHARED=True),
    "dk shared, tiles drawn, by head": form(DK_SHARED=True, BY_HEAD=True, **DRAWN),
    "dv early": form(DV_EARLY=True),
    "dv early, tiles drawn, named": form(DV_EARLY=True, FOLD=True, NAMED=3, **DRAWN),
    "narrow, early, dv early": form(DQ_APART=True, EARLY=True, DV_EARLY=True, FOLD=True, **FOUR),
    "native": form(FOLD=True, **NATIVE),
    "native, tiles drawn": form(**NATIVE, **DRAWN),
    "native, tiles drawn, in mbarriers, by head": form(
        BY_HEAD=True, **NATIVE | {"NAMED": 0}, **DRAWN
    ),
    "long steps, tiles drawn": form(**LONG_STEPS, **DRAWN),
    "long steps, tiles drawn, one list": form(SAME_LISTS=True, **LONG_STEPS, **DRAWN),
    "long steps, larger blocks": form(**LONG_STEPS | {"SUB": 2, "NAMED": 0}),
    "narrow, tiles drawn": form(DQ_APART=True, **DRAWN),
    "narrow, tiles drawn, early": form(DQ_APART=True, EARLY=True, FOLD=True, **FOUR, **DRAWN),
    "no mask": form(
        HAS_LISTS=False, HAS_MASK=False, MAY_MASK=False, NEEDS_QUERIES=False, HAS_TAIL=False, SUB=1
    ),
}


def visit_of(cfg: Any, draw: random.Random) -> Visit:
    """Up to four heads of up to three live blocks each, the last of which may be past the end."""
    units = draw.choice((1, 2, 4))
    if not cfg.HAS_LISTS:
        count = draw.randint(1, 4)
        blocks = [tuple(range(count))] * units
        return Visit(tuple(blocks), False, count * TILE_M - draw.randint(0, TILE_M - 1))
    blocks = [tuple(sorted(draw.sample(range(4), draw.randint(0, 3)))) for _ in range(units)]
    return Visit(tuple(blocks), cfg.SAME_LISTS, 4 * cfg.SUB * TILE_M - draw.randint(0, 6))


# A warpgroup of dq alone is not in every form.
LAGGARDS = [
    (name, laggard)
    for name, cfg in FORMS.items()
    for laggard in ("", "load", "keys", *(["queries"] if cfg.DQ_APART else []))
]


@pytest.mark.parametrize(("name", "laggard"), LAGGARDS)
def test_every_wait_ends_and_every_product_has_its_operands(name: str, laggard: str) -> None:
    draw = random.Random(name)
    for seed in range(4):
        cfg = FORMS[name]
        visits = [visit_of(cfg, draw) for _ in range(draw.randint(1, 5) if cfg.PERSISTENT else 1)]
        Backward(cfg, visits, seed, laggard).run()


SHORT = Visit(((),), False, 4 * 2 * TILE_M)
LONG = Visit(((0, 1, 2), (1, 3)), False, 4 * 2 * TILE_M)


def lists_counted_from_zero(names: dict[str, Any]) -> dict[str, Any]:
    """As once compiled: the number of a step started anew with every head."""

    def step(state, n, end, *rest):
        return names["_step"](state, n % 3, end, *rest)

    return {"_step": step}


def dq_of_this_step(names: dict[str, Any]) -> dict[str, Any]:
    """dq is computed before the other half of the keys has given its part."""

    def wait(barrier, phase, pred=True):
        if not barrier.name.startswith("ds_full"):
            names["mbarrier"].wait(barrier, phase, pred)

    return {"mbarrier": SimpleNamespace(**{**vars(names["mbarrier"]), "wait": wait})}


def queries_given_back_early(names: dict[str, Any]) -> dict[str, Any]:
    def start_dp(mem, n, own, layout, cfg):
        names["mbarrier"].arrive(mem.do_empty.index(names["slot_of"](n, cfg)))
        return names["start_dp"](mem, n, own, layout, cfg)

    return {"start_dp": start_dp}


def queries_given_back_before_dk(names: dict[str, Any]) -> dict[str, Any]:
    """The product of dk starts after dscore was handed over, and its queries are still needed."""

    def ds_is_there(mem, n, which, cfg):
        names["mbarrier"].arrive(mem.q_empty.index(names["slot_of"](n, cfg)))
        names["ds_is_there"](mem, n, which, cfg)

    return {"ds_is_there": ds_is_there, "done_with_q": lambda *_: None}


def addresses_exchanged(names: dict[str, Any]) -> dict[str, Any]:
    """dk is of output gradients, dv of queries."""

    def add_keys(left, tiles, at, *rest):
        return names["add_keys"](left, tiles, exchanged[at], *rest)

    exchanged: dict[Any, Any] = {}

    def allocate(cfg):
        mem = names["allocate"](cfg)
        exchanged.update({mem.q_at: mem.dout_at, mem.dout_at: mem.q_at})
        return mem

    return {"add_keys": add_keys, "allocate": allocate}


def the_same_rows_of_dq(names: dict[str, Any]) -> dict[str, Any]:
    def product(mem, n, k0, k1, sums, row, *rest):
        return names["dq_product"](mem, n, k0, k1, sums, 0, *rest)

    return {"dq_product": product}


def rows_of_the_other_consumer(names: dict[str, Any]) -> dict[str, Any]:
    def done(dq_to, places, line, dq, which, cfg):
        names["done_dq"](dq_to, places, line, dq, 1 - which, cfg)

    return {"done_dq": done}


def columns_of_the_other_consumer(names: dict[str, Any]) -> dict[str, Any]:
    def places(places, first, columns, cfg):
        return names["_own_places"](places, cfg.COLUMNS - 64 - first, columns, cfg)

    return {"_own_places": places}


def dk_of_the_other_half(names: dict[str, Any]) -> dict[str, Any]:
    """dk takes what the other consumer wrote: who writes has changed places with it."""

    def give(mem, n, ds, which, cfg):
        return names["give_ds"](mem, n, ds, 1 - which, cfg)

    return {"give_ds": give}


def pieces_of_this_step(names: dict[str, Any]) -> dict[str, Any]:
    """What is looked up ahead is not of the next step, but of the one that does so."""

    def look_up_ahead(mem, n, *rest):
        return names["_look_up_ahead"](mem, max(n - 1, 0), *rest)

    return {"_look_up_ahead": look_up_ahead}


def pieces_of_the_head_before(names: dict[str, Any]) -> dict[str, Any]:
    """The first step of a head takes what was looked up for the last step of another."""
    kept: list[Any] = []

    def look_up(context, corner, cfg):
        kept.append(names["look_up"](context, corner, cfg))
        return kept[-2] if len(kept) > 1 else kept[-1]

    return {"look_up": look_up}


def forgotten(*functions: str) -> Any:
    """Nobody waits, or comes by, where these functions are called."""

    def mistake(_: dict[str, Any]) -> dict[str, Any]:
        return {name: lambda *args: None for name in functions}

    mistake.__name__ = " ".join(functions)
    return mistake


def other_consumers(name: str, at: int) -> Any:
    """A consumer takes the other's barrier. at: place of its number among the arguments."""

    def mistake(names: dict[str, Any]) -> dict[str, Any]:
        def swapped(*args: Any) -> None:
            names[name](*args[:at], 1 - args[at], *args[at + 1 :])

        return {name: swapped}

    mistake.__name__ = f"other {name}"
    return mistake


def jobs_given_back_early(names: dict[str, Any]) -> dict[str, Any]:
    """Keys of another tile may come to where results leave from, and the job is that tile's."""

    def job_of(mem, num):
        names["done_with_job"](mem, num)
        return names["job_of"](mem, num)

    return {"job_of": job_of, "done_with_job": lambda mem, num: None}


def as_if_drawn(names: dict[str, Any]) -> dict[str, Any]:
    """Programs of one tile have barriers for jobs, which nobody gives; tiles were lost by it."""

    def allocate(cfg):
        return names["allocate"](SimpleNamespace(**{**vars(cfg), "PERSISTENT": True}))

    return {"allocate": allocate}


def as_if_alone(names: dict[str, Any]) -> dict[str, Any]:
    """Jobs are waited for at barriers that are none."""

    def allocate(cfg):
        return names["allocate"](SimpleNamespace(**{**vars(cfg), "PERSISTENT": False}))

    return {"allocate": allocate}


@pytest.mark.parametrize(("name", "mistake", "said"), [
    ("wide", as_if_drawn, "nobody waits for job_empty, job_full"),
    ("wide, tiles drawn", as_if_alone, r"tags\[\d\] is no barrier"),
])  # fmt: skip
def test_barriers_that_nobody_uses_or_that_are_none_are_found(
    name: str, mistake: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Backward(FORMS[name], [LONG], 0, "keys")
    names = launch.names()
    monkeypatch.setattr(launch, "names", lambda: names | mistake(names))
    with pytest.raises(ProtocolError, match=said):
        launch.run()


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("wide, prefetch", pieces_of_this_step),
        ("narrow, by head, prefetch", pieces_of_the_head_before),
        ("wide, tiles drawn", jobs_given_back_early),
        ("wide, by head", lists_counted_from_zero),
        ("wide", dq_of_this_step),
        ("narrow", dq_of_this_step),
        ("narrow, early", queries_given_back_early),
        ("dk shared", queries_given_back_before_dk),
        ("dk shared, tiles drawn, by head", queries_given_back_before_dk),
        ("dk shared", dk_of_the_other_half),
        ("dv early", queries_given_back_before_dk),
        ("long steps, larger blocks", queries_given_back_before_dk),
        ("native, tiles drawn, in mbarriers, by head", queries_given_back_before_dk),
        ("native", forgotten("wait_for_ds", "ds_is_there")),
        (
            "long steps, tiles drawn",
            forgotten("wait_for_room", "done_with_ds", "start_slots", "end_slots"),
        ),
        ("native", addresses_exchanged),
        ("native", columns_of_the_other_consumer),
        ("long steps, tiles drawn", the_same_rows_of_dq),
        ("long steps, tiles drawn", rows_of_the_other_consumer),
        ("wide, named", forgotten("wait_for_ds", "ds_is_there")),
        ("wide, named", forgotten("wait_for_room", "done_with_ds", "start_slots", "end_slots")),
        ("wide, named", forgotten("start_slots")),
        ("wide, named", forgotten("end_loads")),
        ("wide, named", forgotten("wait_for_last_dq", "end_slots")),
        ("narrow, named", forgotten("wait_for_ds", "ds_is_there")),
        ("wide, named", other_consumers("wait_for_room", 2)),
    ],
)
def test_planted_mistakes_are_found(
    name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits = [SHORT] * 6 if mistake is jobs_given_back_early else [LONG]
    launch = Backward(FORMS[name], visits, 0, "keys")
    names = launch.names()
    monkeypatch.setattr(launch, "names", lambda: names | mistake(names))
    with pytest.raises(ProtocolError):
        launch.run()


@pytest.mark.parametrize("name", ["narrow, tiles drawn", "narrow, tiles drawn, early"])
def test_keys_of_a_tile_without_steps_are_not_waited_for(name: str) -> None:
    """The warpgroup of dq, a tile late, waited for keys that those of a later tile had replaced."""
    for seed in range(8):
        Backward(FORMS[name], [LONG, SHORT, SHORT, LONG] * 2, seed, "queries").run()
