"""torch's PagedAttention by its own names: same results where torch is right, and its faults."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention as TorchPaged

from attnloom import create_block_mask, flex_attention
from attnloom.errors import AttnloomError, DeviceError, OutOfPagesError, ShapeError
from attnloom.integrations.torch_paged import PagedAttention

PAGE, PAGES, H, D = 16, 12, 2, 16


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def distance(score, b, h, q_idx, kv_idx):
    return score + 0.1 * (kv_idx - q_idx)


def filled(lengths: list[int], batch: int | None = None):
    """A table with tokens in it, the cache, and the keys and values of each row."""
    paged = PagedAttention(PAGES, PAGE, batch or len(lengths), device="cpu")
    k_cache, v_cache = torch.full((2, 1, H, PAGES * PAGE, D), 50.0)
    rows = []
    for i, length in enumerate(lengths):
        at = torch.tensor([i])
        paged.reserve(at, torch.tensor([length]))
        key, value = torch.randn(2, 1, H, length, D)
        paged.assign(at, torch.arange(length)[None], key, value, k_cache, v_cache)
        rows.append((key, value))
    return paged, (k_cache, v_cache), rows


def alone(query, row, score_mod=None, q_len=None):
    key, value = row
    n = key.size(2)
    mask = create_block_mask(causal, None, None, n, n, BLOCK_SIZE=PAGE)
    return flex_attention(query, key, value, score_mod, mask)


@pytest.mark.parametrize("page_order", [(0, 1), (1, 0)])
def test_converted_masks_and_mods_give_each_row_its_own_attention(page_order) -> None:
    lengths = [40, 40]
    paged, caches, rows = filled(lengths)
    query = torch.randn(2, H, 40, D)
    logical = create_block_mask(causal, 2, None, 40, 48, BLOCK_SIZE=PAGE)
    at = torch.tensor(page_order)
    physical = paged.convert_logical_block_mask(logical, at)
    score = paged.get_score_mod(distance, batch_idx=at)
    out = flex_attention(query, *caches, score, physical)
    for i, row in enumerate(page_order):
        want = alone(query[i : i + 1], rows[row], distance)
        torch.testing.assert_close(out[i : i + 1], want, atol=1e-5, rtol=1e-5)


def test_kernels_read_the_table_without_conversion() -> None:
    paged, caches, rows = filled([40, 23])
    query = torch.randn(2, H, 1, D)
    mask = create_block_mask(causal, None, None, 64, 64)
    out = flex_attention(query, paged.kv(*caches), None, None, mask)
    for i, (key, value) in enumerate(rows):
        want = flex_attention(query[i : i + 1], key, value)
        torch.testing.assert_close(out[i : i + 1], want, atol=1e-5, rtol=1e-5)


def test_erase_forgets_the_mapping() -> None:
    """torch keeps physical_to_logical of erased rows: the next owner's tokens look like theirs."""
    ours, theirs = (cls(PAGES, PAGE, 2, device="cpu") for cls in (PagedAttention, TorchPaged))
    for paged in (ours, theirs):
        paged.reserve(torch.tensor([0]), torch.tensor([40]))
        paged.erase(torch.tensor([0]))
        paged.reserve(torch.tensor([1]), torch.tensor([40]))
    assert (ours.physical_to_logical[0] == -1).all() and len(ours.empty_pages) == PAGES - 3
    stale = (theirs.physical_to_logical[0] != -1).any()
    assert stale, "torch has mended this: say so in the docstring"


def test_a_mask_for_some_rows_asks_those_rows() -> None:
    """torch's converted mask_mod looks at row b of the table, not at row batch_idx[b]."""
    paged, caches, rows = filled([33, 40, 7])
    query = torch.randn(1, H, 40, D)
    logical = create_block_mask(causal, 1, None, 40, 48, BLOCK_SIZE=PAGE)
    physical = paged.convert_logical_block_mask(logical, torch.tensor([1]))
    want = alone(query, rows[1])
    out = flex_attention(query, *caches, None, physical)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_unwritten_rows_are_masked_without_kv_len() -> None:
    """Case 9: a full block whose page is half written."""
    paged, caches, rows = filled([20])
    logical = create_block_mask(lambda b, h, q, k: k >= 0, 1, None, 1, 64, BLOCK_SIZE=PAGE)
    physical = paged.convert_logical_block_mask(logical)
    query = torch.randn(1, H, 1, D)
    out = flex_attention(query, *caches, None, physical)
    torch.testing.assert_close(out, flex_attention(query, *rows[0]), atol=1e-5, rtol=1e-5)


def test_a_given_kv_len_counts() -> None:
    paged, caches, rows = filled([40])
    logical = create_block_mask(lambda b, h, q, k: k >= 0, 1, None, 1, 64, BLOCK_SIZE=PAGE)
    physical = paged.convert_logical_block_mask(logical, kv_len=torch.tensor([25]))
    query = torch.randn(1, H, 1, D)
    out = flex_attention(query, *caches, None, physical)
    key, value = (x[:, :, :25] for x in rows[0])
    torch.testing.assert_close(out, flex_attention(query, key, value), atol=1e-5, rtol=1e-5)


