"""Every published mod in the backends of a CPU against the oracle, in half precision: out, lse and
all gradients, of what mods capture too.

On GPUs that is test_on_gpu.py, under Triton's interpreter kernels/interpreted/test_published.py.
"""

from __future__ import annotations

import pytest
import torch

from attnloom import mods
from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with
from tests.harness.mods import PUBLISHED
from tests.harness.published import PREFIX, sizes_for
from tests.mods.test_examples import PARTS

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, D=16, Dv=16)
LENGTHS = ((1, 70), (70, 150))  # a row, and more than a tile of the kernels
NAMES = sorted(PUBLISHED)
# Among them masks by batch, by head, of a canvas; scores that add, multiply, look up and sum.
SAMPLE = {
    f"{PREFIX}{name}"
    for name in (
        "topk_blocks",
        "token_tree_from_bits",
        "neighborhood/dilated",
        "on_documents",
        "t5_bias",
        "graphormer_edge",
        "position_temperature",
        "softcap/learned",
    )
}


def mostly_long(sample: set[str]) -> list:
    return [pytest.param(m, marks=[] if m in sample else [pytest.mark.long]) for m in NAMES]


def check(mod: str, backend: str, dtype: torch.dtype) -> None:
    for sizes in sizes_for(PUBLISHED[mod], SIZES, *LENGTHS):
        check_attention(Case(mod, sizes, dtype), attnloom_with(backend=backend))


def test_every_mod_has_a_row() -> None:
    rows = {name.removeprefix(PREFIX).split("/")[0] for name in PUBLISHED}
    assert rows == set(mods.__all__) - PARTS | {"noop_mask"}
    assert set(PUBLISHED) >= SAMPLE


@pytest.mark.parametrize("mod", mostly_long(SAMPLE))
def test_tiled(mod: str) -> None:
    check(mod, "tiled", (BF16, FP16)[NAMES.index(mod) % 2])


@pytest.mark.parametrize("mod", mostly_long(SAMPLE))
def test_cpu(mod: str) -> None:
    """One build serves both halves."""
    for dtype in (BF16, FP16):
        check(mod, "cpu", dtype)


@pytest.mark.parametrize("mod", mostly_long(SAMPLE))
def test_reference(mod: str) -> None:
    check(mod, "reference", (FP16, BF16)[NAMES.index(mod) % 2])
