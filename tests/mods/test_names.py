"""Messages speak of mods and captured tensors by the names that their author wrote."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnloom import BlockMask, create_block_mask, explain, flex_attention, mods
from attnloom.errors import AttnloomError, ModError, ShapeError

LONGS = lambda *values: torch.tensor(values, dtype=torch.int64)
X = torch.zeros(2, 2, 20, 8)


def ending(lengths, b, h, q_idx, kv_idx):
    return kv_idx < lengths[b]


def biased(table, score, b, h, q_idx, kv_idx):
    return score + table[q_idx]


def changed(make: Callable[[torch.Tensor], BlockMask], given: torch.Tensor) -> None:
    mask = make(given)
    given.fill_(1)
    flex_attention(X, X, X, block_mask=mask)


def build(mod: Any) -> BlockMask:
    return create_block_mask(mod, 2, None, 20, 20)


ERRORS: dict[str, tuple[Callable[[], Any], type[AttnloomError], str]] = {
    "a factory's tensor": (
        lambda: changed(lambda t: build(mods.right_padding(t)), LONGS(3, 4)),
        ModError,
        "'lengths' of shape [2], which mask_mod 'right_padding.mask_mod' captures",
    ),
    "a tensor of a factory in a factory": (
        lambda: changed(lambda t: build(mods.not_mask(mods.prefix_lm(t))), LONGS(3, 4)),
        ModError,
        "'prefix_length' of shape [2], which mask_mod 'not_mask.mask' captures",
    ),
    "a part of a mask": (
        lambda: changed(
            lambda t: BlockMask._derive(build(functools.partial(ending, t)), *_rows(t)), LONGS(3, 4)
        ),
        ModError,
        "'lengths' of shape [2], which mask_mod 'ending' captures",
    ),
    "a dense mask": (
        lambda: changed(BlockMask.from_dense, torch.zeros(20, 20, dtype=torch.bool)),
        ModError,
        "'mask' of shape [20, 20], which mask_mod 'BlockMask.from_dense' captures",
    ),
    "a partial, out of range": (
        lambda: flex_attention(
            X, X, X, functools.partial(biased, torch.zeros(10)),
            kernel_options={"debug_bounds": True},
        ),
        ShapeError,
        "mod 'biased' indexes captured tensor 'table' of shape [10]",
    ),
    "a nested mod, out of range": (
        lambda: flex_attention(
            X, X, X, mods.compose(functools.partial(biased, torch.zeros(10))),
            kernel_options={"debug_bounds": True},
        ),
        ShapeError,
        "mod 'compose.composed' indexes captured tensor 'table' of shape [10]",
    ),
    "a partial that tells entries apart": (
        lambda: flex_attention(
            X, X, X, block_mask=create_block_mask(
                functools.partial(ending, LONGS(3, 4)), None, None, 20, 20
            ),
        ),
        ShapeError,
        "mask_mod 'ending' depends on b",
    ),
    "the wrong number of arguments": (
        lambda: create_block_mask(functools.partial(ending), None, None, 20, 20),
        ModError,
        "'ending' takes 5 arguments",
    ),
    "a partial of another kind": (
        lambda: mods.compose(functools.partial(ending, LONGS(3, 4))),
        ModError,
        "argument 0 is 'ending', a mask_mod",
    ),
}  # fmt: skip


def _rows(lengths: torch.Tensor) -> tuple[Any, ...]:
    part = build(functools.partial(ending, lengths)).rows(0, 20)
    return part.lists(), part.mask_mod, (2, 1)


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, error, text = ERRORS[name]
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


# mask_mod -> the name it is known by, and the captured tensors that explain says it reads
READS: dict[str, tuple[Any, str, list[str]]] = {
    "per_head": (
        mods.per_head(mods.causal_mask, mods.sliding_window(2)),
        "per_head.mask_mod",
        ["heads"],
    ),
    "key_padding": (
        mods.key_padding(torch.ones(20, dtype=torch.bool)),
        "key_padding.mask_mod",
        ["attention_mask"],
    ),
    "longformer": (mods.longformer(2, LONGS(*[0] * 20)), "longformer.mask_mod", ["is_global"]),
    "offset": (mods.offset(mods.causal_mask, LONGS(3, 4)), "offset", ["q_offset"]),
    "places": (
        mods.logical_to_physical(mods.causal_mask, torch.arange(20)),
        "logical_to_physical.mask_mod",
        ["q_positions"],
    ),
    "documents": (
        mods.documents(LONGS(0, 1), LONGS(*[0, 1] * 10)),
        "documents",
        ["ids_q", "ids_kv"],
    ),
    "blocks": (mods.bigbird(20, 16), "bigbird", ["live"]),
    "bits": (
        mods.token_tree_from_bits(LONGS(1, 3)[:, None], LONGS(4)),
        "token_tree_from_bits.mask_mod",
        ["prefix_length", "bits", "power"],
    ),
}


@pytest.mark.parametrize("name", READS)
def test_explain(name: str) -> None:
    mod, known, reads = READS[name]
    (traced,) = explain(mask_mod=mod, q_len=2, kv_len=20, measure=False).mods
    assert traced.name == known
    assert [c.name for c in traced.captures] == reads


def test_a_mask_is_shown_by_the_name_of_its_mod() -> None:
    part = build(functools.partial(ending, LONGS(3, 4)))[1].rows(3, 9)
    assert "mask_mod=ending\n" in repr(part)
    assert "mask_mod=BlockMask.from_cu_seqlens\n" in repr(BlockMask.from_cu_seqlens(LONGS(0, 4)))
    packed = BlockMask.from_cu_seqlens(LONGS(0, 4), mask_mod=mods.causal_mask)
    assert "mask_mod=causal_mask\n" in repr(packed)
