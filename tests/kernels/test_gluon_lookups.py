"""Types in which values that masks look up by key are left for the Gluon forward's consumers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attnloom.backends.gluon.fields import mask_target
from attnloom.backends.gluon.fields_forward import looked_up
from attnloom.backends.registry import AttentionCall
from attnloom.ir.node import BoundProgram
from attnloom.ir.passes.simplify import simplify
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask
from tests.kernels.cross_compile import device_is

CPU = torch.device("cpu")
LENGTH = 2048
IDS = torch.arange(LENGTH) // 100
HUGE = IDS + (1 << 40)
SHORT = IDS.to(torch.int32)
FLAGS = IDS % 2 == 0


@pytest.mark.parametrize(
    ("mask_mod", "wide", "narrow"),
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
def test_ids_that_fit_are_left_in_32_bits(mask_mod, wide, narrow) -> None:
    bound = trace_mask(mask_mod, CPU)
    bound = BoundProgram(simplify(bound.program), bound.tensors, bound.numbers)
    query = torch.empty(1, 4, LENGTH, 128, dtype=torch.bfloat16)
    call = AttentionCall(query, query, query, None, bound, None, 0.1, KernelOptions())
    with device_is("sm_90"):
        for expected, flag in ((wide, False), (narrow, True)):
            found = looked_up(bound, mask_target(call, flag))
            assert [str(dtype) for dtype in found] == expected
