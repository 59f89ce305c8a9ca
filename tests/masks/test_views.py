"""Parts of masks keep their lengths, lists and mask_mod right."""

from __future__ import annotations

import functools

import pytest
import torch

from attnloom.api.masks import create_block_mask
from attnloom.block_mask import BlockMask
from attnloom.errors import OptionError, ShapeError, UnsupportedError
from attnloom.masking.views import noop_mask, shifted_mask
from tests.masks.mods import MODS, Sizes, causal, causal_documents_by_batch, dense, windows_by_head
from tests.masks.test_classify import assert_sorted, codes_of, tile_codes

SIZES = Sizes(2, 3, 300, 260)
PARTED = MODS[::2]  # every other idea: parts are list operations, whatever the mask


def build(make, s: Sizes = SIZES, block=32) -> tuple[BlockMask, torch.Tensor]:
    mod = make(s)
    mask = create_block_mask(mod, s.B, s.H, s.Q, s.KV, device="cpu", BLOCK_SIZE=block)
    return mask, dense(mod, s)


def assert_is(part: BlockMask, kept: torch.Tensor) -> None:
    """The part keeps exactly these scores, and lists no full tile wrongly."""
    assert part.shape == tuple(kept.shape)
    assert torch.equal(part.to_mask(), kept)
    lists = part.lists()
    assert_sorted(lists)
    exact = tile_codes(kept, *part.BLOCK_SIZE)
    listed = codes_of(lists, *kept.shape[:2])
    assert ((exact == 2) >= (listed == 2)).all()
    assert (listed[exact > 0] > 0).all()


@pytest.mark.parametrize("make", MODS, ids=lambda m: m.__name__)
def test_to_mask_is_the_dense_mask(make):
    mask, kept = build(make)
    assert_is(mask, kept)


@pytest.mark.parametrize("make", PARTED, ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 300), (64, 200), (33, 34), (1, 300), (299, 300), (100, 100), (290, 300)]
)
def test_rows(make, start, stop):
    mask, kept = build(make)
    part = mask.rows(start, stop)
    assert_is(part, kept[:, :, start:stop])
    if start % 32 == 0:  # the grid is the old one: whole tiles are as they were
        whole = (stop - start) // 32
        exact = tile_codes(kept[:, :, start:stop], 32, 32)
        assert torch.equal(codes_of(part.lists(), 2, 3)[:, :, :whole], exact[:, :, :whole])


@pytest.mark.parametrize("make", PARTED, ids=lambda m: m.__name__)
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 260), (128, 100), (1, 1), (33, 260), (0, 64)])
def test_crop(make, q_len, kv_len):
    mask, kept = build(make)
    part = mask.crop(q_len, kv_len)
    assert_is(part, kept[:, :, :q_len, :kv_len])


def test_parts_of_parts():
    mask, kept = build(windows_by_head)
    part = mask.rows(17, 290).crop(200, 250).rows(40, 180)[1, 1:]
    assert_is(part, kept[1:2, 1:, 57:197, :250])
    offsets = [f for f in _chain(part.mask_mod) if f.func is shifted_mask]
    assert len(offsets) == 1  # shifts of shifts add up


def _chain(mod):
    while isinstance(mod, functools.partial):
        yield mod
        mod = next(a for a in mod.args if callable(a))


