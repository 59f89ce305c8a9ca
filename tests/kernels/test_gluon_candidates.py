"""Forms that are not in use yet, compiled for a Hopper GPU that is not there: they fit, spill no
more than is noted beside them, and none of their products is waited for at once."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")

if tuple(int(n) for n in triton.__version__.split(".")[:2]) != (3, 6):
    pytest.skip("the Gluon kernels are for Triton 3.6", allow_module_level=True)

# ruff: noqa: E402
from attnloom import create_block_mask
from attnloom.backends.gluon import configs_forward, launch_forward
from attnloom.backends.gluon.fields import mask_target
from attnloom.backends.gluon.fields_forward import looked_up
from attnloom.backends.registry import AttentionCall
from attnloom.ir.node import BoundProgram, DType
from attnloom.ir.passes.simplify import simplify
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score
from benchmarks import gpu_cases
from benchmarks.candidates import (
    CANDIDATES,
    Candidate,
    GluonBackward,
    GluonForward,
    PortableDecode,
    PortableForward,
)
from benchmarks.gpu_cases import GpuCase
from tests.kernels import test_gluon_compile_backward as compile_backward
from tests.kernels import test_gluon_compile_forward as compile_forward
from tests.kernels import test_triton_compile as portable_forward
from tests.kernels import test_triton_compile_backward as portable_backward
from tests.kernels.cross_compile import TARGETS, device_is

CPU = torch.device("cpu")
LENGTH = 2048


def call_of(case: GpuCase, backend: str) -> AttentionCall:
    """A smaller problem of the same kernels."""
    q_len = min(case.q_len, LENGTH)
    case = replace(case, batch=1, heads=4, kv_heads=4, q_len=q_len, kv_len=LENGTH)
    with mock.patch.object(gpu_cases, "DEVICE", "cpu"):
        learned, mask_mod = case.learned_table(), case.mask_mod
        score_mod = case.score_mod(None if learned is None else learned.requires_grad_())
    blocks = mask = score = None
    if mask_mod is not None:
        bound = trace_mask(mask_mod, CPU)
        mask = BoundProgram(simplify(bound.program), bound.tensors, bound.numbers)
        blocks = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu").lists()
    if score_mod is not None:
        bound = trace_score(score_mod, DType.F32, CPU)
        program = simplify(bound.program, exact=False)
        score = BoundProgram(program, bound.tensors, bound.numbers)
    sizes = ((1, 4, length, case.head_dim) for length in (q_len, LENGTH, LENGTH))
    tensors = (torch.empty(size, dtype=torch.bfloat16) for size in sizes)
    options = KernelOptions(backend=backend)
    return AttentionCall(*tensors, score, mask, blocks, case.head_dim**-0.5, options)


@pytest.mark.long
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
def test_candidates_fit(candidate: Candidate) -> None:
    change = candidate.change
    call = call_of(candidate.cases[0], change.backend)
    with change.installed():
        if isinstance(change, GluonForward):
            made = {"forward": compile_forward.compiled(call)}
        elif isinstance(change, GluonBackward):
            made = {"backward": compile_backward.compiled(call)["backward_kernel"]}
        elif isinstance(change, PortableForward | PortableDecode):
            made = portable_forward.compiled("sm_90", call)
        else:
            made = portable_backward.compiled("sm_90", call)
    for kernel in made.values():
        assert kernel.shared <= TARGETS["sm_90"][1].shared_bytes
        assert kernel.spills <= candidate.spills
        assert not getattr(kernel, "serialised", ())


@pytest.mark.long
def test_a_draw_ahead_orders_no_other_memory() -> None:
    """The draw in use waits for all earlier writes of its warp, and forgets the first-level cache
    of the processor: an atomic addition that acquires and releases."""
    call = call_of(GpuCase("causal", 1, 4, 4, LENGTH, LENGTH, 128), "gluon")
    form = launch_forward._forms(call)[0]
    found = {}
    for ahead in (False, True):
        with mock.patch.object(
            launch_forward, "_in_order", lambda *_, n=ahead: (replace(form, ahead=n),)
        ):
            found[ahead] = compile_forward.compiled(call).text
    assert "atom.global.gpu.acq_rel.add.u32" in found[False]
    assert "acq_rel" not in found[True]
    assert "atom.global.gpu.relaxed.add.u32" in found[True]


IDS = torch.arange(LENGTH) // 100
HUGE = IDS + (1 << 40)
SHORT = IDS.to(torch.int32)
FLAGS = IDS % 2 == 0


@pytest.mark.parametrize(
    ("mask_mod", "in_use", "narrow"),
    [
        (lambda b, h, q, kv: IDS[q] == IDS[kv], ["int64"], ["int32"]),
        (lambda b, h, q, kv: IDS[q] == IDS[kv] // 3, ["int64"], ["int32"]),
        (lambda b, h, q, kv: HUGE[q] == HUGE[kv], ["int64"], ["int64"]),
        (lambda b, h, q, kv: HUGE[q] == HUGE[kv] + IDS[kv], ["int64"], ["int64"]),
        (lambda b, h, q, kv: SHORT[q] == SHORT[kv], ["int32"], ["int32"]),
        (lambda b, h, q, kv: FLAGS[kv] & (IDS[q] == IDS[kv]), ["int64", "int8"], ["int32", "int8"]),
        (lambda b, h, q, kv: q >= kv, [], []),
    ],
    ids=["ids", "computed", "huge", "huge and small", "32 bits", "flags", "no ids"],
)
def test_ids_that_fit_are_left_in_32_bits(mask_mod, in_use, narrow) -> None:
    bound = trace_mask(mask_mod, CPU)
    bound = BoundProgram(simplify(bound.program), bound.tensors, bound.numbers)
    query = torch.empty(1, 4, LENGTH, 128, dtype=torch.bfloat16)
    call = AttentionCall(query, query, query, None, bound, None, 0.1, KernelOptions())
    with device_is("sm_90"):
        for expected, flag in ((in_use, False), (narrow, True)):
            found = looked_up(bound, mask_target(call, flag))
            assert [str(dtype) for dtype in found] == expected


def test_tiles_are_drawn_ahead_only_where_two_tiles_of_queries_fit() -> None:
    form = configs_forward.forms(256, 256, None)[0]
    with pytest.raises(AssertionError):
        replace(form, ahead=True)
