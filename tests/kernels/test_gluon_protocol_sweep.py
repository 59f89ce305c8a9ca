"""The warps of a backward that sweeps over a head's keys, played through."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.gluon_protocol_backward import TILE_M
from tests.kernels.gluon_protocol_sweep import Sweep, mask_of
from tests.kernels.test_gluon_protocol_backward import DRAWN, FOUR, form

SWEPT = {"SWEEPS": True, "SAME_LISTS": True, **DRAWN}
FORMS = {
    "wide": form(**SWEPT),
    "wide, whole steps": form(**SWEPT | {"SUB": 1}),
    "wide, by head": form(**SWEPT | {"SAME_LISTS": False}),
    "wide, late": form(LEAVES_LATE=True, FOLD=True, ROWS_APART=True, MASK_FIRST=True, **SWEPT),
    "wide, late, whole steps": form(
        LEAVES_LATE=True, FOLD=True, ROWS_APART=True, MASK_FIRST=True, **SWEPT | {"SUB": 1}
    ),
    "narrow": form(DQ_APART=True, EARLY=True, FOLD=True, **FOUR, **SWEPT),
}


def lists_of(cfg: Any, draw: random.Random) -> tuple[Any, int]:
    """A mask whose blocks of queries see up to three tiles of keys, side by side or not, and how
    many heads have it."""
    heads, num_tiles, num_blocks = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 5)
    live = [
        [
            sorted(draw.sample(range(num_tiles), draw.randint(0, min(3, num_tiles))))
            for _ in range(num_blocks)
        ]
        for _ in range(1 if cfg.SAME_LISTS else heads)
    ]
    q_len = num_blocks * cfg.SUB * TILE_M - draw.randint(0, TILE_M * cfg.SUB - 1)
    return mask_of(live, num_tiles, cfg.SUB, q_len), heads


@pytest.mark.parametrize("laggard", ["", "load", "keys", "keys 1", "queries"])
@pytest.mark.parametrize("name", FORMS)
def test_dq_is_the_sum_over_all_keys_in_order(name: str, laggard: str) -> None:
    cfg, draw = FORMS[name], random.Random(name)
    if laggard == "queries" and not cfg.DQ_APART:
        pytest.skip("this form has no warpgroup of dq alone")
    for seed in range(6):
        blocks, heads = lists_of(cfg, draw)
        Sweep(cfg, blocks, heads, seed, laggard).run()
