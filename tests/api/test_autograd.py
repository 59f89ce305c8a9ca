"""First derivatives in reverse mode, checked against finite differences in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attnloom import AuxRequest, create_block_mask, flex_attention
from tests.api.mods import causal, late_start, qkv, slope_bias

LSE = AuxRequest(lse=True)


def slopes(requires_grad: bool = True) -> torch.Tensor:
    return torch.linspace(0.1, 0.7, 4, dtype=torch.float64).requires_grad_(requires_grad)


def attend(q, k, v, slope, mask=None, **options):
    """out and lse of a call with a learned slope."""
    out, aux = flex_attention(
        q, k, v, slope_bias(slope), mask, enable_gqa=True, return_aux=LSE, kernel_options=options
    )
    return out, aux.lse


@pytest.mark.parametrize("backend", ["auto", "tiled"])
@pytest.mark.parametrize("mask_mod", [None, causal])
def test_gradcheck(backend, mask_mod):
    mask = mask_mod and create_block_mask(mask_mod, None, None, 3, 4, device="cpu")
    inputs = (*qkv(lengths=(3, 4), head_dim=3, requires_grad=True), slopes())
    torch.autograd.gradcheck(lambda *x: attend(*x, mask, backend=backend), inputs)


def test_rows_without_keys_give_no_gradient():
    mask = create_block_mask(late_start, None, None, 5, 7, device="cpu")
    q, k, v = qkv(requires_grad=True)
    slope = slopes()
    out, lse = attend(q, k, v, slope, mask)
    finite = torch.where(lse.isinf(), 0.0, lse)
    grads = torch.autograd.grad(out.square().sum() + finite.sum(), (q, k, v, slope))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, :3] == 0).all()
    assert (grads[0][:, :, 3:] != 0).any()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "slope"])
def test_one_input_alone_may_require_grad(wanted):
    inputs = dict(zip("qkv", qkv(), strict=True)) | {"slope": slopes(False)}
    every = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    want = torch.autograd.grad(attend(**every)[0].square().sum(), every[wanted])[0]
    inputs[wanted].requires_grad_()
    out, lse = attend(**inputs)
    assert out.requires_grad
    assert lse.requires_grad
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), inputs[wanted])[0], want)


@pytest.mark.parametrize("output", [0, 1])
def test_each_output_alone(output):
    inputs = (*qkv(lengths=(3, 4), head_dim=3, requires_grad=True), slopes())
    torch.autograd.gradcheck(lambda *x: attend(*x)[output], inputs)


def test_a_mask_gives_no_gradient_to_what_it_captures():
    limit = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)

    def below(b, h, q_idx, kv_idx):
        return kv_idx <= limit[q_idx]

    mask = create_block_mask(below, None, None, 5, 7, device="cpu")
    assert not flex_attention(*qkv(), block_mask=mask, enable_gqa=True).requires_grad


def test_max_scores_are_not_differentiable():
    q, k, v = qkv(key_heads=4, requires_grad=True)
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
    assert out.requires_grad
    assert aux.lse.requires_grad
    assert not aux.max_scores.requires_grad


def test_no_graph_without_grad_mode():
    inputs = (*qkv(requires_grad=True), slopes())
    want = attend(*inputs)[0].detach()
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            out = attend(*inputs)[0]
        assert not out.requires_grad
        torch.testing.assert_close(out, want)


def test_backward_twice():
    inputs = (*qkv(requires_grad=True), slopes())
    loss = attend(*inputs)[0].square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


def test_a_capture_changed_before_backward_is_noticed():
    slope = slopes(False)
    q, k, v = qkv(requires_grad=True)
    out, _ = attend(q, k, v, slope)
    slope += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    inputs = (*qkv(requires_grad=True), slopes())
    want = torch.autograd.grad(attend(*inputs)[0].square().sum(), inputs)
    for x in inputs:
        x.grad = None
    out, _ = checkpoint(attend, *inputs, use_reentrant=reentrant)
    out.square().sum().backward()
    for x, grad in zip(inputs, want, strict=True):
        torch.testing.assert_close(x.grad, grad)


def test_only_inputs_out_and_row_statistics_are_saved():
    q, k, v = qkv(requires_grad=True)
    slope = slopes()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, lse = attend(q, k, v, slope)
    pointers = {x.data_ptr() for x in saved}
    known = {x.data_ptr() for x in (q, k, v, slope, out, lse)}
    assert known < pointers
    (row_state,) = (x for x in saved if x.data_ptr() not in known)
    assert row_state.shape == (2, *lse.shape)


def test_shared_key_and_value_get_the_sum_over_the_batch():
    q, _, _ = qkv()
    _, k, v = (x[:1].clone().requires_grad_() for x in qkv())
    got = torch.autograd.grad(flex_attention(q, k, v, enable_gqa=True).square().sum(), (k, v))
    wide = [x.detach().expand(2, -1, -1, -1).clone().requires_grad_() for x in (k, v)]
    want = torch.autograd.grad(flex_attention(q, *wide, enable_gqa=True).square().sum(), wide)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.sum(0, keepdim=True))


def test_gradients_are_bitwise_equal_from_run_to_run():
    inputs = (*qkv(lengths=(40, 70), dtype=torch.float32, requires_grad=True), slopes().float())
    runs = [
        torch.autograd.grad(attend(*inputs, deterministic=True)[0].square().sum(), inputs[:3])
        for _ in range(2)
    ]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
