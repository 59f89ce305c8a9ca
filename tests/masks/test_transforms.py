"""Masks that are made, cut and first used inside the transforms of torch.func.

Their lists were wrappers there, whose memory kernels cannot read, and which died with the
transform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, jvp, vjp, vmap

from attnloom import BlockMask, create_block_mask, flex_attention
from attnloom.errors import UnsupportedError
from tests.harness.agree import normal

S = 40
IDS = torch.arange(S) // 12


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def same(ids: torch.Tensor) -> Any:
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


def same_on_host(ids: torch.Tensor) -> Any:
    def mask_mod(b, h, q_idx, kv_idx):
        doubled = ids * 2
        return doubled[q_idx] == doubled[kv_idx]

    return mask_mod


def made(mask_mod: Any, q_len: int = S, kv_len: int = S, **named: Any) -> BlockMask:
    return create_block_mask(mask_mod, None, None, q_len, kv_len, BLOCK_SIZE=16, **named)


def from_blocks(ids: torch.Tensor) -> BlockMask:
    whole = made(same(ids))
    partial, full = whole.kv_num_blocks + 0, whole.full_kv_num_blocks
    listed = (partial, whole.kv_indices, full, whole.full_kv_indices)
    return BlockMask.from_kv_blocks(*listed, 16, same(ids), (S, S))


# How masks are made from document ids, which may be wrapped.
KINDS: dict[str, Callable[[torch.Tensor], BlockMask]] = {
    "causal": lambda ids: made(causal),
    "write order": lambda ids: made(same(ids), compute_dq_write_order=True),
    "documents": lambda ids: made(same(ids)),
    "host": lambda ids: made(same_on_host(ids)),
    "from_document_ids": lambda ids: BlockMask.from_document_ids(ids, BLOCK_SIZE=16),
    "mod in documents": lambda ids: BlockMask.from_document_ids(
        ids, mask_mod=same_on_host(ids), BLOCK_SIZE=16
    ),
    "from_cu_seqlens": lambda ids: BlockMask.from_cu_seqlens(torch.tensor([0, 15, S])),
    "from_dense": lambda ids: BlockMask.from_dense(ids[:, None] >= ids, BLOCK_SIZE=16),
    "from_key_ranges": lambda ids: BlockMask.from_key_ranges(ids * 12, ids * 12 + 12, S, 16),
    "from_block_bool": lambda ids: BlockMask.from_block_bool(
        torch.ones(3, 3).tril() > 0, None, 16, None, (S, S)
    ),
    "from_kv_blocks": from_blocks,
    "crop": lambda ids: made(causal, 2 * S, 2 * S).crop(S, S),
    "rows": lambda ids: made(causal, 2 * S, S).rows(5, 5 + S),
    "index": lambda ids: made(same(ids))[:, torch.tensor([0])],
    "to": lambda ids: made(same(ids)).to("cpu"),
}


def loss(x: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    return flex_attention(x, x, x, block_mask=mask).square().sum()


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda f, x: grad(f)(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.tensor(1.0))[0],
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda f, x: vmap(f)(torch.stack([x, 2 * x])),
    "vmap of grad": lambda f, x: vmap(grad(f))(torch.stack([x, 2 * x])),
    "grad of grad": lambda f, x: grad(lambda y: grad(f)(y).sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_masks_made_inside(kind: str, transform: str) -> None:
    x, make = normal(1, 1, S, 8), KINDS[kind]
    run = TRANSFORMS[transform]
    outside = make(IDS)
    outside.lists()
    want = run(lambda y: loss(y, outside), x)
    torch.testing.assert_close(run(lambda y: loss(y, make(IDS)), x), want)


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "grad of grad"])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_made_from_wrapped_tensors(kind: str, transform: str) -> None:
    x, make = normal(1, 1, S, 8), KINDS[kind]
    run = TRANSFORMS[transform]

    def inside(y: torch.Tensor) -> torch.Tensor:
        return loss(y, make(IDS + (y.flatten()[:S] * 0).long()))

    outside = make(IDS)
    want = run(lambda y: loss(y, outside), x)
    torch.testing.assert_close(run(inside, x), want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_outlives_the_transform(kind: str) -> None:
    """Made inside, used after; made outside, first used inside."""
    x, make, kept = normal(1, 1, S, 8), KINDS[kind], []

    def inside(y: torch.Tensor) -> torch.Tensor:
        kept.append(make(IDS))
        return loss(y, kept[0])

    grad(inside)(x)
    kept.append(make(IDS))
    grad(lambda y: loss(y, kept[1]))(x)
    for mask in kept:
        torch.testing.assert_close(loss(x, mask), loss(x, make(IDS)))
        assert mask.full_q_num_blocks is not None and str(mask.full_q_num_blocks + 1)
        assert repr(mask) == repr(kept[0])


@pytest.mark.parametrize("kind", KINDS)
def test_masks_passed_as_arguments(kind: str) -> None:
    """Which a transform wraps, leaf by leaf."""
    x, mask = normal(1, 1, S, 8), KINDS[kind](IDS)
    want = grad(lambda y: loss(y, mask))(x)
    torch.testing.assert_close(grad(loss)(x, mask), want)


def test_gradients_of_a_module_that_makes_its_mask() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(8, 8)
            self.register_buffer("ids", IDS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return loss(self.project(x), made(same_on_host(self.ids)))

    model, x = Model(), normal(1, 1, S, 8)
    state = dict(model.named_parameters()), dict(model.named_buffers())
    model(x).backward()
    for found in (
        grad(lambda own: functional_call(model, (own, state[1]), (x,)))(state[0]),
        grad(lambda own, buffers: functional_call(model, (own, buffers), (x,)))(*state),
    ):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("kind", ["documents", "from_document_ids", "from_dense"])
def test_a_mask_for_each_entry_of_vmap_is_refused(kind: str) -> None:
    x = normal(1, 1, S, 8)
    with pytest.raises(UnsupportedError, match=r"is mapped by torch\.vmap"):
        vmap(lambda ids: loss(x, KINDS[kind](ids)))(torch.stack([IDS, IDS]))
