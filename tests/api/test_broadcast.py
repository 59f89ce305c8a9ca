"""A mask built for one batch entry or head, by a mask_mod that tells them apart, is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from attnloom import BlockMask, and_masks, create_block_mask, flex_attention, mods
from attnloom.errors import ShapeError

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
