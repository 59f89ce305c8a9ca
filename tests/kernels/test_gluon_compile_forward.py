"""The Gluon forward, compiled for Hopper without one: registers, spills, what ptxas serialises."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch

from attnloom import create_block_mask
from attnloom.backends.registry import AttentionCall
from attnloom.block_mask import BlockLists
from attnloom.ir.node import BoundProgram, DType
from attnloom.ir.passes.simplify import simplify
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score
from tests.kernels.gluon_triton import needs_gluon, takes_gluon

needs_gluon(also=True)

import triton  # noqa: E402

from attnloom.backends.gluon import configs_forward, launch_forward  # noqa: E402
from attnloom.backends.gluon.fields_forward import config_of, form_of  # noqa: E402
from attnloom.backends.gluon.forward_sm90 import forward_kernel  # noqa: E402
from attnloom.backends.triton.fields import Tensors  # noqa: E402
from attnloom.backends.triton.hasty import hastily  # noqa: E402
from attnloom.backends.triton.launcher import Launcher  # noqa: E402
from tests.kernels.cross_compile import TARGETS, device_is  # noqa: E402
from tests.kernels.cross_compile_gluon import CompiledGluon, compile_gluon  # noqa: E402

BF16, FP16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
LENGTH = 512
SLOPES = torch.full((4,), 0.5)
DOCUMENTS = torch.arange(LENGTH, dtype=torch.int32) // 100


def causal(b, h, q, kv):
    return q >= kv


def documents(b, h, q, kv):
    return (q >= kv) & (DOCUMENTS[q] == DOCUMENTS[kv])


def near(b, h, q, kv):
    return (q >= kv) & (q - kv < 130)


def softcap(score, b, h, q, kv):
    return 30 * torch.tanh(score / 30)


def alibi(score, b, h, q, kv):
    return score - SLOPES[h] * (q - kv)


def call_of(
    D: int, score: Any, mask: Any, dtype: torch.dtype = BF16, block: int = 128
) -> AttentionCall:
    tensors = (torch.empty(2, 4, LENGTH, D, dtype=dtype) for _ in range(3))
    programs: list[BoundProgram | None] = [None, None]
    blocks: BlockLists | None = None
    if score is not None:
        bound = trace_score(score, DType.F32, CPU)
        program = simplify(bound.program, exact=False)
        programs[0] = BoundProgram(program, bound.tensors, bound.numbers)
    if mask is not None:
        bound = trace_mask(mask, CPU)
        programs[1] = BoundProgram(simplify(bound.program), bound.tensors, bound.numbers)
        made = create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=block)
        blocks = made.lists()
    return AttentionCall(*tensors, *programs, blocks, D**-0.5, KernelOptions())


def compiled(call: AttentionCall) -> CompiledGluon:
    """The kernel of the first form for a call, as a launch would compile it."""
    launched: list[tuple[Any, ...]] = []
    options: dict[str, Any] = {}

    def launch(self: Launcher, aligned: bool, *args: Any) -> None:
        launched.append((*args, self.config))
        options.update(self.options)

    with (
        device_is("sm_90"),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: True),
        mock.patch.object(Launcher, "__call__", launch),
    ):
        launch_forward._choose(call, Tensors.of(call, False), True, call)
    return compile_gluon(forward_kernel, launched[0], options)


# Bytes that a thread may spill, as recorded with Triton 3.6 and 3.9, with some room.
QUICK = [(128, softcap, causal, BF16, 0), (64, None, documents, FP16, 32)]
REST = [
    (128, None, None, FP16, 0),
    (128, None, documents, BF16, 40),
    (128, alibi, causal, BF16, 48),
    (64, alibi, causal, BF16, 48),
    (64, softcap, causal, FP16, 16),
    (72, None, causal, FP16, 0),
    (96, None, causal, BF16, 0),
    (96, None, None, FP16, 0),
    (192, None, causal, BF16, 40),
    (192, None, None, FP16, 16),
    (192, softcap, causal, BF16, 0),
    (192, None, documents, BF16, 32),
    (256, None, causal, BF16, 40),
    (256, None, None, FP16, 32),
]


def sinks(b, h, q, kv):
    return (q >= kv) & ((q - kv < 130) | (kv < 4))


MANY_STEPS = [(causal, BF16), (causal, FP16), (None, BF16), (near, FP16), (sinks, BF16)]


def check(D: int, score: Any, mask: Any, dtype: torch.dtype, spills: int) -> None:
    found = compiled(call_of(D, score, mask, dtype))
    assert found.serialised == ()
    assert found.spills <= spills
    assert found.shared <= TARGETS["sm_90"][1].shared_bytes
    assert "wgmma.mma_async" in found.text
    assert "cp.async.bulk.tensor" in found.text


# Instructions of p . v: 16 keys each, of every consumer, twice where products overlap.
WIDE = [(96, causal, 96, 32), (80, None, 96, 24), (144, causal, 192, 32), (144, None, 192, 16)]


@pytest.mark.parametrize(("D", "mask", "columns", "instructions"), WIDE)
def test_products_of_96_and_192_columns(D: int, mask: Any, columns: int, instructions: int) -> None:
    """What forward_wide.py needs of Triton and ptxas: shared memory has a name, and products that
    are written out overlap as Triton's own do."""
    with (
        mock.patch.object(launch_forward, "has_few_steps", lambda call: False),
        mock.patch.object(launch_forward, "wants_short_steps", lambda call: False),
    ):
        found = compiled(call_of(D, None, mask))
    assert found.serialised == ()
    assert found.spills <= (0 if triton.__version__.startswith("3.6") else 40)
    assert found.shared <= TARGETS["sm_90"][1].shared_bytes
    assert re.search(r"\.extern \.shared [^;]*\bglobal_smem\[\];", found.text)
    assert found.text.count(f"m64n{columns}k16") == instructions


