"""Attention in parts: keys merged by their log-sum-exp, queries shared out by live tiles."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from attnloom import (
    AuxRequest,
    BlockMask,
    OptionError,
    ShapeError,
    balanced_rows,
    create_block_mask,
    flex_attention,
    merge_attention,
    mods,
)
from attnloom.backends.reference import reference_attention
from tests.harness.agree import close, normal


def attend(query, key, value, mask):
    out, aux = flex_attention(query, key, value, block_mask=mask, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def shifted(mod, first):
    return lambda b, h, q_idx, kv_idx: mod(b, h, q_idx, kv_idx + first)


def test_rows_that_no_part_has_keys_for():
    """out 0, lse -inf, and no NaN in a gradient; softmax of two times -inf would give them."""
    query, key, value = (normal(1, 2, 40, 8, seed=i).requires_grad_() for i in range(3))

    def late(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx + 10

    parts = [slice(0, 12), slice(12, 40)]
    found = [
        attend(
            query,
            key[:, :, part],
            value[:, :, part],
            create_block_mask(shifted(late, part.start), None, None, 40, part.stop - part.start),
        )
        for part in parts
    ]
    out, lse = merge_attention(*zip(*found, strict=True))
    truth = reference_attention(query, key, value, None, late)
    close(out, truth.out)
    close(lse, truth.lse)
    assert torch.equal(out[:, :, :10], torch.zeros(1, 2, 10, 8))
    reached = torch.isfinite(truth.lse)
    weight = normal(1, 2, 40, 8, seed=7)

    def gradients(out, lse):
        loss = (out * weight).sum() + lse[reached].square().sum()
        return torch.autograd.grad(loss, (query, key, value))

    for mine, wanted in zip(gradients(out, lse), gradients(truth.out, truth.lse), strict=True):
        close(mine, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_and_large_scores(dtype):
    query, key, value = (normal(1, 2, 33, 8, seed=i, dtype=dtype) * 30 for i in range(3))
    found = [attend(query, key[:, :, s], value[:, :, s], None) for s in (slice(0, 5), slice(5, 33))]
    out, lse = merge_attention(*zip(*found, strict=True))
    truth = reference_attention(query, key, value)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(out, truth.out, dtype)
    close(lse, truth.lse, dtype)


@pytest.mark.parametrize("parts", [1, 2, 5, 40])
@pytest.mark.parametrize(
    "mod",
    [mods.causal_mask, mods.sliding_window(70), mods.prefix_lm(300)],
    ids=lambda m: str(m)[:20],
)
def test_spans_cover_all_queries_and_are_as_even_as_tiles_allow(mod, parts):
    S = 1000
    mask = create_block_mask(mod, None, None, S, S, BLOCK_SIZE=32)
    spans = balanced_rows(mask, parts)
    assert len(spans) == parts
    assert spans[0][0] == 0 and spans[-1][1] == S
    assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
    counts = mask.lists().row_counts.tolist()
    costs = [sum(counts[a // 32 : -(-b // 32)]) if a < b else 0 for a, b in spans]
    assert sum(costs) == sum(counts)
    assert max(costs) < sum(counts) / parts + max(counts)
    assert max(costs) == _best(counts, parts)


def _best(counts, parts):
    """The least that the fullest of contiguous spans can have, by dynamic programming."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    best = sums
    for _ in range(parts - 1):
        best = [
            min(max(best[k], sums[i] - sums[k]) for k in range(i + 1)) for i in range(len(sums))
        ]
    return best[-1]


def test_processes_that_share_the_queries_give_what_one_gives():
    S = 300
    query, key, value = (normal(2, 2, S, 8, seed=i) for i in range(3))
    mask = create_block_mask(mods.causal_mask, None, None, S, S, BLOCK_SIZE=32)
    outs = [
        flex_attention(query[:, :, a:b], key, value, block_mask=mask.rows(a, b))
        for a, b in balanced_rows(mask, 3)
    ]
    close(torch.cat(outs, 2), reference_attention(query, key, value, None, mods.causal_mask).out)


def test_masks_by_head_and_without_queries():
    table = torch.zeros(2, 64, 64, dtype=torch.bool)
    table[1, 48:] = True
    assert balanced_rows(BlockMask.from_dense(table, BLOCK_SIZE=16), 2) == [(0, 48), (48, 64)]
    empty = create_block_mask(mods.causal_mask, None, None, 0, 64)
    assert balanced_rows(empty, 2) == [(0, 0), (0, 0)]


REFUSED = {
    "counts": (
        lambda x: merge_attention([x], []),
        OptionError,
        "merge_attention was given 1 out and 0 of lses; it takes one of each for every part",
    ),
    "shapes": (
        lambda x: merge_attention([x, x[:, :, :2]], [x[..., 0], x[:, :, :2, 0]]),
        ShapeError,
        "part 1 has out [1, 2, 2, 8] and lse [1, 2, 2], part 0 out [1, 2, 3, 8]; all parts are of",
    ),
    "lse": (lambda x: merge_attention([x], [x]), ShapeError, "part 0 has out [1, 2, 3, 8] and lse"),
    "mask": (lambda x: balanced_rows(x, 2), OptionError, "block_mask is a torch.Tensor"),
    "parts": (
        lambda x: balanced_rows(create_block_mask(mods.causal_mask, 1, 1, 5, 5), 0),
        OptionError,
        "parts is 0; there is a span of queries for 1 or more.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, kind, text = REFUSED[case]
    with pytest.raises(kind, match=re.escape(text)):
        call(torch.ones(1, 2, 3, 8))
