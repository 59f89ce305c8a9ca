"""Every published mod through the Triton kernels, forward and backward, against the oracle."""

from __future__ import annotations

import pytest
import torch

from tests.harness.case import Case
from tests.harness.draw import Sizes
from tests.harness.mods import PUBLISHED
from tests.harness.published import PREFIX, sizes_for
from tests.kernels.backward_modes import check_gradients

SIZES = Sizes(B=2, Hq=2, Hkv=1, D=16, Dv=16)
NAMES = sorted(PUBLISHED)
# Interpreted, a mod takes some five seconds.
ALWAYS = {PREFIX + name for name in ("token_tree_from_bits", "on_documents")}


@pytest.mark.parametrize(
    "mod",
    [pytest.param(m, marks=[] if m in ALWAYS else [pytest.mark.slow]) for m in NAMES],
)
def test_two_tiles(mod: str) -> None:
    (sizes,) = sizes_for(PUBLISHED[mod], SIZES, (63, 70))
    check_gradients(Case(mod, sizes), deterministic=False)


@pytest.mark.slow
@pytest.mark.parametrize("mod", NAMES)
def test_one_query_in_half_precision(mod: str) -> None:
    """Few rows take a kernel of their own."""
    (sizes,) = sizes_for(PUBLISHED[mod], SIZES, (1, 130))
    check_gradients(Case(mod, sizes, torch.bfloat16), deterministic=False)
