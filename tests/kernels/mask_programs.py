"""Random mask programs of tests/fuzz through the mask kernels."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from attnloom.masking.lists import TileGrid
from tests.fuzz.lanes import draw_captures, lanes, precisions
from tests.fuzz.programs import FuzzProgram, programs, sizes
from tests.harness.draw import Sizes
from tests.kernels.mask_building import check_lists


def check_programs(first_seed: int, count: int, device: torch.device) -> None:
    """Check `count` programs that follow from `first_seed`; hypothesis shrinks what fails."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @seed(first_seed)
    @given(
        programs().filter(lambda program: program.mask is not None),
        sizes(),
        st.integers(0, 10**6),
    )
    def each(program: FuzzProgram, s: Sizes, number: int) -> None:
        captures = draw_captures(program, s, number)
        at = lanes(s, number, s.B * s.Hq * s.Q_LEN * s.KV_LEN)
        if bool(precisions("mask", program, captures, at).noise.any()):
            return  # an edge that roundings move has no right place
        mod = program.build(captures)[1]
        assert mod is not None
        check_lists(mod, TileGrid(s.B, s.Hq, s.Q_LEN, s.KV_LEN, 16, 16), device)

    each()
