"""What the CPU forward keeps of each row for its backward, and what that is worth.

float32 of lse is as coarse as a float of its size; the row's largest score and sum of exponentials
are not. Operators and transforms hand on lse alone, so that the backward works with either.
"""

from __future__ import annotations

import pytest
import torch

from attnloom.backends.cpu.launch import CpuBackend
from attnloom.backends.registry import AttentionCall, Gradients
from attnloom.plan.problem import KernelOptions


def inputs(factor: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 200, 32, generator=generator) for _ in range(4)]
    return [x.to(dtype) * c for x, c in zip(tensors, (factor, factor, factor, 1), strict=True)]


SCALE = 0.3  # no power of two, so that a score is a rounded product


def call_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **fields: object) -> AttentionCall:
    return AttentionCall(q, k, v, None, None, None, SCALE, KernelOptions(), **fields)  # type: ignore[arg-type]


def gradients(tensors: list[torch.Tensor], *, with_state: bool) -> Gradients:
    q, k, v, dout = tensors
    backend = CpuBackend()
    found = backend.forward(call_of(q, k, v, for_backward=with_state), False)
    assert (found.row_state is not None) == with_state
    call = call_of(q, k, v, row_state=found.row_state)
    return backend.backward(call, found.out, found.lse, dout, None)


def errors(found: Gradients, tensors: list[torch.Tensor]) -> list[float]:
    q, k, v, dout = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = (leaves[0] @ leaves[1].mT * SCALE).softmax(-1) @ leaves[2]
    expected = torch.autograd.grad(out, leaves, dout)
    pairs = zip((found.dq, found.dk, found.dv), expected, strict=True)
    return [float((x.double() - y).norm() / y.norm()) for x, y in pairs]


def test_gradients_are_nearer_to_the_oracle_with_row_state() -> None:
    tensors = inputs(1.0)
    with_it, without = (errors(gradients(tensors, with_state=s), tensors) for s in (True, False))
    assert all(a < 0.97 * b for a, b in zip(with_it, without, strict=True))


def test_scores_of_hundreds() -> None:
    """The rounding of lse is most of the error of dv; dq and dk suffer more from that of scores."""
    tensors = inputs(10.0)
    with_it, without = (errors(gradients(tensors, with_state=s), tensors) for s in (True, False))
    assert with_it[2] < 0.75 * without[2]
    assert max(with_it) < 1.1 * max(without)


def test_row_state_is_the_largest_score_and_the_sum() -> None:
    q, k, v, _ = inputs(1.0)
    found = CpuBackend().forward(call_of(q, k, v, for_backward=True), True)
    assert found.row_state is not None and found.max_scores is not None
    largest, total = found.row_state
    assert torch.equal(largest, found.max_scores)
    torch.testing.assert_close(largest + total.log(), found.lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_inputs_keep_none(dtype: torch.dtype) -> None:
    q, k, v, _ = inputs(1.0, dtype)
    found = CpuBackend().forward(call_of(q, k, v, for_backward=True), False)
    assert found.row_state is None


def test_few_rows_keep_it_too() -> None:
    """One query runs in the decode kernel, which has to fill the row state as well."""
    q, k, v, dout = inputs(1.0)
    tensors = [q[:, :, :1], k, v, dout[:, :, :1]]
    found = gradients(tensors, with_state=True)
    assert max(errors(found, tensors)) < 2e-6


def test_one_key_has_all_of_a_row() -> None:
    """dP - delta is exactly 0 where out is one value: both are summed in the same order."""
    q, k, v, dout = inputs(1.0)
    found = gradients([q, k[:, :, :1], v[:, :, :1], dout], with_state=True)
    assert not found.dq.any() and not found.dk.any()


@pytest.mark.parametrize("q_len", [1, 4, 16])
def test_few_queries_are_divided_by_their_own_sums(q_len: int) -> None:
    """Up to 16 queries went through the decode kernel, whose scores add up in another order than
    those of the backward: gradients were up to 4.5 times as far from the oracle."""
    few, many = [], []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, dout = (torch.randn(1, 4, 256, 64, generator=generator) * 3 for _ in range(4))
        for rows, found in ((q_len, few), (32, many)):
            tensors = [q[:, :, :rows], k, v, dout[:, :, :rows]]
            found.append(errors(gradients(tensors, with_state=True), tensors))
    pairs = zip(torch.tensor(few).mean(0), torch.tensor(many).mean(0), strict=True)
    assert all(a < 1.25 * b for a, b in pairs)
