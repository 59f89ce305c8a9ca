"""Every published mod in the GPU kernels against the oracle, out, lse and all gradients, of what
mods capture too; `pytest -m gpu -n 16`.

A test compiles what one mod needs, and runs it at all lengths: one query (few rows take a kernel of
their own), a ragged tile, several tiles.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from attnloom import UnsupportedError
from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with
from tests.harness.mods import PUBLISHED
from tests.harness.published import sizes_for
from tests.kernels.backward_modes import check_gradients

pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = Sizes(B=2, Hq=4, Hkv=2, D=64, Dv=64)
LENGTHS = ((1, 130), (63, 70), (200, 200))
NAMES = sorted(PUBLISHED)
HUNG_S = 240
_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _ends_if_it_hangs() -> Iterator[None]:
    """A kernel that waits for ever cannot be interrupted: its process ends, and another takes over
    where there are several."""
    faulthandler.dump_traceback_later(HUNG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def cases(mod: str, dtype: torch.dtype, head_dim: int, block_size: int) -> list[Case]:
    sizes = replace(SIZES, D=head_dim, Dv=head_dim)
    found = sizes_for(PUBLISHED[mod], sizes, *LENGTHS)
    return [Case(mod, s, dtype, block_size=block_size) for s in found]


@pytest.mark.parametrize("mod", NAMES)
def test_triton(mod: str) -> None:
    dtype = (BF16, FP16)[NAMES.index(mod) % 2]
    for case in cases(mod, dtype, 64, 32):
        check_gradients(case, deterministic=False, device="cuda")


@pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mod", NAMES)
def test_gluon(mod: str, head_dim: int) -> None:
    """Two kernels forward and two backward, by head dimension; each mod in both dtypes."""
    from tests.kernels.gluon_backward import gluon_alone

    dtype = (FP16, BF16)[(NAMES.index(mod) + head_dim // 64) % 2]
    with gluon_alone():
        for case in cases(mod, dtype, head_dim, 128):
            check_attention(case, attnloom_with("cuda", backend="gluon"))


@pytest.mark.parametrize("mod", NAMES)
def test_gluon_refuses_what_its_gate_does(mod: str) -> None:
    """In words and before a launch, where it was asked for by name: float32 on a Hopper GPU,
    everything elsewhere."""
    why = "take one of float16 and bfloat16" if _HOPPER else "are for NVIDIA GPUs of compute capab"
    case = cases(mod, FP32 if _HOPPER else BF16, 64, 128)[0]
    with pytest.raises(UnsupportedError, match=f"backend 'gluon' cannot run this: .*{why}"):
        check_attention(case, attnloom_with("cuda", backend="gluon"))