@pytest.mark.parametrize(("D", "score", "mask", "dtype", "spills"), QUICK)
def test_forward(D: int, score: Any, mask: Any, dtype: torch.dtype, spills: int) -> None:
    check(D, score, mask, dtype, spills)


@pytest.mark.long
@pytest.mark.parametrize(("D", "score", "mask", "dtype", "spills"), REST)
def test_other_forwards(D: int, score: Any, mask: Any, dtype: torch.dtype, spills: int) -> None:
    check(D, score, mask, dtype, spills)


def loops_of_products(text: str) -> list[str]:
    """The innermost loops of PTX that have eight products of matrices or more."""
    found: list[tuple[int, int]] = []
    labels = {m[1]: m.start() for m in re.finditer(r"^(\$\w+):", text, re.MULTILINE)}
    for jump in re.finditer(r"\bbra(?:\.uni)?\s+(\$\w+);", text):
        start, end = labels[jump[1]], jump.start()
        if start < end and text.count("wgmma.mma_async", start, end) >= 8:
            found.append((start, end))
    return [
        text[start:end]
        for start, end in found
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b in found)
    ]


@pytest.mark.parametrize(("D", "consumers"), [(64, 3), (128, 2)])
def test_warps_of_a_consumer_do_not_meet_in_a_step(D: int, consumers: int) -> None:
    """What addresses.py needs of Triton: shared memory has a name, and barriers' block begins at a
    multiple of its size, where it is looked for."""
    with mock.patch.object(launch_forward, "has_few_steps", lambda call: False):
        found = compiled(call_of(D, None, None))
    assert found.serialised == ()
    assert found.spills <= (0 if takes_gluon() else 144)
    assert re.search(r"\.extern \.shared [^;]*\bglobal_smem\[\];", found.text)
    steps = loops_of_products(found.text)[:consumers]
    assert len(steps) == consumers
    for step in steps:
        assert "mbarrier.arrive" in step
        assert "mbarrier.try_wait" in step
        assert not re.search(r"\tbar(?:rier)?\.", step)


@pytest.mark.parametrize(("D", "mask"), [(64, sinks), (128, sinks), (128, near)])
def test_a_masks_columns_are_literals(D: int, mask: Any) -> None:
    """Positions of keys took 32 registers, and sinks spilled 664 bytes a thread at D=64."""
    with mock.patch.object(launch_forward, "has_few_steps", lambda call: False):
        found = compiled(call_of(D, None, mask))
    assert found.serialised == ()
    assert found.spills <= (0 if triton.__version__.startswith("3.6") else 144)
    columns = {
        abs(int(number)) for number in re.findall(r"setp\.[gl][te]\.s32.*, (-?\d+);", found.text)
    }
    assert len(columns) >= 32


FIRST_CALLS = [(128, softcap, causal), (64, None, causal), (96, None, None), (192, softcap, causal)]
FIRST_CALLS += [(256, None, causal), (128, None, documents), (64, alibi, documents)]


@pytest.mark.long
@pytest.mark.parametrize(("D", "score", "mask"), FIRST_CALLS)
def test_forms_of_first_calls(D: int, score: Any, mask: Any) -> None:
    """One consumer of eight warps: half as much to compile, and nothing spilled."""
    in_order = launch_forward._in_order

    def quick(call: AttentionCall, fixed: bool) -> tuple[Any, ...]:
        found = configs_forward.quick(in_order(call, fixed)[0])
        assert found is not None
        return (found,)

    with mock.patch.object(launch_forward, "_in_order", quick), hastily():
        check(D, score, mask, BF16, 16)


