"""Side by side with torch.nn.attention.flex_attention."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

from attnloom.api import masks as ours
from attnloom.block_mask import BlockMask
from attnloom.masking.torch_layout import DENSE_ATTRIBUTES
from tests.masks.mods import (
    MODS,
    Sizes,
    causal,
    causal_documents_by_batch,
    image_neighbours,
    window,
    windows_by_head,
)

SIZES = [
    (Sizes(1, 1, 256, 256), 32),
    (Sizes(2, 4, 256, 384), (64, 128)),
    (Sizes(1, 2, 128, 64), 16),
]


def pair(make, s: Sizes, block, **options):
    mod = make(s)
    made = []
    for module in (theirs, ours):
        build = module.create_block_mask
        made.append(build(mod, s.B, s.H, s.Q, s.KV, device="cpu", BLOCK_SIZE=block, **options))
    return made


def valid_part(num: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    """The indices that mean something, each line sorted."""
    flat = indices.reshape(-1, indices.shape[-1])
    return [sorted(row[:n].tolist()) for n, row in zip(num.flatten().tolist(), flat, strict=True)]


def assert_same_lists(theirs_mask, ours_mask):
    for name, (_, what, _) in DENSE_ATTRIBUTES.items():
        expected, found = getattr(theirs_mask, name), getattr(ours_mask, name)
        if expected is None:
            assert found is None, name
            continue
        assert found.shape == expected.shape, name
        assert found.dtype == expected.dtype, name
        if what == "num":
            assert torch.equal(found, expected), name
        else:
            num = name.replace("indices", "num_blocks")
            assert valid_part(getattr(ours_mask, num), found) == valid_part(
                getattr(theirs_mask, num), expected
            ), name


@pytest.mark.parametrize("make", MODS, ids=lambda m: m.__name__)
@pytest.mark.parametrize(("sizes", "block"), SIZES, ids=str)
@pytest.mark.parametrize("separate", [True, False])
def test_same_lists(make, sizes, block, separate):
    expected, found = pair(make, sizes, block, separate_full_blocks=separate)
    assert_same_lists(expected, found)
    assert found.shape == expected.shape
    assert found.numel() == expected.numel()
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE
    assert found.seq_lengths == expected.seq_lengths
    assert found.sparsity() == pytest.approx(expected.sparsity(), abs=1e-6)
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert found.to_dense().dtype == expected.to_dense().dtype


@pytest.mark.parametrize("make", [causal, window, windows_by_head])
@pytest.mark.parametrize("grid_size", [(20, 20), 5, (3, 7), -1])
def test_same_pictures(make, grid_size):
    expected, found = pair(make, Sizes(2, 4, 512, 640), 16)
    assert found.to_string(grid_size, limit=3) == expected.to_string(grid_size, limit=3)
    assert str(found) == str(expected)


INDICES = [
    0,
    -1,
    (1, 2),
    (slice(None), 1),
    (slice(0, 1), slice(1, 3)),
    (slice(None), slice(None, None, 2)),
    (slice(None), slice(None), 3),
    (slice(None), slice(None), torch.tensor([2])),
    (slice(None), slice(None), torch.tensor([3, 1], dtype=torch.int32)),
    (slice(None), slice(None), slice(2, 5)),
    (0, 1, slice(1, None)),
    torch.tensor([1, 0]),
    (slice(None), torch.tensor([True, False, True, False])),
    (-2, -3, -1),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("make", [windows_by_head, causal_documents_by_batch, causal])
def test_same_slices(make, index):
    expected, found = pair(make, Sizes(2, 4, 256, 256), 32)
    assert_same_lists(expected[index], found[index])


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("make", [causal, windows_by_head])
def test_same_write_order(make, order):
    options = {"compute_dq_write_order": True, "dq_kv_order": order}
    expected, found = pair(make, Sizes(1, 4, 256, 384), 32, **options)
    for mask_pair in ((expected, found), (expected[0, 1], found[0, 1])):
        for suffix, side in (("", "q"), ("_full", "full_q")):
            orders = [getattr(m, f"dq_write_order{suffix}") for m in mask_pair]
            num = getattr(mask_pair[0], f"{side}_num_blocks")
            assert orders[0].shape == orders[1].shape
            listed = torch.arange(orders[0].shape[-1]) < num[..., None]
            # Order inside a list is ascending on both sides, so ranks can be compared in place.
            assert torch.equal(orders[0][listed], orders[1][listed])
        assert mask_pair[1].dq_kv_order_spt is order


@pytest.mark.parametrize("flatten", [True, False])
def test_same_tuple(flatten):
    expected, found = pair(causal, Sizes(1, 2, 256, 256), 32)
    expected, found = expected.as_tuple(flatten), found.as_tuple(flatten)
    assert len(found) == len(expected)
    for a, b in zip(expected, found, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert a.shape == b.shape
        elif not callable(a):
            assert a == b


def test_from_kv_blocks_takes_torchs_lists_and_gives_them_back():
    expected, _ = pair(image_neighbours, Sizes(2, 1, 256, 256), 32)
    given = (
        expected.kv_num_blocks,
        expected.kv_indices,
        expected.full_kv_num_blocks,
        expected.full_kv_indices,
    )
    options = {"BLOCK_SIZE": 32, "mask_mod": expected.mask_mod}
    found = BlockMask.from_kv_blocks(*given, **options)
    assert found.kv_indices is expected.kv_indices
    assert_same_lists(theirs.BlockMask.from_kv_blocks(*given, **options), found)
    assert found.shape == expected.shape
    without = BlockMask.from_kv_blocks(*given[:2], BLOCK_SIZE=32, compute_q_blocks=False)
    assert without.q_indices is None
    assert without.full_kv_indices is None
    assert without.shape == expected.shape


@pytest.mark.parametrize("dims", [(), (3,), (2, 3)])
def test_from_kv_blocks_with_fewer_leading_dimensions(dims):
    num = torch.randint(0, 5, (*dims, 4), dtype=torch.int32)
    indices = (
        torch.stack([torch.randperm(6) for _ in range(int(torch.Size((*dims, 4)).numel()))])
        .view(*dims, 4, 6)
        .int()
    )
    expected = theirs.BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=16)
    found = BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=16)
    assert_same_lists(expected, found)
    assert found.shape == expected.shape
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert found.to_string() == expected.to_string()


def test_adjust_crops():
    """torch's own _adjust miscounts rows whose listed blocks are cut; ours equals a new mask."""
    s = Sizes(1, 4, 256, 256)
    mod = windows_by_head(s)
    mask = ours.create_block_mask(mod, 1, 4, 256, 256, device="cpu", BLOCK_SIZE=32)
    smaller = mask._adjust(128, 192)
    fresh = ours.create_block_mask(mod, 1, 4, 128, 192, device="cpu", BLOCK_SIZE=32)
    assert smaller.shape == (1, 4, 128, 192)
    assert_same_lists(fresh, smaller)


