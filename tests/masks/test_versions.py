"""A captured tensor that is changed in place after its mask was built."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import attnloom
from attnloom.errors import ModError
from tests.harness.agree import qkv

CHANGED = "was changed in place after its BlockMask was built"
SHARED = torch.arange(90) // 20


def documents(ids: torch.Tensor):
    def same_document(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    return same_document


def build(ids: torch.Tensor) -> attnloom.BlockMask:
    return attnloom.create_block_mask(documents(ids), None, None, 90, 90, BLOCK_SIZE=16)


def attend(mask: attnloom.BlockMask) -> torch.Tensor:
    length = mask.shape[-2]
    q, k, v = qkv(1, 1, 90, 16)
    return attnloom.flex_attention(q[:, :, :length], k, v, block_mask=mask)


def test_attention_refuses() -> None:
    ids = torch.arange(90) // 20
    mask = build(ids)
    attend(mask)
    ids[5] = 1
    expected = (
        r"'ids' of shape \[90\], which mask_mod 'documents.same_document' captures, " + CHANGED
    )
    with pytest.raises(ModError, match=expected):
        attend(mask)
    attend(build(ids))


def test_a_view_shares_the_count() -> None:
    ids = torch.arange(180).view(2, 90) // 20
    mask = build(ids[0])
    ids.zero_()
    with pytest.raises(ModError, match=CHANGED):
        attend(mask)


def test_parts_remember() -> None:
    ids = torch.arange(90) // 20
    part = build(ids).rows(10, 40)
    attend(part)
    ids[0] = 3
    with pytest.raises(ModError, match=CHANGED):
        attend(part)


@pytest.mark.parametrize(
    "carry", [lambda mask: mask.to("cpu"), lambda mask: pickle.loads(pickle.dumps(mask))]
)
def test_moved_and_pickled_masks(carry) -> None:
    """A stale mask does not travel; one that has travelled looks at its own tensors."""
    ids = torch.arange(90) // 20
    mask = build(ids)
    there = carry(mask)
    attend(there)
    ids[5] = 1
    with pytest.raises(ModError, match=CHANGED):
        carry(mask)
    (captured,) = [c.cell_contents for c in there.mask_mod.__closure__]
    captured[5] = 2
    with pytest.raises(ModError, match=CHANGED):
        attend(there)


def test_globals_and_constructors() -> None:
    mask = attnloom.create_block_mask(
        lambda b, h, q, kv: SHARED[q] == SHARED[kv], None, None, 90, 90
    )
    dense = torch.ones(90, 90, dtype=torch.bool).tril()
    other = attnloom.BlockMask.from_dense(dense)
    attend(mask)
    attend(other)
    SHARED.add_(0)
    dense[0, 0] = False
    with pytest.raises(ModError, match=r"'SHARED' of shape \[90\]"):
        attend(mask)
    with pytest.raises(ModError, match=r"mask_mod 'BlockMask\.from_dense'"):
        attend(other)


def test_another_mask_mod_is_its_users_affair() -> None:
    ids = torch.arange(90) // 20
    mask = build(ids)
    mask.mask_mod = documents(ids.clone())
    ids[5] = 1
    attend(mask)


def test_through_a_pytree_and_inference_mode() -> None:
    """What torch does not count is not looked at."""
    ids = torch.arange(90) // 20
    leaves, structure = pytree.tree_flatten(build(ids))
    attend(pytree.tree_unflatten(leaves, structure))
    with torch.inference_mode():
        fresh = torch.arange(90) // 20
        attend(build(fresh))


def test_compiled() -> None:
    ids = torch.arange(90) // 20
    mask = build(ids)
    compiled = torch.compile(attend, backend="eager")
    assert torch.equal(compiled(mask), attend(mask))
    ids[5] = 1
    with pytest.raises(ModError, match=CHANGED):
        compiled(mask)
