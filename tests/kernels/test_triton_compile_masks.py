"""The mask kernels compiled for GPUs that are not there: nothing spills."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from attnloom.backends.triton import mask_lists
from attnloom.masking.lists import TileGrid
from attnloom.trace.tracer import trace_mask
from tests.kernels.cross_compile import Compiled, CompilingLauncher

CPU = torch.device("cpu")
IDS = torch.arange(9000) // 700
REALS = torch.linspace(0, 1, 9000)


def compiled(target: str, mask_mod, grid: TileGrid) -> dict[str, Compiled]:
    """The kernels that build a mask on a device, by name."""
    CompilingLauncher.target, CompilingLauncher.compiled = target, {}
    bound = trace_mask(mask_mod, CPU)
    with (
        mock.patch.object(mask_lists, "Launcher", CompilingLauncher),
        mock.patch.dict(mask_lists._ready, clear=True),
        mock.patch.dict(mask_lists._writers, clear=True),
    ):
        ready = mask_lists._find(bound, grid, CPU)
        codes, counts = mask_lists._classify(ready, bound, grid, CPU)
        mask_lists._write(ready, grid, codes, counts.long(), 0, separate_full=True)
    return CompilingLauncher.compiled


def documents(b, h, q, kv):
    return (q >= kv) & (IDS[q] == IDS[kv])


def neighbours(b, h, q, kv):
    """Quotients, remainders and floats."""
    near = ((q // 90 - kv // 90).abs() <= 2) & ((q - kv) % 90 <= 2 + h)
    return near | (REALS[q] * 2 - REALS[kv] > 1.5)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_documents(target: str) -> None:
    made = compiled(target, documents, TileGrid(1, 1, 9000, 9000, 128, 128))
    assert set(made) == {"summary_kernel", "code_kernel", "settle_kernel", "write_kernel"}
    for name, kernel in made.items():
        assert not kernel.spills, name
        assert kernel.shared <= 4096, name


def test_larger_tiles_and_more_operations() -> None:
    made = compiled("sm_90", neighbours, TileGrid(1, 4, 9000, 9000, 512, 64))
    assert all(not kernel.spills for kernel in made.values())
