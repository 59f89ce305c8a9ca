"""Nested tensors: every sequence gives what it gives alone, as a batch entry of its own."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import attnloom
from attnloom import (
    AuxRequest,
    OptionError,
    ShapeError,
    UnsupportedError,
    create_block_mask,
    create_nested_block_mask,
    flex_attention,
)
from attnloom.api import jagged
from attnloom.backends.reference import reference_attention
from tests.harness.agree import close, normal

Q_LENS = (5, 1, 0, 40, 17)
KV_LENS = (9, 0, 3, 21, 17)


def sequences(lengths, heads=2, D=8, seed=0, **kind):
    return [normal(n, heads, D, seed=seed + i, **kind) for i, n in enumerate(lengths)]


def nested(parts, requires_grad=False):
    """[B, H, jagged, D] of sequences [length, H, D]."""
    packed = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=requires_grad)
    return packed.transpose(1, 2)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def one(parts, i):
    """Sequence i as a dense float64 tensor [1, H, length, D]."""
    return parts[i].double().transpose(0, 1)[None]


def each(x, i):
    """Sequence i of a nested result [B, H, jagged, ...] as [1, H, length, ...]."""
    return x.transpose(1, 2).unbind()[i].transpose(0, 1)[None]


def oracle_of(parts, i, score_mod=None, mask_mod=None):
    """What sequence i gives alone; its mods see b = i."""

    def score(s, b, h, q_idx, kv_idx):
        return score_mod(s, torch.full_like(b, i), h, q_idx, kv_idx)

    def mask(b, h, q_idx, kv_idx):
        return mask_mod(torch.full_like(b, i), h, q_idx, kv_idx)

    return reference_attention(
        *(one(p, i) for p in parts),
        None if score_mod is None else score,
        None if mask_mod is None else mask,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_of_queries_and_keys_differ(dtype):
    parts = [
        sequences(Q_LENS, seed=0, dtype=dtype),
        sequences(KV_LENS, seed=20, dtype=dtype),
        sequences(KV_LENS, D=6, seed=40, dtype=dtype),
    ]
    out, aux = flex_attention(*map(nested, parts), return_aux=AuxRequest(lse=True, max_scores=True))
    assert out.dtype == dtype
    for i in range(len(Q_LENS)):
        truth = oracle_of(parts, i)
        close(each(out, i), truth.out)
        close(each(aux.lse, i), truth.lse)
        close(each(aux.max_scores, i), truth.max_scores)


def test_mods_see_sequences_as_batch_entries():
    by_sequence = normal(len(Q_LENS), 64, seed=3)
    parts = [sequences(Q_LENS, seed=10 * i) for i in range(3)]

    def score(s, b, h, q_idx, kv_idx):
        return s + by_sequence[b, kv_idx] - 0.1 * (q_idx - kv_idx) * (h + 1)

    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((kv_idx + b) % 3 != 1) | (q_idx == kv_idx)

    query, key, value = map(nested, parts)
    block_mask = create_nested_block_mask(mask, None, None, query, BLOCK_SIZE=16)
    assert block_mask.shape == (1, 1, sum(Q_LENS), sum(Q_LENS))
    out = flex_attention(query, key, value, score, block_mask)
    for i in range(len(Q_LENS)):
        close(each(out, i), oracle_of(parts, i, score, mask).out)


def test_masks_by_head_and_between_lengths():
    parts = [sequences(Q_LENS, 4, seed=0), sequences(KV_LENS, 2, seed=9)]
    query, key = map(nested, parts)
    mask = create_nested_block_mask(
        lambda b, h, q_idx, kv_idx: (q_idx + h) % 4 != kv_idx % 4, 5, 4, query, key
    )
    assert mask.shape == (1, 4, sum(Q_LENS), sum(KV_LENS))
    out = flex_attention(query, key, key, block_mask=mask, enable_gqa=True)
    for i in range(len(Q_LENS)):
        keys = one(parts[1], i).repeat_interleave(2, 1)
        truth = reference_attention(
            one(parts[0], i), keys, keys, None, lambda b, h, x, y: (x + h) % 4 != y % 4
        )
        close(each(out, i), truth.out)


def test_gradients_reach_sequences_and_captures():
    slope = normal(2, seed=5).requires_grad_()
    parts = [[x.requires_grad_() for x in sequences(Q_LENS, seed=10 * i)] for i in range(3)]

    def score(s, b, h, q_idx, kv_idx):
        return s + slope[h] * (kv_idx - q_idx) * (b + 1)

    def pieces(tensors):
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged).transpose(1, 2)

    query, key, value = map(pieces, parts)
    mask = create_nested_block_mask(causal, None, None, query)
    flex_attention(query, key, value, score, mask).values().square().sum().backward()
    leaves = [x for part in parts for x in part]
    found = [x.grad for x in (*leaves, slope)]
    total = sum(oracle_of(parts, i, score, causal).out.square().sum() for i in range(len(Q_LENS)))
    wanted = torch.autograd.grad(total, (*leaves, slope), materialize_grads=True)
    for have, want in zip(found, wanted, strict=True):
        close(have, want)


def test_layers_share_one_packing():
    query = nested(sequences(Q_LENS))
    first = jagged._packing(query.offsets(), query.offsets())
    x = query
    for _ in range(3):
        x = flex_attention(x, x, x)
    assert x.shape == query.shape  # and so is the jagged length: they add
    assert (x + query).shape == query.shape
    assert jagged._packing(x.offsets(), x.offsets()) is first


def test_offsets_changed_in_place_are_packed_again():
    parts = sequences((3, 9))
    query = nested(parts)
    before = flex_attention(query, query, query).values()
    values, offsets = query.values(), query.offsets()
    offsets.copy_(torch.tensor([0, 9, 12]))
    moved = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
    after = flex_attention(moved, moved, moved).values()
    assert not torch.allclose(before, after)
    whole = values[:, :9][None]
    close(after[:, :9][None], reference_attention(*[whole.double()] * 3).out)


def test_autocast():
    query = nested(sequences(Q_LENS))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flex_attention(query, query, query)
    assert out.dtype == torch.bfloat16
    close(out.values(), flex_attention(query, query, query).values())


def test_return_lse_and_scale():
    query = nested(sequences(Q_LENS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # shown once a process
        out, lse = flex_attention(query, query, query, scale=0.5, return_lse=True)
    assert lse.shape == query.shape[:3]
    whole = one(sequences(Q_LENS), 3)
    close(each(out, 3), reference_attention(whole, whole, whole, scale=0.5).out)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_backends(backend):
    query = nested(sequences(Q_LENS))
    out = flex_attention(query, query, query, kernel_options={"backend": backend})
    whole = one(sequences(Q_LENS), 4)
    close(each(out, 4), reference_attention(whole, whole, whole).out)


def test_under_compile():
    query = nested(sequences((3, 4)))
    run = torch.compile(lambda x: flex_attention(x, x, x) * 2, backend="eager")
    close(run(query).values(), 2 * flex_attention(query, query, query).values())


REFUSED = {
    "dense": (
        lambda q: flex_attention(q, torch.ones(2, 2, 4, 8), torch.ones(2, 2, 4, 8)),
        UnsupportedError,
        "query is a nested tensor and key is not; query, key and value must all be nested",
    ),
    "number": (
        lambda q: flex_attention(nested(sequences((3, 4))), *[nested(sequences((5, 6, 7)))] * 2),
        ShapeError,
        "query has 2 sequences, key has 3; every sequence of queries has its own of keys",
    ),
    "key and value": (
        lambda q: flex_attention(q, q, nested(sequences((4, 3)))),
        ShapeError,
        "key has sequences of lengths [3, 4], value of [4, 3]; every key needs its value",
    ),
    "not transposed": (
        lambda q: flex_attention(*[q.transpose(1, 2)] * 3),
        ShapeError,
        "query is a nested tensor of shape [2, jagged, 2, 8]; it must be [batch, heads, jagged "
        "length, head_dim]. Use transpose(1, 2).",
    ),
    "holes": (
        lambda q: flex_attention(*[_with_holes()] * 3),
        UnsupportedError,
        "query is a nested tensor with holes between its sequences (as torch.nested.narrow makes "
        "them). Use query.contiguous().",
    ),
    "strided": (
        lambda q: flex_attention(*[torch.nested.nested_tensor([torch.ones(2, 3, 4)])] * 3),
        UnsupportedError,
        "query is a nested tensor with the layout torch.strided; flex_attention takes torch.jagged",
    ),
    "mask of one sequence": (
        lambda q: flex_attention(q, q, q, block_mask=create_block_mask(causal, 1, 1, 7, 7)),
        OptionError,
        "query is a nested tensor, and block_mask was made for Q_LEN 7 and KV_LEN 7 of one "
        "sequence; it says nothing of where others begin. Build it with "
        "attnloom.create_nested_block_mask(mask_mod, None, None, query, key).",
    ),
    "mask of other sequences": (
        lambda q: flex_attention(q, q, q, block_mask=_mask_of((4, 3))),
        ShapeError,
        "block_mask was made for sequences of lengths [4, 3], query has [3, 4].",
    ),
    "mask and dense inputs": (
        lambda q: create_nested_block_mask(causal, None, None, torch.ones(2, 2, 3, 8)),
        UnsupportedError,
        "q_nt is not a nested tensor. Make one with torch.nested.nested_tensor(sequences",
    ),
    "B": (
        lambda q: create_nested_block_mask(causal, 3, None, q),
        ShapeError,
        "B is 3, q_nt has 2 sequences; a mask of nested tensors is built for every sequence: B is "
        "2, 1 or None.",
    ),
    "H": (
        lambda q: create_nested_block_mask(causal, None, 3, q),
        ShapeError,
        "H is 3, q_nt has 2 heads; H is the number of query heads, or None",
    ),
    "heads": (
        lambda q: flex_attention(q, *[nested(sequences((3, 4), 1))] * 2),
        ShapeError,
        "query has 2 heads, key and value have 1; without grouped queries",
    ),
    "a score_mod that is none": (
        lambda q: flex_attention(q, q, q, 3),
        OptionError,
        "score_mod is a int; it must be a function",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, kind, text = REFUSED[case]
    with pytest.raises(kind, match=re.escape(text)):
        call(nested(sequences((3, 4))))


def test_mods_made_for_other_batches_are_refused():
    query = nested(sequences((3, 4), 4))
    mask = attnloom.mods.per_head(*[attnloom.mods.causal_mask] * 3)
    with pytest.raises(ShapeError, match="this call has heads 4"):
        create_nested_block_mask(mask, None, 4, query)
    with pytest.raises(ShapeError, match="this call has heads 4"):
        flex_attention(query, query, query, attnloom.mods.alibi(3))


def test_nested_query_over_a_cache_is_refused():
    query = nested(sequences((3, 4)))
    cache = attnloom.PagedKVCache(4, 16, 2, 8, device="cpu")
    with pytest.raises(UnsupportedError, match="query is a nested tensor, which goes with nested"):
        flex_attention(query, cache)


def _mask_of(lengths):
    return create_nested_block_mask(causal, None, None, nested(sequences(lengths)))


def _with_holes():
    starts, lengths = torch.tensor([0, 1]), torch.tensor([2, 3])
    dense = torch.ones(2, 6, 2, 8)
    return torch.nested.narrow(dense, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