@pytest.mark.long
@pytest.mark.parametrize(("mask", "dtype"), MANY_STEPS)
def test_three_consumers_of_many_steps_overlap(mask: Any, dtype: torch.dtype) -> None:
    with mock.patch.object(launch_forward, "has_few_steps", lambda call: False):
        check(64, None, mask, dtype, 0)


SKIPPING = {
    "causal": (call_of(64, None, causal), True, True, False),
    "documents": (call_of(64, None, documents), True, True, False),
    "no mask": (call_of(64, None, None), False, False, True),
    "96": (call_of(96, None, None), True, False, False),
    "score_mod": (call_of(64, alibi, causal), True, True, False),
    "blocks of two steps": (call_of(64, None, causal, block=256), True, False, False),
}


@pytest.mark.parametrize("name", SKIPPING)
def test_which_consumers_pass_over_steps_or_join_tiles(name: str) -> None:
    call, *wanted = SKIPPING[name]
    with device_is("sm_90"):
        in_order = launch_forward._in_order(call, True)
        form = next(form for form in in_order if form.consumers == 3)
        quick = configs_forward.quick(form)
        assert quick is not None and not quick.skips and not quick.joined
        cfg = config_of(call, form, form_of(call, True), False)
    assert wanted == [cfg.SKIPS, cfg.SKIPS_ENDS, cfg.JOINED]


@pytest.mark.parametrize("mask", [None, causal, near, sinks])
def test_tags_are_read_before_keys_are_given_back(mask: Any) -> None:
    """LLVM moves a load from shared memory to where its value is used, past an arrival that is
    written out: the first tag of a joined tile was another step's, if that came in time."""
    with (
        mock.patch.object(launch_forward, "has_few_steps", lambda call: False),
        mock.patch("tests.kernels.test_gluon_compile_forward.LENGTH", 500),
    ):
        text = compiled(call_of(64, None, mask)).text
    short = {
        "m64n128k16": "s",  # scores
        "wait_group.sync.aligned 0": "w",  # for all products: for first scores, for values else
        "@first mbarrier.arrive": "a",
        "ld.shared.b32": "l",
    }
    order = "".join(short[found] for found in re.findall("|".join(map(re.escape, short)), text))
    assert len(re.findall("s+lwa", order)) >= 3, order
    assert not re.search("s+wa+l", order), order


SHORT = [(128, None, documents, BF16)]
MORE_SHORT = [(128, None, near, BF16), (128, None, documents, FP16)]
MORE_SHORT += [(64, None, documents, BF16), (64, softcap, documents, FP16)]
MORE_SHORT += [(128, softcap, documents, BF16), (128, alibi, documents, FP16)]


@pytest.mark.parametrize(
    ("D", "score", "mask", "dtype"),
    [*SHORT, *[pytest.param(*case, marks=pytest.mark.long) for case in MORE_SHORT]],
)
def test_two_programs_of_short_rows_fit_a_processor(
    D: int, score: Any, mask: Any, dtype: torch.dtype
) -> None:
    found = compiled(call_of(D, score, mask, dtype, block=64))
    assert found.serialised == ()
    assert found.spills == 0
    # threads: a consumer's, and those of the two small warps and what fills them up to four
    assert 2 * found.registers * 256 <= 65536
    assert 2 * (found.shared + 1024) <= 228 * 1024


def test_soft_capping_costs_one_instruction_a_score() -> None:
    """The division and the product by the cap are part of the scales (score_form.py)."""
    text = compiled(call_of(128, softcap, causal)).text
    assert "tanh.approx.f32" in text
    assert "div.full.f32" not in text.split("tanh.approx.f32")[1][:400]


BIAS = torch.zeros(2, 4, LENGTH, LENGTH, dtype=BF16)


@pytest.mark.parametrize(("D", "places"), [(64, 2), (128, 3)])
def test_a_bias_is_read_16_bytes_a_thread(D: int, places: int) -> None:
    """8 pieces of 16 bytes for each of two consumers, in the first step and the others; at D=128 a
    step ahead, so once more, for which Triton 3.9 spills more."""
    found = compiled(call_of(D, lambda s, b, h, q, kv: s + BIAS[b, h, q, kv], None))
    assert found.serialised == ()
    assert found.spills <= (32 if triton.__version__.startswith("3.6") else 160)
    assert found.shared <= TARGETS["sm_90"][1].shared_bytes
    assert "ld.global.b16" not in found.text
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", found.text)) == 2 * 8 * places
