"""Lists derived by kernels on a device, against those that torch's operators derive."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attnloom.backends.gluon.lists_backward import swept_lists
from attnloom.backends.gluon.merged_lists import merged_lists
from attnloom.backends.triton.lists import work_lists
from attnloom.backends.triton.transposed import transposed_lists
from tests.kernels import list_deriving
from tests.kernels.list_deriving import MODS, lists_of

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("block", [(64, 128), (128, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("length", [1, 191, 1000, 9000])
@pytest.mark.parametrize("mod", MODS)
def test_lists_are_those_of_sorting(mod: str, length: int, block: tuple[int, int]) -> None:
    blocks = lists_of(mod, length, block, GPU)
    list_deriving.check_work(blocks, 64)
    list_deriving.check_work(blocks, 32)
    if blocks.entries.numel():
        list_deriving.check_transposed(blocks)
        list_deriving.check_swept(blocks)
        list_deriving.check_merged(blocks, 2)
        list_deriving.check_merged(blocks, 3)
        list_deriving.check_merged(blocks, 3, 32, turned=True)


def test_lists_are_derived_while_a_graph_is_recorded() -> None:
    """And are the replay's: those of what the given lists hold by then."""
    derive = lambda blocks: (
        work_lists(blocks, 64).work,
        transposed_lists(blocks).blocks.entries,
        swept_lists(blocks).entries,
        merged_lists(blocks, 3).work,
        merged_lists(transposed_lists(blocks).blocks, 3, 32).bounds,
    )
    blocks = lists_of("holes", 1000, (128, 128), GPU)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = derive(blocks)
    graph.replay()
    for found, wanted in zip(recorded, derive(blocks), strict=True):
        assert torch.equal(found, wanted)
