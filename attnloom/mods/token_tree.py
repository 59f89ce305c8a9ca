"""Trees of drafted tokens, verified in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.errors import ModError
from attnloom.masking.extent import Axis, Limit, limited
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import Integers, read_integers, read_size
from attnloom.mods.extent import of_table


def token_tree(parents: Integers, prefix_length: int | Integers = 0) -> MaskMod:
    """A drafted token sees the prefix, its ancestors in the tree, and itself.

        kv_idx < prefix_length or enter[node] <= enter[q_idx] < leave[node],
        node = kv_idx - prefix_length

    A node is an ancestor exactly if the numbers that a depth-first walk gives to its subtree
    include the query's, so that two numbers a node suffice, however large the tree.

    Over a PagedKVCache q_idx is the place in the sequence: docs/concepts/paged.md, trees of drafts.

    Args:
        parents: [N] or [B, N] integers, the parent of each drafted token, before it in the order;
            -1 for a child of the prefix. Queries are the N tokens.
        prefix_length: keys of the cache before them, 0 or more; or [B] integers. The tree's keys
            follow the prefix; keys after those are hidden.
    Returns:
        mask_mod capturing the numbers of the walk, [N] or [B, N] int32.
    Raises:
        ModError: a parent does not come before its child. DtypeError, ShapeError: no integers.
    Source: Miao et al. 2023 (SpecInfer), arXiv:2305.09781; Cai et al. 2024 (Medusa),
        arXiv:2401.10774; Li et al. 2024 (EAGLE), arXiv:2401.15077.
    """
    tree = read_integers("token_tree", "parents", parents, 1, 2)
    batched = tree.dim() == 2
    rows = [walk(row) for row in (tree if batched else tree[None]).tolist()]
    enter, leave = (torch.tensor(side, dtype=torch.int32) for side in zip(*rows, strict=True))
    enter, leave = (t.to(tree.device) if batched else t[0].to(tree.device) for t in (enter, leave))
    prefix_length, count = _read_prefix("token_tree", prefix_length), tree.shape[-1]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        start = prefix_length[b] if isinstance(prefix_length, Tensor) else prefix_length
        node = kv_idx - start
        query = enter[b, q_idx] if batched else enter[q_idx]
        key = node.clamp(min=0)
        first, stop = (t[b, key] if batched else t[key] for t in (enter, leave))
        return (node < 0) | ((node < count) & (query >= first) & (query < stop))

    leading: tuple[Axis, ...] = ("batch",) if batched else ()
    limits = of_table("token_tree", "parents", tree, *leading, "Q_LEN")
    return limited(mask_mod, *limits, *_prefix_limits("token_tree", prefix_length))


def token_tree_from_bits(bits: Tensor, prefix_length: int | Integers = 0) -> MaskMod:
    """A drafted token sees the prefix and the drafted tokens whose bit is set.

        kv_idx < prefix_length or bit `node` of row q_idx is 1, node = kv_idx - prefix_length

    Args:
        bits: [N, words] or [B, N, words] integers, the lowest bit of the first word first; as
            numpy.packbits(mask, bitorder="little") packs uint8, or int32, int64 words.
        prefix_length: as in `token_tree`.
    Returns:
        mask_mod capturing bits; any mask of tokens, a tree or not.
    Raises:
        ModError: a negative prefix. DtypeError, ShapeError: bits are not integers of 2 or 3
            dimensions.
    Source: as `token_tree`; packed masks as in FlashInfer's and SGLang's custom masks.
    """
    bits = read_integers("token_tree_from_bits", "bits", bits, 2, 3)
    width = 8 * bits.element_size()
    batched = bits.dim() == 3
    # 2^63 does not fit in int64, its two's complement does.
    powers = [1 << i if i < 63 else -(1 << 63) for i in range(width)]
    if bits.dtype is not torch.uint8:
        powers[-1] = -(1 << (width - 1))
    power = torch.tensor(powers, dtype=bits.dtype, device=bits.device)
    prefix_length = _read_prefix("token_tree_from_bits", prefix_length)
    count = width * bits.shape[-1]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        start = prefix_length[b] if isinstance(prefix_length, Tensor) else prefix_length
        node = kv_idx - start
        at = (q_idx, node // width)
        word = bits[(b, *at)] if batched else bits[at]
        return (node < 0) | ((node < count) & ((word & power[node % width]) != 0))

    leading: tuple[Axis, ...] = ("batch",) if batched else ()
    limits = of_table("token_tree_from_bits", "bits", bits, *leading, "Q_LEN", None)
    return limited(mask_mod, *limits, *_prefix_limits("token_tree_from_bits", prefix_length))


def ancestor_bits(parents: Integers) -> Tensor:
    """The bits of `token_tree_from_bits` for a tree: each token's ancestors and itself.

    Args:
        parents: as in `token_tree`.
    Returns:
        [N, ceil(N / 8)] or [B, N, ceil(N / 8)] uint8.
    Raises:
        ModError, DtypeError, ShapeError: as `token_tree`.
    """
    tree = read_integers("ancestor_bits", "parents", parents, 1, 2)
    rows = [walk(row) for row in (tree if tree.dim() == 2 else tree[None]).tolist()]
    enter, leave = (torch.tensor(side).to(tree.device) for side in zip(*rows, strict=True))
    query = enter[:, :, None]
    seen = (enter[:, None] <= query) & (query < leave[:, None])  # [B, N, N]
    spare = -seen.shape[-1] % 8
    seen = torch.nn.functional.pad(seen, (0, spare)).unflatten(-1, (-1, 8))
    packed = (seen << torch.arange(8, device=tree.device)).sum(-1).to(torch.uint8)
    return packed if tree.dim() == 2 else packed[0]


def walk(parents: list[int]) -> tuple[list[int], list[int]]:
    """The number of each node in a depth-first walk, and one more than the last of its subtree."""
    size = [1] * len(parents)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ModError(
                f"token_tree: parents[{node}] is {parent}; a parent comes before its child, and is "
                "-1 for a child of the prefix."
            )
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    enter, free, roots = [0] * len(parents), [0] * len(parents), 0
    for node, parent in enumerate(parents):
        if parent < 0:
            enter[node], roots = roots, roots + size[node]
        else:
            enter[node], free[parent] = free[parent], free[parent] + size[node]
        free[node] = enter[node] + 1
    return enter, [first + n for first, n in zip(enter, size, strict=True)]


def _read_prefix(factory: str, prefix_length: int | Integers) -> int | Tensor:
    if isinstance(prefix_length, int):
        return read_size(factory, "prefix_length", prefix_length)
    return read_integers(factory, "prefix_length", prefix_length, 1)


def _prefix_limits(factory: str, prefix: int | Tensor) -> list[Limit]:
    if isinstance(prefix, Tensor):
        return of_table(factory, "prefix_length", prefix, "batch")
    return []
