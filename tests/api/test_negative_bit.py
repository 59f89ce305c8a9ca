"""Torch's negative bit: `z.conj().imag` is a view whose memory holds the values with their signs
turned. Kernels read memory, so that such tensors are turned before they are launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnloom import BlockMask, create_block_mask, flex_attention
from attnloom.masking import build


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _negative(tensor: torch.Tensor) -> torch.Tensor:
    """The same values behind a negative bit, leaves of autograd as before."""
    view = torch._neg_view(tensor.detach().neg())
    assert view.is_neg()
    assert torch.equal(view, tensor)
    return view.requires_grad_(tensor.requires_grad)


def _inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [_draw(1, 2, 40 + n, 16).to(dtype)[:, :, :40].requires_grad_() for n in range(3)]


def _lookup(table: torch.Tensor) -> Any:
    return lambda score, b, h, q_idx, kv_idx: score + table[h, kv_idx]


def _values(leaves: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    *inputs, table = leaves
    out = flex_attention(*inputs, score_mod=_lookup(table))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("which", ["query", "key", "value", "captured", "dout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_negative_bit_was_ignored_by_kernels(which: str, dtype: torch.dtype) -> None:
    leaves = [*_inputs(dtype), _draw(2, 40).requires_grad_()]
    dout = _draw(1, 2, 40, 16).to(dtype)
    expected = _values(leaves, dout)
    place = ["query", "key", "value", "captured", "dout"].index(which)
    turned = [_negative(x) if n == place else x for n, x in enumerate([*leaves, dout])]
    for _ in range(4):  # a repeated call takes another way
        for mine, exact in zip(_values(turned[:4], turned[4]), expected, strict=True):
            torch.testing.assert_close(mine, exact, rtol=0, atol=0)


def test_an_imaginary_part_is_captured_with_its_sign() -> None:
    z = torch.view_as_complex(_draw(2, 40, 2))
    query, key, value = (x.detach() for x in _inputs())
    got = flex_attention(query, key, value, _lookup(z.conj().imag))
    assert torch.equal(got, flex_attention(query, key, value, _lookup(-z.imag)))


def test_a_negative_bit_in_the_gradient_of_lse() -> None:
    from attnloom import AuxRequest

    query, key, value = _inputs()
    weights = _draw(1, 2, 40)

    def grads(dlse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True))
        assert aux.lse is not None
        return torch.autograd.grad(aux.lse, [query, key], dlse)

    for mine, exact in zip(grads(_negative(weights)), grads(weights), strict=True):
        assert torch.equal(mine, exact)


def test_a_negative_bit_under_transforms() -> None:
    query, key, value = (x.detach() for x in _inputs())

    def loss(query: torch.Tensor) -> torch.Tensor:
        return flex_attention(query, key, value).square().sum()

    assert torch.equal(torch.func.grad(loss)(_negative(query)), torch.func.grad(loss)(query))


def test_a_negative_bit_in_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = _draw(40)

    def mask(limits: torch.Tensor) -> BlockMask:
        def below(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return limits[kv_idx] < limits[q_idx]

        return create_block_mask(below, None, None, 40, 40, BLOCK_SIZE=16)

    plain, turned = mask(limits), mask(_negative(limits))
    assert torch.equal(plain.lists().entries, turned.lists().entries)
    inputs = [x.detach() for x in _inputs()]
    expected = flex_attention(*inputs, block_mask=plain)
    for _ in range(3):
        assert torch.equal(flex_attention(*inputs, block_mask=turned), expected)

    signs = []

    def builder(bound: Any, *_: Any) -> None:
        signs.append([t.is_neg() for t in bound.tensors])

    monkeypatch.setitem(build._builders, "cpu", builder)
    monkeypatch.setattr("attnloom.masking.reuse.built", lambda *args: args[-1]())
    mask(_negative(limits))
    assert signs == [[False]]
