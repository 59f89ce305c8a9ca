"""Under torch.compile, masks are built beside the graph."""

from __future__ import annotations

import pytest
import torch

from attnloom.api.masks import create_block_mask, create_mask
from attnloom.block_mask import BlockMask


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(ids):
    return create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], 1, 1, 200, 200)


def use(x, ids):
    mask = build(ids)
    part = mask.rows(3, 130)[:, :, 0]
    packed = BlockMask.from_document_ids(ids)
    kept = create_mask(lambda b, h, q, kv: ids[q] == ids[kv], 1, 1, 200, 200)
    counts = [m.lists().entries.numel() for m in (mask, part, packed)]
    return x * 2 + sum(counts) + kept.sum() + mask.to_mask().sum() + mask.sparsity()


def test_building_inside_a_compiled_function():
    ids = torch.arange(200) // 70
    x = torch.ones(3)
    compiled = torch.compile(use, backend="eager")
    assert torch.equal(compiled(x, ids), use(x, ids))
    later = torch.arange(200) // 11
    assert torch.equal(compiled(x, later), use(x, later))


def test_compiling_the_builder_itself():
    ids = torch.arange(200) // 70
    mask = torch.compile(build, backend="eager")(ids)
    assert torch.equal(mask.lists().entries, build(ids).lists().entries)


def test_mask_as_an_argument_of_a_compiled_function():
    compiled = torch.compile(lambda x, m: x + m.lists().row_offsets[-1], backend="eager")
    mask = build(torch.arange(200) // 70)
    assert int(compiled(torch.zeros(()), mask)) == mask.lists().entries.numel()
