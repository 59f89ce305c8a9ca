"""Building, slicing and reusing masks: inputs that ran out of memory, time or lengths elsewhere."""

from __future__ import annotations

import pickle

import pytest
import torch

import attnloom
from attnloom.errors import ShapeError, TraceError
from tests.harness.agree import agrees, qkv
from tests.harness.memory import peak_growth


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 1024)


def live_tiles(mask: attnloom.BlockMask) -> int:
    return mask.lists().entries.numel()


@pytest.mark.slow
@pytest.mark.slow
def test_case_049_neighbourhoods_in_three_dimensions() -> None:
    """A neighbourhood mask over 48^3 tokens tripped an assertion of the builder."""
    side = 48

    def natten_3d(b, h, q_idx, kv_idx):
        x = (q_idx % side - kv_idx % side).abs() <= 3
        y = (q_idx // side % side - kv_idx // side % side).abs() <= 3
        return x & y & ((q_idx // side**2 - kv_idx // side**2).abs() <= 3)

    with peak_growth() as peak:
        mask = attnloom.create_block_mask(natten_3d, None, None, side**3, side**3)
    assert peak.bytes < 2 << 30
    assert 0 < live_tiles(mask) < 0.25 * (side**3 / 128) ** 2
    rows = mask.rows(50_000, 50_003).to_mask()[0, 0]
    q, kv = torch.arange(50_000, 50_003)[:, None], torch.arange(side**3)
    assert torch.equal(rows, natten_3d(0, 0, q, kv))


@pytest.mark.slow
@pytest.mark.parametrize("S", [96_000, 1 << 20])
def test_case_064_builder_never_holds_the_dense_mask(S: int) -> None:
    """S x S booleans were allocated: 9 GB at 96,000."""
    with peak_growth() as peak:
        mask = attnloom.create_block_mask(window, None, None, S, S)
    assert peak.bytes < 1 << 30
    per_row = 1024 // 128 + 1
    blocks = S // 128
    assert live_tiles(mask) == blocks * per_row - sum(range(per_row))


@pytest.mark.slow
def test_case_064b_lists_are_ragged() -> None:
    """At S=2^24 dense block lists take 64 GiB, at 2^22 4; a window has a handful of tiles a row."""
    with peak_growth() as peak:
        mask = attnloom.create_block_mask(window, None, None, 1 << 22, 1 << 22)
    assert peak.bytes < 1 << 29
    assert live_tiles(mask) < 10 * (1 << 22) // 128


@pytest.mark.slow
def test_case_066_long_documents_from_cumulative_lengths() -> None:
    """32 documents of 16 to 33 thousand tokens: lists come straight from the lengths."""
    lengths = torch.randint(16_000, 33_000, (32,), generator=torch.Generator().manual_seed(0))
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    with peak_growth() as peak:
        mask = attnloom.BlockMask.from_cu_seqlens(cu)
    assert peak.bytes < 1 << 30
    # Each document is a square of tiles, and at most one more tile on each side.
    tiles = lengths.double() / 128
    assert (tiles**2).sum() <= live_tiles(mask) <= ((tiles + 2) ** 2).sum()


def test_case_067_equal_heads_are_stored_once() -> None:
    """H = heads of a mask that is the same for all heads ran out of memory."""
    mask = attnloom.create_block_mask(causal, 4, 16, 512, 512)
    assert mask.lists().num_heads == mask.lists().num_batches == 1
    assert mask.kv_num_blocks.shape == (4, 16, 4)


def test_case_071_masks_pickle_with_their_captures() -> None:
    """Masks with captured tensors could not come from a DataLoader worker."""
    ids = torch.arange(100) // 30
    mask = attnloom.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 100, 100)
    back = pickle.loads(pickle.dumps(mask))
    assert torch.equal(back.to_mask(), mask.to_mask())
    agrees(*qkv(1, 1, 100, 16), mask_mod=lambda b, h, i, j: ids[i] == ids[j], block_mask=back)


class _Masks(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, n: int):
        ids = torch.arange(64) // (n + 5)
        return attnloom.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 64, 64)


@pytest.mark.slow
def test_case_071_masks_are_built_in_workers() -> None:
    """The same through a real DataLoader worker."""
    loader = torch.utils.data.DataLoader(_Masks(), batch_size=None, num_workers=1)
    for n, mask in enumerate(loader):
        ids = torch.arange(64) // (n + 5)
        assert torch.equal(mask.to_mask()[0, 0], ids[:, None] == ids)


def test_case_072_device_is_inferred() -> None:
    """The default device was a GPU, and CPU inputs then did not match."""
    mask = attnloom.create_block_mask(causal, None, None, 64, 64)
    assert mask.device.type == "cpu"
    agrees(*qkv(1, 1, 64, 16), mask_mod=causal, block_mask=mask)


def test_case_074_item_is_a_readable_error() -> None:
    """`.item()` inside a mod failed deep inside vmap."""

    def with_item(b, h, q_idx, kv_idx):
        return kv_idx < q_idx.item()

    with pytest.raises(TraceError, match=r"with_item.*item"):
        attnloom.create_block_mask(with_item, None, None, 64, 64)


def test_case_074_repeat_interleave_is_a_readable_error() -> None:
    """`repeat_interleave` and `unique` on positions have no place inside a mod."""

    def with_repeat(b, h, q_idx, kv_idx):
        return torch.repeat_interleave(q_idx, 2) == kv_idx

    with pytest.raises(TraceError, match=r"with_repeat.*repeat_interleave"):
        attnloom.create_block_mask(with_repeat, None, None, 64, 64)


def test_case_074_host_computation_inside_a_mod_works() -> None:
    """What depends on captures alone runs once, whatever operators it takes."""
    lengths = torch.tensor([10, 20, 34])

    def mask_mod(b, h, q_idx, kv_idx):
        ids = torch.repeat_interleave(torch.arange(3), lengths)
        return ids[q_idx] == ids[kv_idx]

    mask = attnloom.create_block_mask(mask_mod, None, None, 64, 64)
    ids = torch.repeat_interleave(torch.arange(3), lengths)
    assert torch.equal(mask.to_mask()[0, 0], ids[:, None] == ids)


def test_case_074_branches_and_batch_lookups_work() -> None:
    """A data-dependent branch, and a document table looked up by b at batch 1."""
    ids = torch.arange(70)[None] // 20

    def mask_mod(b, h, q_idx, kv_idx):
        if q_idx < 10:
            return kv_idx < 10
        return ids[b, q_idx] == ids[b, kv_idx] and q_idx >= kv_idx

    agrees(*qkv(1, 1, 70, 16), mask_mod=mask_mod)


def test_case_076_from_a_dense_mask() -> None:
    """There was no direct route from a bool [B, 1, S, S]."""
    dense = torch.rand(2, 1, 150, 150) < 0.3
    mask = attnloom.BlockMask.from_dense(dense)
    assert torch.equal(mask.to_mask(), dense)
    agrees(*qkv(2, 3, 150, 16), mask_mod=lambda b, h, i, j: dense[b, 0, i, j], block_mask=mask)


def test_case_077_rows_start_at_any_token() -> None:
    """Only whole blocks of rows could be sliced: decode position 1001 of a 2048 mask."""
    row = attnloom.create_block_mask(causal, None, None, 2048, 2048).rows(1001, 1002)
    assert row.shape == (1, 1, 1, 2048)
    assert torch.equal(row.to_mask()[0, 0, 0], torch.arange(2048) <= 1001)
    q, k, v = qkv(1, 1, 1, 16, keys=2048)
    agrees(q, k, v, mask_mod=lambda b, h, i, j: j <= 1001, block_mask=row)


def test_case_078_shape_follows_a_slice() -> None:
    """Taking the first query block of a 1024 mask with block 256 kept the shape 1024."""
    mask = attnloom.create_block_mask(causal, None, None, 1024, 1024, BLOCK_SIZE=256)
    assert mask[:, :, :1].shape == (1, 1, 256, 1024)
    part = mask[:, :, 2:3]
    assert torch.equal(part.to_mask(), mask.to_mask()[:, :, 512:768])
    q, k, v = qkv(1, 1, 256, 16, keys=1024)
    agrees(q, k, v, mask_mod=lambda b, h, i, j: i + 512 >= j, block_mask=part)


def test_case_079_adjusted_lengths_validate() -> None:
    """Adjusting the lengths of a mask left it unusable."""
    mask = attnloom.create_block_mask(causal, None, None, 512, 512)._adjust(300, 400)
    assert mask.seq_lengths == (300, 400)
    agrees(*qkv(1, 1, 300, 16, keys=400), mask_mod=causal, block_mask=mask)


def test_case_080_crop_and_offset_are_explicit() -> None:
    """A mask 1500 x 1500 for Q=500; a mask of 1280 for inputs of 1200."""
    long = attnloom.create_block_mask(causal, None, None, 1500, 1500)
    q, k, v = qkv(1, 1, 500, 16, keys=1500)
    with pytest.raises(ShapeError, match="1500"):
        attnloom.flex_attention(q, k, v, block_mask=long)
    agrees(q, k, v, mask_mod=causal, block_mask=long.crop(500, 1500))
    last = long.rows(1000, 1500)
    agrees(q, k, v, mask_mod=lambda b, h, i, j: i + 1000 >= j, block_mask=last)
    padded = attnloom.create_block_mask(causal, None, None, 1280, 1280).crop(1200, 1200)
    agrees(*qkv(1, 1, 1200, 16), mask_mod=causal, block_mask=padded)


def test_case_140_cross_attention_between_ragged_batches() -> None:
    """Queries and keys with different ragged lengths."""
    cu_q, cu_kv = torch.tensor([0, 10, 60, 61]), torch.tensor([0, 40, 45, 90])
    ids_q = torch.repeat_interleave(torch.arange(3), cu_q.diff())
    ids_kv = torch.repeat_interleave(torch.arange(3), cu_kv.diff())
    mask = attnloom.BlockMask.from_cu_seqlens(cu_q, cu_kv)
    q, k, v = qkv(1, 2, 61, 16, keys=90)
    agrees(q, k, v, mask_mod=lambda b, h, i, j: ids_q[i] == ids_kv[j], block_mask=mask)


def test_case_142_ragged_work_grows_with_the_documents() -> None:
    """Packed documents cost the sum of their squares, not the square of their sum."""
    cu = torch.arange(0, 128 * 65, 128)
    assert live_tiles(attnloom.BlockMask.from_cu_seqlens(cu)) == 64
