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
# What a push tests: a build of kernels and its oracle take seconds.
ON_CPU = ("token_tree_from_bits", "t5_bias")
TILED = ("topk_blocks", "neighborhood/dilated", "position_temperature", "softcap/learned")


def mostly_long(sample: tuple[str, ...]) -> list:
    often = {PREFIX + name for name in sample}
    assert often <= set(NAMES)
    return [pytest.param(m, marks=[] if m in often else [pytest.mark.long]) for m in NAMES]


def check(mod: str, backend: str, dtype: torch.dtype) -> None:
    for sizes in sizes_for(PUBLISHED[mod], SIZES, *LENGTHS):
        check_attention(Case(mod, sizes, dtype), attnloom_with(backend=backend))


def test_every_mod_has_a_row() -> None:
    rows = {name.removeprefix(PREFIX).split("/")[0] for name in PUBLISHED}
    assert rows == set(mods.__all__) - PARTS | {"noop_mask"}


@pytest.mark.parametrize("mod", mostly_long(TILED))
def test_tiled(mod: str) -> None:
    check(mod, "tiled", (BF16, FP16)[NAMES.index(mod) % 2])


@pytest.mark.parametrize("mod", mostly_long(ON_CPU))
def test_cpu(mod: str) -> None:
    check(mod, "cpu", (FP16, BF16)[NAMES.index(mod) % 2])


@pytest.mark.parametrize("mod", mostly_long(()))
def test_reference(mod: str) -> None:
    check(mod, "reference", (BF16, FP16)[NAMES.index(mod) % 2])
