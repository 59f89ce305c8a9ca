"""What must not compile again: new closures, sizes, lengths, batches, numbers.

The rule: a variation compiles no more than one kernel more, ever. Here it compiles none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnloom
from tests.harness.agree import agrees, normal, qkv

Call = Callable[[int], Any]


def kernels_after_the_first(call: Call, repeats: int = 5) -> int:
    """Kernels loaded or compiled by call(1) .. call(repeats) once call(0) has run."""
    call(0)
    before = attnloom.compile_stats()
    for n in range(1, repeats + 1):
        call(n)
    after = attnloom.compile_stats()
    return after.kernels_loaded - before.kernels_loaded


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def attend(mask_mod=None, score_mod=None, B=2, H=2, S=100, keys=None, **options) -> None:
    """Forward and backward, with a mask over batches."""
    q, k, v = qkv(B, H, S, 16, keys=keys)
    mask = None
    if mask_mod is not None:
        mask = attnloom.create_block_mask(mask_mod, B, None, S, keys or S)
    attnloom.flex_attention(q, k, v, score_mod, mask, **options).sum().backward()


def test_the_counter_sees_a_new_structure() -> None:
    """Guard of this file: a mod of another structure does load kernels."""
    shift = [lambda s, b, h, i, j: s + i * 0.5, lambda s, b, h, i, j: s * torch.cos(i - j + 0.75)]
    assert kernels_after_the_first(lambda n: attend(score_mod=shift[n % 2]), 1) >= 1


def test_case_082_batches_and_lengths() -> None:
    """Packed documents with changing batch and length: one kernel for all."""

    def call(n: int) -> None:
        B, S = 1 + n, 50 + 37 * n
        ids = torch.arange(S).expand(B, S) // (10 + n)
        attend(lambda b, h, i, j: ids[b, i] == ids[b, j], B=B, S=S)

    assert kernels_after_the_first(call) == 0


def test_case_083_mask_that_depends_on_the_batch() -> None:
    """A mask that reads b recompiled at every new batch size."""

    def call(n: int) -> None:
        lengths = torch.full((1 + n,), 40 + n)
        attend(lambda b, h, i, j: j < lengths[b], B=1 + n)

    assert kernels_after_the_first(call) == 0


def test_case_084_lengths_of_a_window_mask() -> None:
    """The builder recompiled at every new length."""
    assert kernels_after_the_first(
        lambda n: attend(lambda b, h, i, j: (i >= j) & (i - j < 16), S=33 + 50 * n)
    ) == 0  # fmt: skip


def test_case_085_odd_strides() -> None:
    """Strides of transposed views, and other lengths, were compiled in."""

    def call(n: int) -> None:
        S = 64 + 13 * n
        x = normal(2, S, 3, 2, 16 + n, seed=n)[..., :16].requires_grad_()
        q, k, v = x.permute(2, 0, 3, 1, 4)
        mask = attnloom.create_block_mask(causal, None, None, S, S)
        attnloom.flex_attention(q, k, v, block_mask=mask).sum().backward()

    assert kernels_after_the_first(call) == 0


def test_case_087_cache_lengths_of_decode() -> None:
    """Generation steps with ever longer caches exhausted the compile cache after 79."""

    def call(n: int) -> None:
        keys = 20 + n
        q, k, v = (x.detach() for x in qkv(1, 2, 1, 16, keys=keys))
        mask = attnloom.create_block_mask(causal, None, None, 200, 200).rows(keys - 1, keys)
        attnloom.flex_attention(q, k, v, block_mask=mask.crop(1, keys))

    call(0)
    assert kernels_after_the_first(call, 80) <= 1


def test_case_088_sizes_of_captured_tensors() -> None:
    """A captured table that shrinks recompiled."""

    def call(n: int) -> None:
        table = normal(2, 250 - 10 * n).requires_grad_()
        attend(score_mod=lambda s, b, h, i, j: s + table[h, i - j + 100])

    assert kernels_after_the_first(call) == 0


@pytest.mark.parametrize(
    "values", [[4, 7, 0, 1, -3, 90], [0.5, 2.0, 1.0, 0.0, -1.5, 1e-3]], ids=str
)
def test_case_089_captured_numbers(values: list[int | float]) -> None:
    """Python numbers in a closure recompiled, or were refused."""

    def call(n: int) -> None:
        value = values[n]
        attend(score_mod=lambda s, b, h, i, j: s * value + (i - j) * value)

    assert kernels_after_the_first(call) == 0
    for value in values:
        q, k, v = qkv(1, 2, 40, 16)
        agrees(q, k, v, lambda s, b, h, i, j: s * value + (i - j) * value * 0.125)


def test_case_090_mods_redefined_for_every_layer() -> None:
    """The same lambda, made again: same shapes, same mask, recompiled."""

    def call(n: int) -> None:
        attend(lambda b, h, i, j: i >= j, lambda s, b, h, i, j: 2 * torch.tanh(s / 2))

    assert kernels_after_the_first(call) == 0


def test_case_091_masks_recreated_at_new_lengths() -> None:
    """Length checks pinned the first length."""
    assert kernels_after_the_first(lambda n: attend(causal, S=128 * (n + 1))) == 0


def test_scale_heads_and_groups_do_not_compile() -> None:
    def call(n: int) -> None:
        q, _, _ = qkv(1, 2 * (n + 1), 70, 16)
        _, k, v = qkv(1, n + 1, 70, 16)
        attnloom.flex_attention(q, k, v, scale=0.1 * (n + 1), enable_gqa=True).sum().backward()

    assert kernels_after_the_first(call) == 0


def test_block_sizes_compile_at_most_once_more() -> None:
    sizes = [128, 16, 32, 64, 256, 1024]

    def call(n: int) -> None:
        q, k, v = qkv(1, 1, 300, 16)
        mask = attnloom.create_block_mask(causal, None, None, 300, 300, BLOCK_SIZE=sizes[n])
        attnloom.flex_attention(q, k, v, block_mask=mask).sum().backward()

    assert kernels_after_the_first(call) <= 2  # one forward, one backward


def test_a_repeated_call_does_not_trace() -> None:
    slope = normal(2)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - slope[h] * (q_idx - kv_idx)

    attend(causal, score_mod)
    before = attnloom.compile_stats()
    for _ in range(3):
        attend(causal, score_mod)
    assert attnloom.compile_stats() == before