def test_mistakes() -> None:
    paged, caches, _ = filled([40])
    with pytest.raises(OutOfPagesError, match="nothing was changed"):
        paged.reserve(torch.tensor([0]), torch.tensor([PAGES * PAGE + 1]))
    with pytest.raises(ShapeError, match="Call reserve first"):
        new = torch.zeros(1, H, 1, D)
        paged.assign(torch.tensor([0]), torch.tensor([[100]]), new, new, *caches)
    with pytest.raises(ShapeError, match="key blocks of 128 tokens and pages have 16"):
        paged.convert_logical_block_mask(create_block_mask(causal, 1, None, 40, 48))


MISPLACED = {
    "position": ([0], [[-1]], "input_pos goes down to -1; positions begin at 0."),
    "row": ([3], [[0]], "batch_idx is 3; the table has rows 0 to 0."),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_assign_refuses_places_that_do_not_exist(name: str) -> None:
    """They were an IndexError of torch's, about tensors that the caller never saw."""
    rows, positions, text = MISPLACED[name]
    paged, caches, _ = filled([40])
    new = torch.zeros(1, H, 1, D)
    with pytest.raises(ShapeError) as caught:
        paged.assign(torch.tensor(rows), torch.tensor(positions), new, new, *caches)
    assert str(caught.value).startswith(text)


def test_assign_writes_keys_and_values_or_neither() -> None:
    """Keys were written before values were found to be on another device."""
    paged, (k_cache, v_cache), _ = filled([40])
    before = k_cache.clone()
    new = torch.zeros(1, H, 1, D)
    at = torch.tensor([0]), torch.tensor([[3]])
    with pytest.raises(DeviceError, match="v_val is on meta, the page table on cpu; all must be"):
        paged.assign(*at, new, new.to("meta"), k_cache, v_cache)
    assert torch.equal(k_cache, before)


ROWS = {
    "more rows than entries": ([0, 1, 2], None, "batch_idx names 3 rows, but block_mask has 2"),
    "fewer rows than entries": ([0], None, "batch_idx names 1 row, but block_mask has 2"),
    "the row before the first": ([0, -1], None, "batch_idx is -1; the table has rows 0 to 2."),
    "the row after the last": ([0, 3], None, "batch_idx is 3; the table has rows 0 to 2."),
    "a length for all": ([0, 1], [40], "kv_len is [1]; it must be [2], a length each."),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_another_batch_gave_zeros_or_the_last_row(name: str) -> None:
    """Entries that the mask does not have saw nothing, and row -1 was the last one."""
    rows, lengths, text = ROWS[name]
    paged, _, _ = filled([40, 20, 30])
    logical = create_block_mask(lambda b, h, q, k: k <= q + b, 2, None, 1, 48, BLOCK_SIZE=PAGE)
    kv_len = None if lengths is None else torch.tensor(lengths)
    with pytest.raises(ShapeError) as caught:
        paged.convert_logical_block_mask(logical, torch.tensor(rows), kv_len)
    assert str(caught.value).startswith(text)


def test_a_mask_for_all_serves_any_rows() -> None:
    paged, caches, rows = filled([40, 20, 30])
    logical = create_block_mask(lambda b, h, q, k: k >= 0, None, None, 1, 48, BLOCK_SIZE=PAGE)
    some = torch.tensor([2, 0])
    query = torch.randn(2, H, 1, D)
    out = flex_attention(query, *caches, None, paged.convert_logical_block_mask(logical, some))
    for i, row in enumerate(some.tolist()):
        want = flex_attention(query[i : i + 1], *rows[row])
        torch.testing.assert_close(out[i : i + 1], want, atol=1e-5, rtol=1e-5)
    direct = flex_attention(query, paged.kv(*caches, some))
    torch.testing.assert_close(direct, out, atol=1e-5, rtol=1e-5)


def test_programs_that_catch_what_torch_raises() -> None:
    paged, caches, _ = filled([40])
    new = torch.zeros(1, H, 1, D)
    with pytest.raises(AssertionError):
        paged.reserve(torch.tensor([0]), torch.tensor([PAGES * PAGE + 1]))
    with pytest.raises(RuntimeError):
        paged.assign(torch.tensor([0]), torch.tensor([[0, 1]]), new, new, *caches)
    with pytest.raises(RuntimeError):
        asked = new.clone().requires_grad_()
        paged.assign(torch.tensor([0]), torch.tensor([[0]]), asked, new, *caches)
    with pytest.raises(RuntimeError):
        paged.convert_logical_block_mask(create_block_mask(causal, 1, None, 40, 48))
    with pytest.raises(ValueError, match="it must be a tensor"):
        paged.get_score_mod(None, batch_idx=[0])  # type: ignore[arg-type]


NO_LENGTHS = {
    "seq_len of floats": (lambda p: p.reserve(ONE, torch.tensor([16.9])), "seq_len is tensor"),
    "a negative seq_len": (
        lambda p: p.reserve(ONE, torch.tensor([-5])),
        "seq_len is -5; a row has",
    ),
    "two rows to erase": (lambda p: p.erase(torch.tensor([0, 0])), "batch_idx is tensor"),
    "a truth": (lambda p: p.erase(torch.tensor([True])), "batch_idx is tensor"),
}
ONE = torch.tensor([0])


@pytest.mark.parametrize("name", NO_LENGTHS)
def test_reserve_took_what_is_no_length(name: str) -> None:
    """16.9 was 16, -5 was 0, and two rows were torch's own error."""
    act, text = NO_LENGTHS[name]
    paged, _, _ = filled([40])
    with pytest.raises(AttnloomError, match=text):
        act(paged)
    assert paged.capacity.tolist() == [48]
