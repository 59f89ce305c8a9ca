"""Counts of tiles that published material gives."""

from __future__ import annotations

import pytest
import torch

from attnloom import create_block_mask, create_mask, mods


def counts(mask_mod, S: int) -> tuple[int, int, int]:
    """(full, partial, empty) tiles of 128 x 128."""
    mask = create_block_mask(mask_mod, None, None, S, S)
    full, partial = int(mask.full_kv_num_blocks.sum()), int(mask.kv_num_blocks.sum())
    return full, partial, (S // 128) ** 2 - full - partial


KNOWN = {
    "causal": (lambda: mods.causal_mask, (496, 32, 496)),
    "causal window 256": (lambda: mods.sliding_window(256), (31, 62, 931)),
    "8 documents of 512": (
        lambda: mods.documents_from_cu_seqlens(range(0, 4097, 512)),
        (128, 0, 896),
    ),
    "the same by ids": (lambda: mods.documents(torch.arange(4096) // 512), (128, 0, 896)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_tiles_at_4096(name: str) -> None:
    make, expected = KNOWN[name]
    assert counts(make(), 4096) == expected


def test_causal_skips_about_half() -> None:
    full, partial, empty = counts(mods.causal_mask, 4096)
    assert empty / (full + partial + empty) == pytest.approx(0.5, abs=0.02)


def test_a_window_of_1024_at_8192_skips_over_85_percent() -> None:
    *_, empty = counts(mods.sliding_window(1024), 8192)
    assert empty / 64**2 > 0.85


def test_a_window_of_1024_with_4_sinks_at_32768_skips_97_percent() -> None:
    mask = create_block_mask(mods.window_with_sinks(1024, 4), None, None, 32768, 32768)
    live = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert 1 - live / 256**2 == pytest.approx(0.97, abs=0.01)


def test_a_block_mask_is_thousands_of_times_smaller_than_the_mask() -> None:
    """Dense: 16 MiB at 4096."""
    lists = create_block_mask(mods.causal_mask, None, None, 4096, 4096).lists()
    size = lists.entries.nbytes + lists.row_offsets.nbytes
    assert size <= 4096


@pytest.mark.parametrize("contiguous", [True, False])
def test_documents_of_one_batch_serve_the_ids_of_several(contiguous: bool) -> None:
    """ids [2, 6] with kv_ids [1, 6] or [6], or the reverse, ended in torch.searchsorted."""
    several = torch.tensor([[0, 0, 1, 1, 2, 2], [2, 2, 2, 1, 1, 0]])
    one = torch.tensor([0, 0, 1, 1, 2, 2]) if contiguous else torch.tensor([0, 1, 0, 2, 1, 2])
    for ids, kv_ids in ((several, one), (several, one[None]), (one, several), (one[None], several)):
        kept = create_mask(mods.documents(ids, kv_ids), 2, 1, 6, 6)[:, 0]
        wide = [t.expand(2, 6) for t in (ids, kv_ids)]
        assert torch.equal(kept, wide[0][:, :, None] == wide[1][:, None])
