"""Lists may be derived while a CUDA graph is recorded: nothing of a mask is read on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from attnloom import create_block_mask
from attnloom.backends.gluon.lists_backward import swept_lists
from attnloom.backends.gluon.merged_lists import merged_lists
from attnloom.backends.triton.lists import group_lists, work_lists
from attnloom.backends.triton.transposed import transposed_lists
from attnloom.block_mask import BlockLists

DERIVED: dict[str, Callable[[BlockLists], Any]] = {
    "work": lambda blocks: work_lists(blocks, 64),
    "groups": lambda blocks: group_lists(blocks, 2),
    "merged": lambda blocks: merged_lists(blocks, 3),
    "of 96 keys": lambda blocks: merged_lists(transposed_lists(blocks).blocks, 3, 32),
    "transposed": transposed_lists,
    "swept": swept_lists,
}


@pytest.mark.parametrize("name", DERIVED)
def test_swept_lists_read_a_power_on_the_host(name: str) -> None:
    """A tensor of no dimensions is read where it is an index, and a graph being recorded breaks."""
    mask = create_block_mask(lambda b, h, q, kv: q >= kv + h, 1, 4, 700, 700, "cpu")
    given = mask.lists()
    with FakeTensorMode() as mode:
        tensors = mode.from_tensor(given.row_offsets), mode.from_tensor(given.entries)
        DERIVED[name](replace(given, row_offsets=tensors[0], entries=tensors[1]))
