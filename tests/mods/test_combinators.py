"""Mods made of mods."""

from __future__ import annotations

import pytest
import torch

from attnloom import BlockMask, create_block_mask, create_mask, flex_attention, mods
from tests.harness.agree import close, normal
from tests.mods.dense import BOTH, Sizes, check_in_one_kernel, check_mask, check_score, grid

CU = [0, 13, 13, 14, 33, 40]
IDS = [0, 1, 2, 0, 0, 1, 3, 3, 2, 0] * 4
BIG = Sizes(B=2, H=3, Q=21, KV=26)


def in_window(q, k):
    return k in range(q - 5, q + 1)


def start_of(token: int) -> int:
    return max(c for c in CU if c <= token)


def number_of(token: int) -> int:
    return max(d for d in range(len(CU) - 1) if CU[d] <= token < CU[d + 1])


PERMUTED = torch.randperm(40, generator=torch.Generator().manual_seed(0))
SLOTS = PERMUTED.tolist()[:35] + [-1] * 5

CASES = {
    "not": (lambda: mods.not_mask(mods.causal_mask), lambda b, h, q, k: k > q, Sizes()),
    "xor of none": (lambda: mods.xor_masks(), lambda b, h, q, k: False, Sizes()),
    "xor": (
        lambda: mods.xor_masks(mods.causal_mask, mods.sliding_window(5), mods.prefix_lm(9)),
        lambda b, h, q, k: ((k <= q) + in_window(q, k) + (k < 9 or k <= q)) % 2 == 1,
        Sizes(),
    ),
    "and, or": (
        lambda: mods.and_masks(
            mods.causal_mask, mods.or_masks(mods.sliding_window(5), mods.spatial_head(10))
        ),
        lambda b, h, q, k: k <= q and (in_window(q, k) or q // 10 == k // 10),
        Sizes(),
    ),
    "by head": (
        lambda: mods.per_head(mods.sliding_window(5), mods.causal_mask, mods.prefix_lm(9)),
        lambda b, h, q, k: [in_window(q, k), k <= q, k < 9 or k <= q][h],
        Sizes(H=3),
    ),
    "by head, chosen": (
        lambda: mods.per_head(mods.sliding_window(5), mods.causal_mask, heads=[1, 0, 1, 1]),
        lambda b, h, q, k: in_window(q, k) if h == 1 else k <= q,
        Sizes(H=4),
    ),
    "the same for all heads": (
        lambda: mods.per_head(mods.causal_mask, heads=[0, 0]),
        lambda b, h, q, k: k <= q,
        Sizes(H=2),
    ),
    "offset": (
        lambda: mods.offset(mods.sliding_window(5), 17, 3),
        lambda b, h, q, k: in_window(q + 17, k + 3),
        Sizes(Q=9),
    ),
    "offset as a tensor": (
        lambda: mods.offset(mods.sliding_window(5), torch.tensor(17)),
        lambda b, h, q, k: in_window(q + 17, k),
        Sizes(Q=9),
    ),
    "an offset a batch entry": (
        lambda: mods.offset(mods.sliding_window(5), torch.tensor([17, 30])),
        lambda b, h, q, k: in_window(q + [17, 30][b], k),
        Sizes(B=2, Q=9),
    ),
    "on documents": (
        lambda: mods.on_documents(mods.prefix_lm(4), cu_seqlens=CU),
        lambda b, h, q, k: start_of(q) == start_of(k) and (k - start_of(k) < 4 or k <= q),
        Sizes(),
    ),
    "a prefix for each document": (
        lambda: mods.on_documents(mods.prefix_lm([2, 3, 0, 9, 1]), cu_seqlens=CU),
        lambda b, h, q, k: (
            start_of(q) == start_of(k)
            and (k - start_of(k) < [2, 3, 0, 9, 1][number_of(q)] or k <= q)
        ),
        Sizes(),
    ),
    "on interleaved documents": (
        lambda: mods.on_documents(mods.sliding_window(1), ids=IDS),
        lambda b, h, q, k: IDS[q] == IDS[k] and k <= q and IDS[k:q].count(IDS[q]) <= 1,
        Sizes(),
    ),
    "logical positions": (
        lambda: mods.logical_to_physical(mods.sliding_window(5), torch.tensor(SLOTS)),
        lambda b, h, q, k: min(SLOTS[q], SLOTS[k]) >= 0 and in_window(SLOTS[q], SLOTS[k]),
        Sizes(),
    ),
    "logical keys of each entry": (
        lambda: mods.logical_to_physical(
            mods.causal_mask,
            torch.arange(9) + 20,
            torch.tensor([SLOTS, list(range(40))]),
        ),
        lambda b, h, q, k: 0 <= (SLOTS if b == 0 else list(range(40)))[k] <= q + 20,
        Sizes(B=2, Q=9),
    ),
}


ON_KERNELS = (
    "not",
    "xor",
    "offset",
    "an offset a batch entry",
    "on documents",
    "on interleaved documents",
    "logical positions",
)


@pytest.mark.parametrize("name", CASES)
def test_mask(name: str) -> None:
    make, keeps, sizes = CASES[name]
    check_mask(make(), keeps, sizes, *(BOTH if name == "by head" else ()))


def test_in_one_kernel() -> None:
    cases = [CASES[name] for name in ON_KERNELS]
    check_in_one_kernel([(make(), keeps) for make, keeps, _ in cases], Sizes(B=2))


def test_compose_in_order() -> None:
    _, _, q, k = grid(BIG)
    mod = mods.compose(mods.alibi(3), mods.softcap(2.0))
    slope = torch.tensor([2**-4, 2**-8, 2**-2], dtype=torch.float64)[:, None, None]
    check_score(mod, lambda s: 2 * torch.tanh((s + slope * (k - q)) / 2), BIG)
    check_score(mods.compose(), lambda s: s, BIG)


def test_scores_by_head() -> None:
    heat = (1 + normal(3, seed=5).abs()).requires_grad_()
    mod = mods.per_head(mods.softcap(0.7), mods.head_temperature(heat), heads=[0, 1, 0])

    def on_scores(s):
        capped = 0.7 * torch.tanh(s / 0.7)
        return torch.where(
            torch.tensor([1, 0, 1])[:, None, None] == 1, capped, s / heat.double()[:, None, None]
        )

    check_score(mod, on_scores, BIG, *BOTH, captures=[heat])


def test_scores_at_an_offset() -> None:
    table = normal(3, 11, seed=5).requires_grad_()
    columns = torch.tensor(
        [[min(max(q + 7 - k, -5), 5) + 5 for k in range(BIG.KV)] for q in range(BIG.Q)]
    )
    check_score(
        mods.offset(mods.relative_bias(table), torch.tensor(7)),
        lambda s: s + table.double()[:, columns],
        BIG,
        captures=[table],
    )


@pytest.mark.parametrize("form", ["cu_seqlens", "ids"])
def test_scores_on_documents(form: str) -> None:
    """A factor and a bias by positions in the document; the mask keeps documents apart."""
    scale = normal(40, seed=5).requires_grad_()
    ids = [number_of(t) for t in range(40)]
    given = {"cu_seqlens": CU} if form == "cu_seqlens" else {"ids": ids}
    place = torch.tensor([t - start_of(t) for t in range(40)])

    def by_position(score, b, h, q_idx, kv_idx):
        return score * scale[q_idx] + scale[kv_idx]

    check_score(
        mods.on_documents(by_position, **given),
        lambda s: s * scale.double()[place][:, None] + scale.double()[place],
        Sizes(),
        captures=[scale],
        mask=(mods.documents(ids), lambda b, h, q, k: ids[q] == ids[k]),
    )


def test_scores_of_logical_positions() -> None:
    table = normal(1, 81, seed=5).requires_grad_()
    slots = torch.tensor(SLOTS)
    at = slots.clamp(min=0)
    check_score(
        mods.logical_to_physical(mods.relative_bias(table), slots),
        lambda s: s + table.double()[:, at[:, None] - at + 40],
        Sizes(),
        *BOTH,
        captures=[table],
    )


def test_documents_equal_the_constructors() -> None:
    inner = mods.prefix_lm(4)
    by_cu = BlockMask.from_cu_seqlens(torch.tensor(CU), mask_mod=inner)
    by_ids = BlockMask.from_document_ids(torch.tensor([IDS]), mask_mod=inner)
    for mask, mod in (
        (by_cu, mods.on_documents(inner, cu_seqlens=CU)),
        (by_ids, mods.on_documents(inner, ids=IDS)),
    ):
        expected = create_mask(mask.mask_mod, 1, 1, 40, 40)
        assert torch.equal(create_mask(mod, 1, 1, 40, 40), expected)


def test_training_and_decoding_agree() -> None:
    """One mask and one score_mod, whole and one token at a time by an offset."""
    q, k, v = (normal(1, 2, 20, 8, seed=i) for i in range(3))
    window, slopes = mods.sliding_window(6), mods.alibi(2)
    options = {"backend": "tiled"}
    whole = create_block_mask(window, 1, 1, 20, 20)
    expected = flex_attention(q, k, v, slopes, whole, kernel_options=options)
    for t in range(20):
        at = torch.tensor(t)
        mask = create_block_mask(mods.offset(window, at), 1, 1, 1, 20)
        step = flex_attention(
            q[:, :, t : t + 1], k, v, mods.offset(slopes, at), mask, kernel_options=options
        )
        close(step, expected[:, :, t : t + 1])
