"""Higher derivatives and torch.func: each compared with another route to the same number."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from attnloom import AuxRequest, create_block_mask, flex_attention
from attnloom.api import token_map
from tests.api.mods import causal, late_start, normal, qkv, slope_bias
from tests.api.test_autograd import attend, slopes


def loss(q, k, v, slope, mask=None):
    out, lse = attend(q, k, v, slope, mask)
    return out.sin().sum() + lse.cos().sum()


@pytest.fixture
def point():
    return (*qkv(lengths=(3, 4), head_dim=2), slopes(False))


@pytest.fixture
def tangent(point):
    return tuple(normal(*x.shape, seed=9, dtype=x.dtype) for x in point)


@pytest.mark.parametrize("mask_mod", [None, causal])
def test_gradgradcheck(point, mask_mod):
    mask = mask_mod and create_block_mask(mask_mod, None, None, 3, 4, device="cpu")
    inputs = tuple(x.requires_grad_() for x in point)
    torch.autograd.gradgradcheck(lambda *x: attend(*x, mask), inputs)


def test_second_derivatives_of_rows_without_keys_are_finite():
    mask = create_block_mask(late_start, None, None, 5, 7, device="cpu")
    inputs = (*qkv(requires_grad=True), slopes())
    out, _ = attend(*inputs, mask)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
    assert all(g.isfinite().all() for g in second)
    assert (second[0][:, :, :3] == 0).all()
    assert (second[0][:, :, 3:] != 0).any()


def test_second_derivatives_do_not_depend_on_the_chunks(point, monkeypatch):
    mask = create_block_mask(causal, None, None, 3, 4, device="cpu")

    def penalty():
        inputs = tuple(x.clone().requires_grad_() for x in point)
        (dq,) = torch.autograd.grad(loss(*inputs, mask), inputs[0], create_graph=True)
        return torch.autograd.grad(dq.square().sum(), inputs)

    want = penalty()
    monkeypatch.setattr(token_map, "MAX_SCORES", 1)
    for a, b in zip(penalty(), want, strict=True):
        torch.testing.assert_close(a, b)


def test_forward_mode_gradcheck(point):
    inputs = tuple(x.requires_grad_() for x in point)
    torch.autograd.gradcheck(attend, inputs, check_forward_ad=True, check_backward_ad=False)


def test_dual_numbers(point, tangent):
    with forward_ad.dual_level():
        duals = (forward_ad.make_dual(x, t) for x, t in zip(point, tangent, strict=True))
        got = forward_ad.unpack_dual(loss(*duals)).tangent
        # No tangent anywhere: the fused path, inside a dual level as well.
        plain = forward_ad.unpack_dual(loss(*point)).tangent
    assert plain is None
    torch.testing.assert_close(got, jvp(loss, point, tangent)[1])


def test_third_derivative(point, tangent):
    inputs = tuple(x.requires_grad_() for x in point)

    def along(function):
        def directional(*x):
            grads = torch.autograd.grad(function(*x), x, create_graph=True)
            return sum((g * t).sum() for g, t in zip(grads, tangent, strict=True))

        return directional

    second = along(along(loss))
    torch.autograd.gradcheck(second, inputs, fast_mode=True)


def test_func_grad_and_vjp_match_autograd(point):
    inputs = tuple(x.clone().requires_grad_() for x in point)
    want = torch.autograd.grad(loss(*inputs), inputs)
    value, pull = vjp(loss, *point)
    for got in (grad(loss, (0, 1, 2, 3))(*point), pull(torch.ones_like(value))):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_jvp_matches_the_gradient(point, tangent):
    grads = grad(loss, (0, 1, 2, 3))(*point)
    want = sum((g * t).sum() for g, t in zip(grads, tangent, strict=True))
    torch.testing.assert_close(jvp(loss, point, tangent)[1], want)


def test_hessian_three_ways(point):
    _, k, v, slope = point

    def of_query(q):
        return loss(q, k, v, slope)

    want = jacrev(jacrev(of_query))(point[0])
    for function in (hessian(of_query), jacrev(jacfwd(of_query)), jacfwd(jacfwd(of_query))):
        torch.testing.assert_close(function(point[0]), want)


def test_vmap_over_queries_and_a_captured_tensor(point):
    q, k, v, slope = point
    queries, many = normal(3, *q.shape, dtype=q.dtype), normal(3, 4, dtype=q.dtype)
    got = vmap(attend, (0, None, None, 0))(queries, k, v, many)
    want = [attend(a, k, v, s) for a, s in zip(queries, many, strict=True)]
    for i in range(2):
        torch.testing.assert_close(got[i], torch.stack([w[i] for w in want]))
    assert slope.shape == many[0].shape


def test_vmap_other_dimension_and_nested(point):
    q, k, v, slope = point
    queries = normal(*q.shape, 2, 3, dtype=q.dtype)
    got = vmap(vmap(lambda x: attend(x, k, v, slope)[0], -1), -1)(queries)
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(got[i, j], attend(queries[..., j, i], k, v, slope)[0])


def test_per_sample_gradients(point):
    q, k, v, slope = point
    queries = normal(3, *q.shape, dtype=q.dtype)
    got = vmap(grad(loss, (0, 3)), (0, None, None, None))(queries, k, v, slope)
    for i in range(3):
        want = grad(loss, (0, 3))(queries[i], k, v, slope)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a[i], b)


def test_grad_through_vmap(point):
    q, k, v, slope = point
    queries = normal(3, *q.shape, dtype=q.dtype)

    def total(s):
        return vmap(loss, (0, None, None, None))(queries, k, v, s).sum()

    want = sum(grad(loss, 3)(queries[i], k, v, slope) for i in range(3))
    torch.testing.assert_close(grad(total)(slope), want)


def test_functional_call_of_a_module(point):
    q, k, v, slope = point

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))

        def forward(self, q, k, v):
            return flex_attention(q, k, v, slope_bias(self.slope), enable_gqa=True).sin().sum()

    layer = Layer()
    got = grad(lambda p: functional_call(layer, p, (q, k, v)))({"slope": slope})["slope"]
    inputs = slope.clone().requires_grad_()
    want = torch.autograd.grad(attend(q, k, v, inputs)[0].sin().sum(), inputs)[0]
    torch.testing.assert_close(got, want)


def test_a_gradient_penalty_trains(point):
    inputs = tuple(x.requires_grad_() for x in point)
    (dq,) = torch.autograd.grad(loss(*inputs), inputs[0], create_graph=True)
    (dq.norm() - 1).square().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


def test_auxiliary_outputs_under_transforms(point):
    q, k, v, _ = point

    def function(x):
        return flex_attention(x, k, v, enable_gqa=True, return_aux=AuxRequest(True, True))

    want = function(q)
    (out, aux), _ = jvp(function, (q,), (torch.ones_like(q),))
    mapped, mapped_aux = vmap(function)(q[None])
    for got in ((out, *aux), (mapped[0], *(x[0] for x in mapped_aux))):
        for a, b in zip(got, (want[0], *want[1]), strict=True):
            torch.testing.assert_close(a, b)
