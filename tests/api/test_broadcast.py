"""A mask built for one batch entry or head, by a mask_mod that tells them apart, is refused."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from attnloom import BlockMask, and_masks, create_block_mask, flex_attention, mods
from attnloom.errors import OptionError, ShapeError

PREFIX = mods.prefix_lm([2, 90])
HEADS = mods.per_head(mods.sliding_window(3), mods.causal_mask)
X = torch.randn(2, 2, 100, 8)


def _built(mod: Any, B: int | None = None, H: int | None = None) -> BlockMask:
    return create_block_mask(mod, B, H, 100, 100, BLOCK_SIZE=16)


@pytest.mark.parametrize("backend", ["auto", "reference", "tiled"])
@pytest.mark.parametrize(
    ("mod", "text"),
    [(PREFIX, "depends on b.*B=2, H=1, Q_LEN=100"), (HEADS, "depends on h.*B=1, H=2, Q_LEN=100")],
)
def test_every_backend_refuses(mod: Any, text: str, backend: str) -> None:
    with pytest.raises(ShapeError, match=text):
        flex_attention(X, X, X, block_mask=_built(mod), kernel_options={"backend": backend})  # type: ignore[arg-type]


CU, IDS = torch.tensor([0, 48, 100]), (torch.arange(100) >= 48).int()
PACKED: dict[str, tuple[Callable[..., BlockMask], Any]] = {
    "cu_seqlens by head": (functools.partial(BlockMask.from_cu_seqlens, CU), HEADS),
    "ids by head": (functools.partial(BlockMask.from_document_ids, IDS), HEADS),
    "scattered ids by head": (functools.partial(BlockMask.from_document_ids, IDS % 2), HEADS),
    "ids by batch entry": (functools.partial(BlockMask.from_document_ids, IDS), PREFIX),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_of_one_head_for_several(name: str) -> None:
    """Every head got the tiles of the first, without a word."""
    make, mod = PACKED[name]
    mask = make(mask_mod=mod, BLOCK_SIZE=16)
    text = "depends on b" if mod is PREFIX else "give a constructor of BlockMask H=2; what"
    for part in (mask, mask.rows(0, 100), mask.crop(100, 100)):
        with pytest.raises(ShapeError, match=text):
            flex_attention(X, X, X, block_mask=part)


@pytest.mark.parametrize("name", ["cu_seqlens by head", "ids by head"])
def test_packed_documents_by_head(name: str) -> None:
    make, _ = PACKED[name]

    def inside(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = IDS[q_idx] == IDS[kv_idx]
        return same & HEADS(b, h, q_idx - 48 * IDS[q_idx], kv_idx - 48 * IDS[kv_idx])

    mask = make(mask_mod=HEADS, H=2, BLOCK_SIZE=16)
    assert mask.shape == (1, 2, 100, 100)
    wanted = create_block_mask(inside, None, 2, 100, 100, BLOCK_SIZE=16)
    assert torch.equal(mask.to_mask(), wanted.to_mask())
    torch.testing.assert_close(
        flex_attention(X, X, X, block_mask=mask), flex_attention(X, X, X, block_mask=wanted)
    )


@pytest.mark.parametrize("H", [-1, "2", True])
def test_heads_of_a_constructor(H: Any) -> None:
    with pytest.raises((ShapeError, OptionError), match="H is"):
        BlockMask.from_cu_seqlens(CU, mask_mod=HEADS, H=H)


DERIVED: dict[str, Callable[[BlockMask], Any]] = {
    "rows": lambda mask: mask.rows(0, 100),
    "crop": lambda mask: mask.crop(100, 100),
    "moved": lambda mask: mask.to("cpu"),
    "pickled": lambda mask: pickle.loads(pickle.dumps(mask)),
    "pytree": lambda mask: pytree.tree_map(lambda x: x, mask),
    "joined": lambda mask: _built(and_masks(mask.mask_mod, mods.causal_mask)),
    "decode": lambda mask: mask.for_decode(torch.tensor([100, 100])),
}


@pytest.mark.parametrize("name", DERIVED)
def test_masks_made_from_it_are_refused(name: str) -> None:
    with pytest.raises(ShapeError, match="depends on b"):
        flex_attention(X, X, X, block_mask=DERIVED[name](_built(PREFIX)))


def test_what_is_no_mixture_is_taken() -> None:
    for mask in (
        _built(PREFIX, 2),
        _built(PREFIX, 2)[1],  # one entry, chosen for all
        _built(mods.documents(torch.zeros(1, 100, dtype=torch.int64))),
        _built(lambda b, h, q, kv: (q >= kv) & (b * 0 == 0)),
    ):
        flex_attention(X, X, X, block_mask=mask)
    flex_attention(X[:1], X[:1], X[:1], block_mask=_built(PREFIX))


def test_lists_of_the_callers_own_are_taken() -> None:
    every = torch.arange(7).expand(1, 1, 7, 7)
    mask = BlockMask.from_kv_blocks(
        torch.full((1, 1, 7), 7), every, BLOCK_SIZE=16, mask_mod=PREFIX, seq_lengths=(100, 100)
    )
    out = flex_attention(X, X, X, block_mask=mask)
    torch.testing.assert_close(out, flex_attention(X, X, X, block_mask=_built(PREFIX, 2)))
