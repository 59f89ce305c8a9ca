"""Parts of the Triton backward that need no kernel: transposed lists, fragments, fixed point."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import attnloom
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import emit_grad
from attnloom.backends.triton.captured import Captured, sinks_form
from attnloom.backends.triton.emit import Target
from attnloom.backends.triton.transposed import transposed_lists
from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score

CPU = torch.device("cpu")


def tiles(blocks) -> torch.Tensor:
    """[batch and head entries, rows, columns]: 0 empty, 1 full, 2 partial."""
    grid = blocks.grid
    found = torch.zeros(grid.num_rows, grid.num_kv_blocks, dtype=torch.int64)
    found[blocks.entry_rows(), (blocks.entries >> 1).long()] = 1 + (blocks.entries & 1).long()
    return found.view(-1, grid.num_q_blocks, grid.num_kv_blocks)


@pytest.mark.parametrize(("q_len", "kv_len"), [(70, 130), (130, 33), (1, 1)])
@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, kv: q >= kv,
        lambda b, h, q, kv: (q - kv) * (h + 1) > 8 * b,
        lambda b, h, q, kv: q < 0,
    ],
)
def test_transposed_lists_hold_the_same_tiles(mask_mod, q_len: int, kv_len: int) -> None:
    mask = attnloom.create_block_mask(
        mask_mod, 2, 3, q_len, kv_len, device="cpu", BLOCK_SIZE=(16, 32)
    )
    blocks = mask.lists()
    turned = transposed_lists(blocks)
    assert torch.equal(tiles(turned.blocks), tiles(blocks).transpose(1, 2))
    assert torch.equal(turned.offsets.long(), turned.blocks.row_offsets)
    rows, entries = turned.blocks.entry_rows(), turned.blocks.entries
    same_row = rows[1:] == rows[:-1]
    assert bool((entries[1:] > entries[:-1])[same_row].all()), "not in ascending order"
    assert transposed_lists(blocks) is turned


def test_exchanged_program_is_that_of_the_transposed_mask() -> None:
    program = trace_mask(lambda b, h, q, kv: (q - 2 * kv > h) | (kv == b), CPU).program
    q, kv = torch.arange(9)[:, None], torch.arange(7)[None, :]
    inputs = {"b": torch.tensor(1), "h": torch.tensor(2), "q": q, "kv": kv}
    (expected,) = interpret(BoundProgram(program), inputs)
    turned = inputs | {"q": kv, "kv": q}
    (result,) = interpret(BoundProgram(emit_grad.exchanged(program)), turned)
    assert torch.equal(result.expand(9, 7), expected.expand(9, 7))


def make_call(score_mod, batch: int = 2, **options) -> AttentionCall:
    query = torch.zeros(batch, 3, 8, 16)
    score = trace_score(score_mod, DType.F32, CPU)
    return AttentionCall(query, query, query, score, None, None, 1.0, KernelOptions(**options))


def stores(score_mod, **kwargs) -> tuple[bool, ...]:
    call = make_call(score_mod, **kwargs)
    assert call.score is not None
    return sinks_form(call, emit_grad.gradient_of(call.score.program, False)).stores


def learned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, requires_grad=True)


def test_only_an_element_of_its_own_is_stored() -> None:
    full, shared, narrow, headless = (
        learned(2, 3, 8, 8), learned(3, 8, 8), learned(2, 3, 7, 8), learned(2, 8, 8),
    )  # fmt: skip
    assert stores(lambda s, b, h, q, kv: s + full[b, h, q, kv]) == (True,)
    assert stores(lambda s, b, h, q, kv: s + full[b, h, kv, q]) == (True,)
    assert stores(lambda s, b, h, q, kv: s + shared[h, q, kv]) == (False,)
    assert stores(lambda s, b, h, q, kv: s + shared[h, q, kv], batch=1) == (True,)
    assert stores(lambda s, b, h, q, kv: s + narrow[b, h, q, kv]) == (False,)
    assert stores(lambda s, b, h, q, kv: s + headless[b, q, kv]) == (False,)
    assert stores(lambda s, b, h, q, kv: s + full[b, h, q, q]) == (False,)
    twice = stores(lambda s, b, h, q, kv: s * full[b, h, q, kv] + full[b, h, kv, q])
    assert twice == (False, False)


def test_a_sum_over_a_head_is_carried_through_the_loop() -> None:
    slope, table = learned(3), learned(3, 15)

    def text(score_mod) -> str:
        program = trace_score(score_mod, DType.F32, CPU).program
        found = emit_grad.gradient_of(program, False)
        return emit_grad.emit_sinks(found, Target(), emit_grad.Sinks((False,)))

    carried = text(lambda s, b, h, q, kv: s + slope[h] * (q - kv))
    body = carried[carried.index("def sinks_body") : carried.index("def sinks_flush")]
    assert "sk.add" not in body
    assert carried.count("sk.add(") == 1
    scattered = text(lambda s, b, h, q, kv: s + table[h, q - kv + 7])
    body = scattered[scattered.index("def sinks_body") : scattered.index("def sinks_flush")]
    assert body.count("sk.add(") == 1


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_fixed_point_holds_the_largest_sum(size: float) -> None:
    """As many of the largest contributions as there are scores fit, and small ones are not lost."""
    gate = learned(3)
    captured = Captured.of(make_call(lambda s, b, h, q, kv: s * gate[h], deterministic=True))
    assert captured is not None
    scales = captured.scales(torch.tensor([[size / 2], [size]], dtype=torch.float64))
    scores = 2 * 3 * 8 * 8
    assert float(scales[0, 0]) * size * scores < 2.0**63
    assert float(scales[0, 0]) * size >= 2.0**40
    buffer = captured.buffers[0]
    buffer[1, 0] = int(float(scales[0, 0]) * size * 3)
    (total,) = captured.total(scales)
    assert total is not None
    torch.testing.assert_close(total, torch.tensor([0.0, size * 3, 0.0]))


def test_a_contribution_that_is_not_finite_makes_its_gradient_nan() -> None:
    gate = learned(3)
    captured = Captured.of(make_call(lambda s, b, h, q, kv: s * gate[h], deterministic=True))
    assert captured is not None
    (total,) = captured.total(captured.scales(torch.tensor([[torch.inf]])))
    assert total is not None
    assert bool(total.isnan().all())
