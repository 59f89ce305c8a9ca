"""Forms that are not in use yet, compiled for a Hopper GPU that is not there: they fit, spill no
more than is noted beside them, and none of their products is waited for at once."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.kernels.gluon_triton import needs_gluon

needs_gluon()

# ruff: noqa: E402
from attnloom import create_block_mask
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
    GluonWide,
    PortableForward,
)
from benchmarks.gpu_cases import GpuCase
from tests.kernels import test_gluon_compile_backward as compile_backward
from tests.kernels import test_gluon_compile_forward as compile_forward
from tests.kernels import test_triton_compile as portable_forward
from tests.kernels import test_triton_compile_backward as portable_backward
from tests.kernels.cross_compile import TARGETS

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
        elif isinstance(change, GluonWide):
            made = {"backward": compile_backward.compiled_wide(call)["wide_kernel"]}
        elif isinstance(change, PortableForward):
            made = portable_forward.compiled("sm_90", call)
        else:
            made = portable_backward.compiled("sm_90", call)
    for kernel in made.values():
        assert kernel.shared <= TARGETS["sm_90"][1].shared_bytes
        assert kernel.spills <= candidate.spills
        assert not getattr(kernel, "serialised", ())
