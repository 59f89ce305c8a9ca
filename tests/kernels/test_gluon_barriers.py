"""No form of a Gluon kernel initialises barriers that it does not use: their memory would be given
to other things while it is a barrier's still (barrier_memory.py).

Kernels are made only as far as memory is given out; whatever is compiled whole elsewhere is asked
the same by cross_compile_gluon.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.gluon_triton import needs_gluon

needs_gluon()

# ruff: noqa: E402
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnloom import create_block_mask
from attnloom.backends.gluon import configs_backward, configs_forward
from benchmarks.candidates import CANDIDATES, GluonBackward, GluonForward, GluonWide
from tests.kernels import barrier_memory, turns
from tests.kernels import test_gluon_compile_backward as compile_backward
from tests.kernels import test_gluon_compile_forward as compile_forward
from tests.kernels.cross_compile import Compiled
from tests.kernels.cross_compile_gluon import CompiledGluon, compile_gluon, lowered
from tests.kernels.test_gluon_candidates import call_of as call_of_case
from tests.kernels.test_triton_compile import causal, make_call, softcap
from tests.kernels.turns_kernels import Parts, turns_kernel

LENGTH = compile_forward.LENGTH
STARTS = torch.arange(LENGTH, dtype=torch.int32) // 50
BIAS = torch.zeros(1, 32, 2048, 2048, dtype=torch.bfloat16, requires_grad=True)
SLOPES = torch.zeros(32, requires_grad=True)


def two_lookups(b, h, q, kv):
    documents = compile_forward.DOCUMENTS
    return (documents[q] == documents[kv]) & (STARTS[q] > STARTS[kv])


@pytest.fixture
def made() -> Iterator[list[str]]:
    """Names of the kernels whose memory was looked at."""
    names: list[str] = []

    def looked_at(kernel: Any, arguments: tuple[Any, ...], options: dict[str, int]):
        wrong = barrier_memory.given_away(lowered(kernel, arguments, options))
        assert not wrong
        names.append(kernel.__name__)
        return CompiledGluon(0, 0, 0, (), "")

    def passed_over(*_: Any) -> Compiled:
        return Compiled(0, 0, 0, "")

    with (
        mock.patch.object(compile_forward, "compile_gluon", looked_at),
        mock.patch.object(compile_backward, "compile_gluon", looked_at),
        mock.patch.object(compile_backward, "compile_for", passed_over),
    ):
        yield names


FORWARDS = [
    (dim, form)
    for table in (
        configs_forward._FORMS, configs_forward._PLAIN, configs_forward._PLAIN_MASKED,
        configs_forward._IN_PIECES,
    )
    for dim, forms in table.items()
    for form in forms
]  # fmt: skip


def _named(value: Any) -> str:
    return f"{value.consumers} consumers" if isinstance(value, configs_forward.Form) else str(value)


MASKS = {
    "no mask": None,
    "causal": causal,
    "one lookup": compile_forward.documents,
    "two lookups": two_lookups,
}


# Strips are for masks that look nothing up, in blocks of whole tiles.
FORWARD_CASES = [
    (dim, form, mask)
    for dim, form in FORWARDS
    for mask in MASKS
    if not (form.strips and "lookup" in mask)
]


@pytest.mark.parametrize(("head_dim", "form", "mask"), FORWARD_CASES, ids=_named)
def test_forward(head_dim: int, form: configs_forward.Form, mask: str, made: list[str]) -> None:
    """Tiles were lost: a form without a warp that looks up keys had barriers for it."""
    biases = compile_forward.BIAS
    score = (lambda s, b, h, q, kv: s + biases[b, h, q, kv]) if form.pieces else None
    call = compile_forward.call_of(head_dim, score, MASKS[mask])
    with GluonForward(form).installed():
        compile_forward.compiled(call)
        if call.blocks is not None:
            size = (128, 64) if form.strips else (64, 128)
            blocks = create_block_mask(MASKS[mask], None, None, LENGTH, LENGTH, "cpu", size)
            compile_forward.compiled(replace(call, blocks=blocks.lists()))
    assert made == ["forward_kernel"] * (1 if call.blocks is None else 2)


BACKWARDS = {
    name: form
    for name, form in vars(configs_backward).items()
    if isinstance(form, configs_backward.Form)
}
SCORES = {
    "": None,
    "softcap": softcap,
    "bias": lambda s, b, h, q, kv: s + BIAS[b, h, q, kv],
    "slopes": lambda s, b, h, q, kv: s + SLOPES[h] * (q - kv),
}


# FOLD is for scores as products give them, sweeps are along the live blocks of a mask
CHOICES = [
    (name, score, mask)
    for name, form in BACKWARDS.items()
    for score in SCORES
    for mask in ("no mask", "causal")
    if not (form.fold and score) and not (form.sweeps and mask == "no mask")
]


@pytest.mark.parametrize(("name", "score", "mask"), CHOICES)
def test_backward(name: str, score: str, mask: str, made: list[str]) -> None:
    """Tiles were lost: programs of one tile had barriers for others."""
    form = BACKWARDS[name]
    call = make_call(
        64 if form.dq_apart else 96 if form.dk_shared else 128,
        score_mod=SCORES[score], mask_mod=MASKS[mask], q_len=2048, kv_len=2048, backend="gluon",
    )  # fmt: skip
    with GluonBackward(form).installed():
        compile_backward.compiled(call)
    assert "backward_kernel" in made


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("value_dim", [64, 192])
@pytest.mark.parametrize("mask", ["no mask", "causal"])
def test_wide_backward(fold: bool, value_dim: int, mask: str, made: list[str]) -> None:
    call = make_call(192, mask_mod=MASKS[mask], q_len=2048, kv_len=2048)
    call = replace(call, value=call.key[..., :value_dim].contiguous())
    with GluonWide(configs_backward.form_in_panels(fold)).installed():
        compile_backward.compiled_wide(call)
    assert "wide_kernel" in made


GLUON = [c for c in CANDIDATES if isinstance(c.change, GluonForward | GluonBackward | GluonWide)]


@pytest.mark.parametrize("candidate", GLUON, ids=lambda candidate: candidate.name)
def test_candidates(candidate: Any, made: list[str]) -> None:
    with candidate.change.installed():
        for case in candidate.cases:
            call = call_of_case(case, "gluon")
            if isinstance(candidate.change, GluonForward):
                compile_forward.compiled(call)
            elif isinstance(candidate.change, GluonWide):
                compile_backward.compiled_wide(call)
            else:
                compile_backward.compiled(call)
    assert len(made) >= len(candidate.cases)


def small_kernel(name: str) -> CompiledGluon:
    rows = torch.zeros(1024, 64, dtype=torch.bfloat16)
    counter = torch.zeros(1, dtype=torch.int32)
    described = TensorDescriptor(rows, [1024, 64], [64, 1], [64, 64], NVMMASharedLayout(128, 16, 2))
    arguments = (described, rows, described, rows, counter, 5, 7, Parts(**turns.PARTS[name]))
    return compile_gluon(turns_kernel, arguments, {"num_warps": 4})


@pytest.mark.parametrize("name", sorted(turns.PARTS.keys() - {turns.PLANTED}))
def test_small_kernels_compile_for_sm_90(name: str) -> None:
    made, parts = small_kernel(name), turns.PARTS[name]
    assert made.spills == 0
    assert not made.serialised
    assert ("cp.async.bulk.tensor.2d.shared" in made.text) == parts.get("LOADS", False)
    assert ("cp.async.bulk.tensor.2d.global" in made.text) == parts.get("STORES", False)
    assert ("wgmma.mma_async" in made.text) == parts.get("PRODUCTS", False)
    assert ("atom." in made.text) == parts.get("DRAWS", False)


def test_unused_barriers_are_found_in_the_smallest_kernel_that_loses_tiles() -> None:
    """By each of the three that are asked."""
    with pytest.raises(AssertionError, match="turns_kernel: ") as told:
        small_kernel(turns.PLANTED)
    said = str(told.value).removeprefix("turns_kernel: ").split("; ")
    assert "no partition uses the barriers %unused" in said
    assert any(s.startswith("tt.atomic_rmw lies where the barriers %unused do") for s in said)
    assert any("st.shared.b32" in s and s.endswith("where a barrier is") for s in said)
