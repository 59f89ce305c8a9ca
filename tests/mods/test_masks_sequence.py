"""Masks along one sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnloom import mods
from tests.mods.dense import BOTH, Sizes, check_in_one_kernel, check_mask

TWO = Sizes(B=2, H=3, Q=33, KV=33)


def causal(b, h, q, k):
    return k <= q


CASES = {
    "causal": (lambda: mods.causal_mask, causal, Sizes()),
    "lower right": (
        lambda: mods.causal_lower_right(20, 45),
        lambda b, h, q, k: k - 45 <= q - 20,
        Sizes(Q=20, KV=45),
    ),
    "lower right, more queries": (
        lambda: mods.causal_lower_right(45, 20),
        lambda b, h, q, k: k - 20 <= q - 45,
        Sizes(Q=45, KV=20),
    ),
    "window 0": (lambda: mods.sliding_window(0), lambda b, h, q, k: q == k, Sizes()),
    "window 7": (lambda: mods.sliding_window(7), lambda b, h, q, k: k in range(q - 7, q + 1), TWO),
    "window beyond": (lambda: mods.sliding_window(1000), causal, Sizes()),
    "both sides": (
        lambda: mods.bidirectional_window(3, 5),
        lambda b, h, q, k: k in range(q - 3, q + 6),
        Sizes(),
    ),
    "both sides 0": (
        lambda: mods.bidirectional_window(0),
        lambda b, h, q, k: q == k,
        Sizes(),
    ),
    "even": (
        lambda: mods.bidirectional_window(4),
        lambda b, h, q, k: k in range(q - 4, q + 5),
        Sizes(Q=25, KV=40),
    ),
    "sinks": (
        lambda: mods.window_with_sinks(6, 3),
        lambda b, h, q, k: k in range(q - 6, q + 1) or (k < 3 and k <= q),
        Sizes(),
    ),
    "no sinks": (
        lambda: mods.window_with_sinks(6, 0),
        lambda b, h, q, k: k in range(q - 6, q + 1),
        Sizes(),
    ),
    "dilated": (
        lambda: mods.dilated_window(3, 4),
        lambda b, h, q, k: k in (q, q - 4, q - 8, q - 12),
        Sizes(),
    ),
    "dilated, both sides": (
        lambda: mods.dilated_window(1, 5, window_right=2),
        lambda b, h, q, k: k in (q - 5, q, q + 5, q + 10),
        Sizes(),
    ),
    "dilated window 0": (lambda: mods.dilated_window(0, 3), lambda b, h, q, k: q == k, Sizes()),
    "dilation 1": (
        lambda: mods.dilated_window(4, 1),
        lambda b, h, q, k: k in range(q - 4, q + 1),
        Sizes(),
    ),
    "strided": (
        lambda: mods.strided_sparse(6),
        lambda b, h, q, k: k in range(q - 6, q + 1) or k in range(q, -1, -6),
        Sizes(),
    ),
    "fixed": (
        lambda: mods.fixed_sparse(8, 2),
        lambda b, h, q, k: k <= q and (k >= q - q % 8 or k % 8 in (6, 7)),
        Sizes(),
    ),
    "fixed, no summary": (
        lambda: mods.fixed_sparse(8, 0),
        lambda b, h, q, k: q - q % 8 <= k <= q,
        Sizes(),
    ),
    "spatial": (
        lambda: mods.spatial_head(9, 1),
        lambda b, h, q, k: k // 9 in (q // 9 - 1, q // 9, q // 9 + 1),
        Sizes(Q=36, KV=36),
    ),
    "temporal": (
        lambda: mods.temporal_head(9),
        lambda b, h, q, k: k in range(q % 9, 36, 9),
        Sizes(Q=36, KV=36),
    ),
    "temporal, wide": (
        lambda: mods.temporal_head(9, 2),
        lambda b, h, q, k: any(k % 9 == q % 9 + d for d in (-2, -1, 0, 1, 2)),
        Sizes(Q=36, KV=36),
    ),
}


ON_KERNELS = (
    "causal",
    "lower right",
    "window 7",
    "both sides",
    "sinks",
    "dilated",
    "strided",
    "fixed",
    "spatial",
    "temporal, wide",
)


@pytest.mark.parametrize("name", CASES)
def test_mask(name: str) -> None:
    make, keeps, sizes = CASES[name]
    check_mask(make(), keeps, sizes)


def test_in_one_kernel() -> None:
    cases = [CASES[name] for name in ON_KERNELS]
    check_in_one_kernel([(make(), keeps) for make, keeps, _ in cases], Sizes(B=2))


def test_longformer() -> None:
    flags = torch.zeros(2, 40, dtype=torch.int64)
    flags[0, [0, 17]] = 1
    flags[1, 39] = 1
    listed = flags.tolist()

    def keeps(b, h, q, k):
        return listed[b][q] == 1 or listed[b][k] == 1 or k in range(q - 3, q + 4)

    check_mask(mods.longformer(3, flags), keeps, Sizes(B=2), *BOTH)
    check_mask(
        mods.longformer(2, flags[0].bool(), window_right=0),
        lambda b, h, q, k: bool(listed[0][q] or listed[0][k] or k in range(q - 2, q + 1)),
        Sizes(),
    )


def test_bigbird() -> None:
    """Window and global blocks where they belong; as many random blocks as asked, seeded."""
    sizes = Sizes(H=2, Q=150, KV=150)  # 10 blocks of 16, the last of 6 tokens

    def blocks(seed: int) -> torch.Tensor:
        mod = mods.bigbird(
            150, 16, num_random=2, num_window=3, num_global=1, num_heads=2, seed=seed
        )
        return mod(*(torch.arange(n)[:, None, None] for n in (1, 2)), *_block_grid(10, 16))

    table = blocks(0)
    for h in range(2):
        for q in range(1, 10):
            expected = {0, q - 1, q, q + 1} & set(range(10))
            seen = set(table[h, q].nonzero().flatten().tolist())
            assert expected <= seen
            assert len(seen - expected) == min(2, 10 - len(expected))
        assert table[h, 0].all()
    assert not torch.equal(table[0], table[1])
    assert torch.equal(blocks(0), table)
    assert not torch.equal(blocks(1), table)
    mod = mods.bigbird(150, 16, num_random=2, num_global=1, num_heads=2)
    listed = table.tolist()
    check_mask(mod, lambda b, h, q, k: listed[h][q // 16][k // 16], sizes)


def _block_grid(blocks: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(0, blocks * size, size)
    return at[:, None], at


def test_top_blocks() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 3, 3, 3, generator=generator)
    scores[:, :, 0, 1:] = -torch.inf  # a row with fewer than k to choose from
    scores[1, 1, 2] = -torch.inf  # and one with none
    listed = scores.tolist()

    def keeps(b, h, q, k):
        row = listed[b][h][q // 16]
        mine = row[k // 16]
        return mine > -torch.inf and sum(x > mine for x in row) < 2

    check_mask(mods.topk_blocks(scores, 2, 16), keeps, Sizes(B=2, H=3), *BOTH)
    check_mask(
        mods.topk_blocks(scores[:1, :1], 50, 16),
        lambda b, h, q, k: q >= 16 or k < 16,
        Sizes(H=2),
    )


def test_selected_blocks() -> None:
    chosen = torch.tensor([[0, -1, 0], [2, 1, 7], [-1, -1, -1]])  # 7 lies beyond the keys
    listed = chosen.tolist()
    check_mask(
        mods.selected_blocks(chosen, 40, 16),
        lambda b, h, q, k: k // 16 in listed[q // 16],
        Sizes(),
    )
    by_head = torch.stack([chosen, chosen.flip(0)]).int()
    heads = by_head.tolist()
    check_mask(
        mods.selected_blocks(by_head, 40, 16),
        lambda b, h, q, k: k // 16 in heads[h][q // 16],
        Sizes(H=2),
    )


def test_choosing_blocks_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*_: Any) -> None:
        raise AssertionError("asks for a value")

    scores, chosen = torch.randn(1, 2, 4, 4), torch.zeros(4, 2, dtype=torch.int64)
    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "nonzero", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    assert callable(mods.topk_blocks(scores, 2, 64))
    assert callable(mods.selected_blocks(chosen, 256, 64))
    with pytest.raises(AssertionError, match="asks for a value"):
        bool(scores[0, 0, 0, 0] > 0)