@pytest.mark.parametrize("name", ["create_block_mask", "create_mask", "and_masks", "or_masks"])
def test_same_signatures(name):
    def form(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert form(getattr(ours, name)) == form(getattr(theirs, name))


@pytest.mark.parametrize("name", ["__init__", "from_kv_blocks", "as_tuple", "to_string", "to"])
def test_same_method_signatures(name):
    def form(cls):
        parameters = inspect.signature(getattr(cls, name)).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters if p.name != "mask_mod"]

    assert form(BlockMask) == form(theirs.BlockMask)


def test_every_public_name_of_torchs_class_exists():
    made = pair(causal, Sizes(1, 1, 64, 64), 32)
    for name in (n for n in dir(made[0]) if not n.startswith("_")):
        assert hasattr(made[1], name), name


@pytest.mark.parametrize("make", MODS, ids=lambda m: m.__name__)
def test_same_create_mask(make):
    s = Sizes(2, 4, 37, 50)
    mod = make(s)
    assert torch.equal(
        ours.create_mask(mod, 2, 4, 37, 50, device="cpu"),
        theirs.create_mask(mod, 2, 4, 37, 50, device="cpu"),
    )


def test_same_create_mask_of_a_score_mod():
    slopes = torch.tensor([0.5, 2.0])
    mod = lambda score, b, h, q, kv: torch.where(
        q >= kv, score + slopes[h] * (kv - q), -float("inf")
    )
    assert torch.equal(
        ours.create_mask(mod, None, 2, 20, 30, device="cpu"),
        theirs.create_mask(mod, None, 2, 20, 30, device="cpu"),
    )


def test_same_combinations():
    s = Sizes(1, 1, 64, 64)
    mods = (causal(s), window(s), lambda b, h, q, kv: kv % 3 == 0)
    for name in ("and_masks", "or_masks"):
        for chosen in (mods, mods[:1], ()):
            a, b = (
                module.create_mask(getattr(module, name)(*chosen), 1, 1, 64, 64, device="cpu")
                for module in (theirs, ours)
            )
            assert torch.equal(a.expand(1, 1, 64, 64), b)
