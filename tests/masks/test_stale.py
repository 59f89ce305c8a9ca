"""A mask whose mask_mod is no longer what its lists were made from: other tensors, other numbers.

Such a mask followed neither the old values nor the new ones, without a word.
"""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import attnloom
from attnloom.errors import ModError
from tests.harness.agree import qkv

S = 90
STALE = "is not what it was when its BlockMask was built: "
OTHER = "is another tensor with other values"
IDS = torch.arange(S) // 20
WINDOW = 30
CALLS = [1, 4]  # before the change: the ordinary way, and that of repeated calls


def build(mask_mod: Any) -> attnloom.BlockMask:
    return attnloom.create_block_mask(mask_mod, None, None, S, S, BLOCK_SIZE=16)


def attend(mask: attnloom.BlockMask, calls: int = 1) -> torch.Tensor:
    q, k, v = qkv(1, 1, S, 16)
    q, k, v = q[:, :, : mask.shape[-2]], k[:, :, : mask.shape[-1]], v[:, :, : mask.shape[-1]]
    for _ in range(calls):
        out = attnloom.flex_attention(q, k, v, block_mask=mask)
    return out


def by_globals(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < WINDOW) & (IDS[q_idx] == IDS[kv_idx])


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(S) // 20)
        self.window = 30
        self.tables = {"ids": torch.arange(S) // 20, "window": 30}
        self.causal = True

    def by_attributes(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < self.window) & (self.ids[q_idx] == self.ids[kv_idx])

    def by_dict(self, b, h, q_idx, kv_idx):
        ids = self.tables["ids"]
        return (q_idx - kv_idx < self.tables["window"]) & (ids[q_idx] == ids[kv_idx])

    def by_flag(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx if self.causal else q_idx <= kv_idx

    def on_host(self, b, h, q_idx, kv_idx):
        ids = self.ids // 2
        return ids[q_idx] == ids[kv_idx]


CHANGES: dict[str, tuple[str, Any, str]] = {
    "a buffer": ("by_attributes", lambda x: setattr(x, "ids", torch.arange(S) // 7), OTHER),
    "a longer buffer": ("by_attributes", lambda x: setattr(x, "ids", torch.arange(99)), OTHER),
    "a number": ("by_attributes", lambda x: setattr(x, "window", 5), "'self.window' was 30"),
    "an entry": ("by_dict", lambda x: x.tables.update(ids=torch.arange(S)), OTHER),
    "a number entry": ("by_dict", lambda x: x.tables.update(window=5), "was 30 and is 5 now"),
    "a flag": ("by_flag", lambda x: setattr(x, "causal", False), "it computes something else"),
    "an input of host code": ("on_host", lambda x: setattr(x, "ids", torch.arange(S)), OTHER),
    "a dtype": ("by_attributes", lambda x: setattr(x, "ids", x.ids.int()), "something else"),
}


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", CHANGES)
def test_an_object_that_holds_something_else(name: str, calls: int) -> None:
    method, change, text = CHANGES[name]
    layer = Layer()
    mask = build(getattr(layer, method))
    attend(mask, calls)
    change(layer)
    for _ in range(2):
        with pytest.raises(ModError, match=STALE + ".*" + text):
            attend(mask)
    attend(build(getattr(layer, method)), calls)


@pytest.mark.parametrize("calls", CALLS)
def test_a_global_that_is_assigned(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    mask = build(by_globals)
    want = attend(mask, calls)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "IDS", torch.arange(S) // 9)
        with pytest.raises(ModError, match=f"'IDS', now of shape .90., {OTHER}"):
            attend(mask)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "WINDOW", 7)
        with pytest.raises(ModError, match="'WINDOW' was 30 and is 7 now"):
            attend(mask)
    assert torch.equal(attend(mask), want)


def test_closures_of_a_loop_see_its_last_value() -> None:
    masks = [build(lambda b, h, q, kv: q - kv < width) for width in (10, 20, 40)]
    attend(masks[2])
    with pytest.raises(ModError, match="'width' was 10 and is 40 now"):
        attend(masks[0])
    bound = [build(lambda b, h, q, kv, width=width: q - kv < width) for width in (10, 20, 40)]
    for mask in bound:
        attend(mask)


@pytest.mark.parametrize("calls", CALLS)
def test_equal_values_are_the_same_mask(calls: int) -> None:
    """Another tensor with equal values is taken, and watched from then on."""
    layer = Layer()
    mask = build(layer.by_attributes)
    want = attend(mask, calls)
    layer.ids = layer.ids.clone()
    assert torch.equal(attend(mask, calls), want)
    layer.ids[3] = 5
    with pytest.raises(ModError, match="was changed in place"):
        attend(mask)


def test_nan_is_equal_to_itself() -> None:
    layer = Layer()
    layer.ids = torch.full((S,), float("nan"))
    mask = build(layer.by_attributes)
    layer.ids = layer.ids.clone()
    attend(mask)
    layer.ids = torch.zeros(S)
    with pytest.raises(ModError, match=OTHER):
        attend(mask)


PARTS: dict[str, Any] = {
    "rows": lambda mask: mask.rows(10, 40),
    "rows of rows": lambda mask: mask.rows(10, 80).rows(5, 9),
    "crop": lambda mask: mask.crop(50, 60),
    "index": lambda mask: mask[0, 0],
    "tiles": lambda mask: mask[:, :, torch.tensor([1, 3])],
    "same device": lambda mask: mask.to("cpu"),
    "part moved": lambda mask: mask.rows(10, 40).to("cpu"),
}


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", PARTS)
def test_parts_look_at_what_the_whole_was_built_from(name: str, calls: int) -> None:
    layer = Layer()
    part = PARTS[name](build(layer.by_attributes))
    want = attend(part, calls)
    layer.window = 5
    with pytest.raises(ModError, match="was 30 and is 5 now"):
        attend(part)
    layer.window, layer.ids = 30, layer.ids.clone()
    assert torch.equal(attend(part, calls), want)
    layer.ids = torch.arange(S)
    with pytest.raises(ModError, match=OTHER):
        attend(part)


def test_a_stale_mask_does_not_travel() -> None:
    layer = Layer()
    mask = build(layer.by_attributes)
    there = pickle.loads(pickle.dumps(mask))
    layer.window = 5
    for carry in (pickle.dumps, lambda mask: mask.to("cpu")):
        with pytest.raises(ModError, match=STALE):
            carry(mask)
    attend(there)
    there.mask_mod.__self__.window = 6
    with pytest.raises(ModError, match="was 30 and is 6 now"):
        attend(there)


def test_a_mod_given_on_purpose_is_not_compared() -> None:
    ids = torch.arange(S) // 20

    def shifted(by: int) -> Any:
        return lambda b, h, q_idx, kv_idx: ids[q_idx] + by >= ids[kv_idx]

    mask = build(shifted(0))
    mask.mask_mod = shifted(1)
    attend(mask)
    attend(mask.rows(3, 20))
    mask.mask_mod = functools.partial(mask.mask_mod)
    ids = torch.arange(S)
    attend(mask)
    attend(mask.rows(3, 20))


@pytest.mark.parametrize("make", ["from_kv_blocks", "from_block_bool"])
def test_lists_that_the_caller_chose_are_not_compared(make: str) -> None:
    layer = Layer()
    mod = layer.by_attributes
    if make == "from_block_bool":
        mask = attnloom.BlockMask.from_block_bool(torch.ones(3, 3) > 0, None, 32, mod, (S, S))
    else:
        blocks = build(mod)
        mask = attnloom.BlockMask.from_kv_blocks(
            blocks.kv_num_blocks, blocks.kv_indices, None, None, 16, mod, (S, S)
        )
    attend(mask)
    layer.window = 5
    attend(mask)


def test_a_mod_inside_documents() -> None:
    layer = Layer()
    cu = torch.tensor([0, 40, S])
    for mask in (
        attnloom.BlockMask.from_cu_seqlens(cu, mask_mod=layer.by_flag, BLOCK_SIZE=16),
        attnloom.BlockMask.from_document_ids(IDS, mask_mod=layer.by_flag, BLOCK_SIZE=16),
    ):
        attend(mask)
        layer.causal = False
        with pytest.raises(ModError, match=STALE):
            attend(mask)
        layer.causal = True


def test_lists_and_values_agree_after_every_refusal() -> None:
    """What is not refused is exactly the mask of the dense oracle."""
    layer = Layer()
    q, k, v = qkv(1, 1, S, 16)
    for ids in (torch.arange(S) // 20, torch.arange(S) // 11):
        layer.ids = ids
        mask = build(layer.by_attributes)
        dense = attnloom.create_mask(layer.by_attributes, None, None, S, S)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense)
        torch.testing.assert_close(attend(mask, 4), want, rtol=1e-4, atol=1e-5)


def test_a_tensor_that_wants_a_gradient_is_pointed_out_once() -> None:
    """A learned window gets no gradient from a mask, which nothing said."""
    width = torch.tensor(20.0, requires_grad=True)
    mask = build(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width)
    with torch.no_grad(), _no_warning():
        attend(mask)
    with pytest.warns(UserWarning, match=r"captures 'width' of shape \[\], which requires grad"):
        attend(mask)
    with _no_warning():
        attend(mask)
    detached = width.detach()
    with _no_warning():
        attend(build(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < detached))


@contextmanager
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
