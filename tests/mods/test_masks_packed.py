"""Masks of several texts in one row, of padding, of text beside images, of trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnloom import mods
from tests.mods.dense import BOTH, Sizes, check_in_one_kernel, check_mask

CU = [0, 13, 13, 14, 33, 40]  # an empty document, and one of a single token
AFTER_PREFIX = [0, 6, 6, 7, 26, 33]


def document_of(token: int, cu: list[int] = CU) -> int:
    return max(d for d in range(len(cu) - 1) if cu[d] <= token < cu[d + 1])


def same_document(b, h, q, k):
    return document_of(q) == document_of(k)


PREFIXES = [0, 11, 40]
IDS = [[0] * 12 + [1] * 9 + [7] * 19, [5] * 40]  # one document in the second entry
MIXED = [0, 1, 2, 0, 0, 1, 3, 3, 2, 0] * 4  # interleaved


MEDIA = [[t % 13 == 3 for t in range(40)], [t == 39 for t in range(40)], [True] * 40]


def tutorial_prefix(b, h, q_idx, kv_idx):
    """As tutorials write it: `or`, between two traced values."""
    is_prefix = kv_idx < 11
    is_causal = q_idx >= kv_idx
    return is_prefix or is_causal


CASES = {
    "prefix": (lambda: mods.prefix_lm(9), lambda b, h, q, k: k < 9 or k <= q, Sizes()),
    "prefix 0": (lambda: mods.prefix_lm(0), lambda b, h, q, k: k <= q, Sizes()),
    "prefixes": (
        lambda: mods.prefix_lm(PREFIXES),
        lambda b, h, q, k: k < PREFIXES[b] or k <= q,
        Sizes(B=3),
    ),
    "prefix tensor": (
        lambda: mods.prefix_lm(torch.tensor(9)),
        lambda b, h, q, k: k < 9 or k <= q,
        Sizes(),
    ),
    "tutorial prefix": (
        lambda: tutorial_prefix,
        lambda b, h, q, k: k < 11 or k <= q,
        Sizes(),
    ),
    "cu_seqlens": (lambda: mods.documents_from_cu_seqlens(CU), same_document, Sizes()),
    "one document": (
        lambda: mods.documents_from_cu_seqlens([0, 40]),
        lambda b, h, q, k: True,
        Sizes(),
    ),
    "tokens after the last": (
        lambda: mods.documents_from_cu_seqlens([0, 20, 30]),
        lambda b, h, q, k: q // 20 == k // 20 and max(q, k) < 30,
        Sizes(),
    ),
    "no documents": (
        lambda: mods.documents_from_cu_seqlens([0]),
        lambda b, h, q, k: False,
        Sizes(Q=5, KV=7),
    ),
    "ids": (
        lambda: mods.documents(torch.tensor(IDS)),
        lambda b, h, q, k: IDS[b][q] == IDS[b][k],
        Sizes(B=2),
    ),
    "interleaved ids": (
        lambda: mods.documents(MIXED),
        lambda b, h, q, k: MIXED[q] == MIXED[k],
        Sizes(),
    ),
    "ids of both sides": (
        lambda: mods.documents([0, 0, 1, 2, 2], [2, 0, 0, 0, 9, 9, 2]),
        lambda b, h, q, k: [0, 0, 1, 2, 2][q] == [2, 0, 0, 0, 9, 9, 2][k],
        Sizes(Q=5, KV=7),
    ),
    "causal documents": (
        lambda: mods.and_masks(mods.causal_mask, mods.documents_from_cu_seqlens(CU)),
        lambda b, h, q, k: k <= q and document_of(q) == document_of(k),
        Sizes(),
    ),
    "shared prefix": (
        lambda: mods.shared_prefix(7, AFTER_PREFIX),
        lambda b, h, q, k: (
            k <= q
            and (k < 7 or document_of(q - 7, AFTER_PREFIX) == document_of(k - 7, AFTER_PREFIX))
        ),
        Sizes(),
    ),
    "shared prefix of none": (
        lambda: mods.shared_prefix(0, CU),
        lambda b, h, q, k: k <= q and document_of(q) == document_of(k),
        Sizes(),
    ),
    "after the shared prefix": (
        lambda: mods.shared_prefix(4, [0, 6]),
        lambda b, h, q, k: k <= q and (k < 4 or q < 10),
        Sizes(Q=14, KV=14),
    ),
    "right padding": (
        lambda: mods.right_padding([40, 0, 17]),
        lambda b, h, q, k: k < [40, 0, 17][b],
        Sizes(B=3, Q=20),
    ),
    "left padding": (
        lambda: mods.and_masks(mods.causal_mask, mods.left_padding([0, 40, 23])),
        lambda b, h, q, k: [0, 40, 23][b] <= k <= q,
        Sizes(B=3),
    ),
    "key padding": (
        lambda: mods.key_padding(torch.tensor([[1, 0] * 20, [0] * 39 + [1], [0] * 40])),
        lambda b, h, q, k: [k % 2 == 0, k == 39, False][b],
        Sizes(B=3, Q=20),
    ),
    "one key padding": (
        lambda: mods.key_padding(torch.tensor([True] * 30 + [False] * 10)),
        lambda b, h, q, k: k < 30,
        Sizes(B=2, Q=20),
    ),
    "flamingo": (
        lambda: mods.flamingo(torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 1]]), 6),
        lambda b, h, q, k: k // 6 == ([-1, 0, 0, 1, 1], [-1, -1, -1, -1, 0])[b][q],
        Sizes(B=2, Q=5, KV=12),
    ),
    "flamingo, long": (
        lambda: mods.flamingo(torch.tensor(MEDIA), 6),
        lambda b, h, q, k: k // 6 == sum(MEDIA[b][: q + 1]) - 1,
        Sizes(B=3),
    ),
    "flamingo, all before": (
        lambda: mods.flamingo(torch.tensor([0, 1, 0, 1, 0]), 6, only_immediate=False),
        lambda b, h, q, k: k // 6 <= [-1, 0, 0, 1, 1][q],
        Sizes(Q=5, KV=12),
    ),
}


def block_diffusion(length: int, block: int):
    """Token by token: 'noisy' or 'clean', and the number of its block."""

    def keeps(b, h, q, k):
        q_kind, q_block = ("clean", (q - length) // block) if q >= length else ("noisy", q // block)
        k_kind, k_block = ("clean", (k - length) // block) if k >= length else ("noisy", k // block)
        if q_kind == "clean":
            return k_kind == "clean" and k_block <= q_block
        return k_block == q_block if k_kind == "noisy" else k_block < q_block

    return keeps


CASES |= {
    f"block diffusion {length}, {block}": (
        lambda length=length, block=block: mods.block_diffusion(length, block),
        block_diffusion(length, block),
        Sizes(Q=2 * length, KV=2 * length),
    )
    for length, block in ((20, 4), (19, 5), (16, 1), (10, 99))
}


ON_KERNELS = (
    "prefix",
    "prefixes",
    "tutorial prefix",
    "cu_seqlens",
    "interleaved ids",
    "shared prefix",
    "right padding",
    "left padding",
    "key padding",
    "flamingo, long",
    "block diffusion 20, 4",
)


@pytest.mark.parametrize("name", CASES)
def test_mask(name: str) -> None:
    make, keeps, sizes = CASES[name]
    check_mask(make(), keeps, sizes)


TREES = [[-1, 0, 0, 1, 1, 2, -1, 6, 3], [-1] * 9]


def is_ancestor(parents: list[int], node: int, of: int) -> bool:
    while of >= 0:
        if of == node:
            return True
        of = parents[of]
    return False


def sees(prefix: list[int], trees: list[list[int]]):
    def keeps(b, h, q, k):
        node, tree = k - prefix[b], trees[b]
        return node < 0 or (node < len(tree) and is_ancestor(tree, node, q))

    return keeps


def test_in_one_kernel() -> None:
    """Trees among them, of which only the first nodes are keys."""
    parents = [t % 5 - 1 if t < 5 else t - 1 - t % 3 for t in range(40)]
    tree = sees([11] * 3, [parents] * 3)
    masks = [
        (mods.token_tree(parents, 11), tree),
        (mods.token_tree_from_bits(mods.ancestor_bits(parents), 11), tree),
    ]
    cases = [CASES[name] for name in ON_KERNELS]
    masks += [(make(), keeps) for make, keeps, _ in cases]
    check_in_one_kernel(masks, Sizes(B=3))


@pytest.mark.parametrize("prefix", [0, 21])
def test_token_tree(prefix: int) -> None:
    keeps, sizes = sees([prefix], TREES[:1]), Sizes(H=2, Q=9, KV=33)
    check_mask(mods.token_tree(TREES[0], prefix), keeps, sizes)
    check_mask(mods.token_tree_from_bits(mods.ancestor_bits(TREES[0]), prefix), keeps, sizes)


def test_a_token_tree_for_each_batch_entry() -> None:
    keeps, sizes = sees([24, 11], TREES), Sizes(B=2, Q=9, KV=33)
    check_mask(mods.token_tree(torch.tensor(TREES), [24, 11]), keeps, sizes)
    bits = mods.ancestor_bits(TREES)
    assert bits.shape == (2, 9, 2)
    check_mask(mods.token_tree_from_bits(bits, [24, 11]), keeps, sizes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_bits_of_any_word(dtype: torch.dtype) -> None:
    """The highest bit, a sign in signed words, included."""
    wide = 8 * dtype.itemsize
    N = wide + 3
    allowed = torch.rand(N, N, generator=torch.Generator().manual_seed(1)) < 0.5
    allowed[:, wide - 1] = True
    packed = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    spare = -packed.shape[1] % dtype.itemsize
    words = torch.from_numpy(np.pad(packed, ((0, 0), (0, spare)))).view(dtype)
    listed = allowed.tolist()
    backends = BOTH if dtype is torch.int64 else ("tiled",)
    check_mask(
        mods.token_tree_from_bits(words),
        lambda b, h, q, k: listed[q][k],
        Sizes(1, 1, N, N),
        *backends,
    )


def test_a_random_tree() -> None:
    generator = np.random.default_rng(0)
    parents = [int(generator.integers(-1, n)) for n in range(60)]
    keeps = sees([5], [parents])
    check_mask(mods.token_tree(parents, 5), keeps, Sizes(Q=60, KV=65))


def test_an_empty_tree() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert mods.ancestor_bits(empty).shape == (0, 0)
    check_mask(mods.token_tree(empty, 5), lambda b, h, q, k: k < 5, Sizes(Q=0, KV=8))
