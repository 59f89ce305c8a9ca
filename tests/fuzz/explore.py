"""Draw programs and check them; hypothesis shrinks what fails."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.checks import CHECKS, QUICK, FuzzCase, check
from tests.fuzz.programs import FuzzProgram, programs, sizes
from tests.harness.draw import Sizes

# Names of checks -> share of the programs that they see. One compiled program costs a second.
Shares = dict[str, float]
CI_SHARES: Shares = {"gradients": 0.2, "kernel": 0.05}
_DTYPES = (torch.float32,) * 4 + (torch.bfloat16, torch.float16, torch.float64)
_BLOCKS = (16, 32, (16, 64), (128, 16))


def explore(shares: Shares, first_seed: int, count: int) -> None:
    """Check `count` programs that follow from `first_seed`.

    Args:
        shares: of the checks that not every program undergoes.
    Raises:
        AssertionError: of the simplest failing program, with its source.
    """
    _test(shares, first_seed, count)()


def _test(shares: Shares, first_seed: int, count: int) -> Callable[[], None]:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.large_base_example),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @seed(first_seed)
    @given(
        programs(), sizes(), st.sampled_from(_DTYPES), st.sampled_from(_BLOCKS),
        st.integers(0, 10**6),
    )  # fmt: skip
    def each(
        program: FuzzProgram,
        shape: Sizes,
        dtype: torch.dtype,
        block: int | tuple[int, int],
        number: int,
    ) -> None:
        case = FuzzCase("fuzz", shape, dtype, block_size=block, seed=number, program=program)
        # Chosen by the program's own seed, so that a failing one undergoes the same while it
        # shrinks.
        chance = random.Random(number).random()
        extra = (name for name in CHECKS if chance < shares.get(name, 0.0))
        check(case, (*QUICK, *extra))

    return each