@pytest.mark.parametrize(
    "index",
    [
        1,
        -1,
        (0, 2),
        (slice(None), slice(1, 3)),
        (slice(None), slice(None, None, 2)),
        (torch.tensor([1, 1, 0]),),
        (slice(None), [2, 0]),
        (slice(None), torch.tensor([False, True, True])),
        (torch.tensor(1), torch.tensor(2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [windows_by_head, causal_documents_by_batch, causal])
def test_slices_of_batch_and_heads(make, index):
    mask, kept = build(make)
    part = mask[index]
    indices = index if isinstance(index, tuple) else (index,)
    for dim, i in enumerate(indices):
        chosen = torch.arange(kept.shape[dim])[i]
        kept = kept.index_select(dim, torch.atleast_1d(chosen))
    assert_is(part, kept)


@pytest.mark.parametrize(
    "rows", [3, -1, slice(2, 5), [6, 1], [0, 9], slice(None, None, 3)], ids=str
)
def test_slices_of_rows_follow_in_length_and_mod(rows):
    """Elsewhere a sliced mask kept the old Q_LEN, and its mask_mod refused to run."""
    mask, kept = build(causal_documents_by_batch)
    part = mask[:, :, rows]
    chosen = torch.atleast_1d(torch.arange(10)[rows])
    tokens = torch.cat([torch.arange(r * 32, min(r * 32 + 32, 300)) for r in chosen.tolist()])
    assert_is(part, kept[:, :, tokens])


def test_slice_of_one_batch_entry_answers_any_batch():
    """mask[1] has size 1 and broadcasts: b is then entry 1, whatever the call's batch entry."""
    mask, kept = build(causal_documents_by_batch)
    part = mask[1]
    b = torch.tensor(5)
    q, kv = torch.arange(300)[:, None], torch.arange(260)
    assert torch.equal(part.mask_mod(b, b, q, kv), kept[1, 0])


def test_slice_of_a_broadcast_dimension_keeps_the_real_index():
    mod = lambda b, h, q, kv: q + 0 * kv >= 100 * b
    mask = create_block_mask(mod, None, None, 300, 300, device="cpu")
    assert mask[0].mask_mod is mod


def test_replaced_mask_mod_is_used():
    """torch's idiom for decoding: slice a block row, then set mask_mod and lengths."""
    mask, kept = build(causal)
    part = mask[:, :, torch.tensor([4])]
    part.mask_mod = lambda b, h, q, kv: q + 133 >= kv
    part.seq_lengths = (1, 260)
    assert part.shape == (2, 3, 1, 260)
    assert torch.equal(part.to_mask(), kept[:, :, 133:134])


def test_torch_style_decode_row():
    mask, kept = build(causal)
    for position in (0, 31, 32, 133, 259):
        assert_is(mask.rows(position, position + 1), kept[:, :, position : position + 1])


def test_from_kv_blocks_with_expanded_lists_stores_them_once():
    num = torch.tensor([1, 2], dtype=torch.int32).expand(4, 8, 2)
    indices = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32).expand(4, 8, 2, 2)
    mask = BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=16)
    assert (mask.lists().num_batches, mask.lists().num_heads) == (1, 1)
    assert mask.kv_num_blocks.shape == (4, 8, 2)
    assert mask[2:, 1].to_mask().shape == (2, 1, 32, 32)


def test_tiles_are_live_only_where_listed():
    """Without a mask_mod a listed tile keeps every score."""
    num = torch.tensor([[[1, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    kept = BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=16).to_mask()
    expected = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    expected[..., :16, 16:] = True
    expected[..., 16:, :16] = True
    assert torch.equal(kept, expected)


def test_sparsity_of_overhanging_tiles_is_no_less_than_zero():
    """torch's is negative where tiles overhang the lengths."""
    everything = create_block_mask(noop_mask, None, None, 130, 1, device="cpu")
    assert everything.sparsity() == 0.0
    mask = create_block_mask(lambda b, h, q, kv: kv >= 128, None, None, 100, 130, device="cpu")
    assert mask.sparsity() == pytest.approx(100 * 128 / 130)
    corner = create_block_mask(
        lambda b, h, q, kv: (kv >= 128) & (q >= 128), 2, 3, 129, 130, device="cpu"
    )
    assert corner.sparsity() == pytest.approx(100 * (1 - 1 * 2 / (129 * 130)))


def test_repr_and_str_at_any_size():
    mask, _ = build(windows_by_head)
    assert "shape=(2, 3, 300, 260)" in repr(mask)
    assert "sparsity" in str(mask)
    assert len(str(create_block_mask(noop_mask, 1, 1, 1, 1, device="cpu"))) < 100


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: m.rows(-1, 5), ShapeError, "rows(-1, 5) of a mask with Q_LEN 300"),
        (lambda m: m.rows(5, 301), ShapeError, "rows(5, 301)"),
        (lambda m: m.crop(301, 10), ShapeError, "create_block_mask(mask_mod, B, H, 301, 10)"),
        (lambda m: m[2], IndexError, "index 2 is out of range for a dimension of size 2"),
        (lambda m: m[:, :, :, 0], IndexError, "4 indices"),
        (lambda m: m[torch.tensor([0]), torch.tensor([0])], OptionError, "one tensor index"),
        (lambda m: m["a"], OptionError, "not by 'a'"),
        (lambda m: m[torch.tensor([[0]])], OptionError, "one-dimensional"),
        (lambda m: m[torch.tensor([True])], IndexError, "bool index of shape [1]"),
        (lambda m: m[:, torch.tensor([3])], IndexError, "index 3"),
        (lambda m: m[:, :, [9, 0]], ShapeError, "row 9 of tiles ends at Q_LEN 300"),
    ],
)
def test_errors_name_the_values(call, error, text):
    mask, _ = build(causal)
    with pytest.raises(error) as caught:
        call(mask)
    assert text in str(caught.value)


def test_tensor_write_order_is_refused_for_parts():
    mask, _ = build(causal)
    mask.dq_kv_order = torch.arange(9)
    with pytest.raises(UnsupportedError, match="dq_kv_order"):
        mask.rows(0, 32)
