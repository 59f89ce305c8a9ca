"""The kernels that derive lists, compiled for GPUs that are not there: nothing spills."""

from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("triton")

from attnloom.backends.gluon import lists_backward, merged_lists
from attnloom.backends.triton import list_launches, lists, transposed
from tests.kernels.cross_compile import CompilingLauncher
from tests.kernels.list_deriving import lists_of


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_nothing_spills(target: str) -> None:
    CompilingLauncher.target, CompilingLauncher.compiled = target, {}
    blocks = lists_of("by head", 700, (128, 128), "cpu")
    with (
        mock.patch.object(list_launches, "Launcher", CompilingLauncher),
        mock.patch.object(list_launches, "_runs_here", lambda _: True),
        mock.patch.dict(list_launches._launches, clear=True),
    ):
        lists._derive_work(blocks, 128)
        transposed._transpose(blocks)
        lists_backward._sweep(blocks)
        merged_lists._merge(blocks, 3)
    made = CompilingLauncher.compiled
    assert set(made) == {"rank_kernel", "turn_kernel", "join_kernel"}
    for name, kernel in made.items():
        assert not kernel.spills, name
        assert kernel.shared <= 4096, name
