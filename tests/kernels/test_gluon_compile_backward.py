"""The Gluon backward compiled for a Hopper GPU that is not there: it fits, spills within bounds,
and none of its products is waited for at once."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.gluon_triton import needs_gluon

needs_gluon()

# ruff: noqa: E402
from attnloom.backends.gluon import (
    configs_backward,
    few_keys,
    launch_backward,
    launch_roles,
    launch_wide,
    ready_backward,
)
from attnloom.backends.gluon.configs_backward import KEYS
from attnloom.backends.registry import AttentionCall
from tests.kernels.cross_compile import TARGETS, Compiled, compile_for, device_is
from tests.kernels.cross_compile_gluon import CompiledGluon, compile_gluon
from tests.kernels.test_triton_compile import causal, make_call, softcap


class _Compiler:
    """In place of launcher.Launcher: compiles what it would launch."""

    made: dict[str, Compiled | CompiledGluon] = {}

    def __init__(
        self, kernel: Any, config: Any, grid: int, options: dict[str, int], operands: int = 0
    ) -> None:
        self.kernel, self.config, self.options = kernel, config, options
        self.spills = 0

    def __call__(self, aligned: bool, *args: object) -> None:
        arguments = (*args, self.config)
        if self.kernel.is_gluon():
            made = compile_gluon(self.kernel, arguments, self.options)
        else:
            made = compile_for("sm_90", self.kernel, arguments, self.options)
        self.spills = (made.spills or 0) // 4
        self.made[self.kernel.__name__] = made


def compiled(call: AttentionCall) -> dict[str, Any]:
    """The kernels of a backward by name, whatever they spill."""
    _Compiler.made = {}
    ready_backward._ready.clear()
    rows = call.query.shape[:3]
    out = torch.empty(*rows, call.value.size(3), dtype=call.query.dtype)
    with (
        device_is("sm_90"),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: True),
        mock.patch.object(ready_backward, "Launcher", _Compiler),
        mock.patch.object(launch_backward, "FEW_SPILLS", 1 << 20),
    ):
        launch_backward.backward(call, out, torch.empty(rows), torch.empty_like(out), None)
    ready_backward._ready.clear()
    return _Compiler.made


@pytest.mark.parametrize("head_dim", [64, 128])
def test_causal(head_dim: int) -> None:
    """Sums start from -lse and -delta, which spares the subtractions."""
    made = compiled(make_call(head_dim, mask_mod=causal, q_len=2048, kv_len=2048))
    main = made["backward_kernel"]
    assert not main.serialised
    assert main.shared <= TARGETS["sm_90"][1].shared_bytes
    assert main.spills <= 48
    assert "red.relaxed.gpu.global.add.v4.f32" in main.text
    for name in ("prepare_kernel", "finish_kernel"):
        assert made[name].spills == 0
    # each starts while the one before is ending, and waits for it
    for name in ("prepare_kernel", "backward_kernel"):
        assert "griddepcontrol.launch_dependents" in made[name].text
    for name in ("backward_kernel", "finish_kernel"):
        assert "griddepcontrol.wait" in made[name].text
    assert re.search(r"ld\.global\S*\.v4\.b32", made["finish_kernel"].text)


@pytest.mark.parametrize(("head_dim", "mask_mod"), [(80, None), (112, causal)])
def test_products_leave_out_columns_past_the_heads(head_dim: int, mask_mod: Any) -> None:
    """S before the first step and in each, dP in each; dq over 128 keys in each and late."""
    made = compiled(make_call(head_dim, mask_mod=mask_mod, q_len=2048, kv_len=2048))
    main = made["backward_kernel"]
    assert not main.serialised
    assert main.shared <= TARGETS["sm_90"][1].shared_bytes
    assert main.spills <= 48
    products = 3 * head_dim // 16 + 2 * KEYS // 16
    assert main.text.count("m64n64k16") == CONSUMERS * products


def test_steps_of_128_queries_of_long_rows() -> None:
    """Each consumer has 64 of them of dq: 8 additions of 16 bytes a lane, in a step and late."""
    call = make_call(64, mask_mod=causal, q_len=4352, kv_len=4352)
    made = compiled(call)
    main = made["backward_kernel"]
    assert not main.serialised
    assert main.shared <= TARGETS["sm_90"][1].shared_bytes
    assert main.spills <= 32
    assert main.text.count("red.relaxed.gpu.global.add.v4.f32") == CONSUMERS * 2 * 8
    # S before the first step and in each, dP in each
    assert main.text.count("m64n128k16") == CONSUMERS * 3 * 64 // 16


@pytest.mark.parametrize(("head_dim", "mask_mod"), [(96, None), (88, causal)])
def test_products_of_96_columns(head_dim: int, mask_mod: Any) -> None:
    """dk and dv have them, of dq one consumer 64 and the other 32."""
    made = compiled(make_call(head_dim, mask_mod=mask_mod, q_len=2048, kv_len=2048))
    main = made["backward_kernel"]
    assert not main.serialised
    assert main.shared <= TARGETS["sm_90"][1].shared_bytes
    assert main.spills == 0
    assert main.text.count("m64n96k16") == CONSUMERS * 2 * 64 // 16
    assert main.text.count("m64n32k16") == 2 * KEYS // 16
    assert "m64n128k16" not in main.text
    for name in ("prepare_kernel", "finish_kernel"):
        assert made[name].spills == 0
    assert re.search(r"ld\.global\S*\.v4\.b32", made["finish_kernel"].text)


def test_a_window_starts_dv_before_it_waits() -> None:
    """Fewer registers are spilled than where dv starts behind dscore, 18."""

    def window(b, h, q, kv):
        return (q >= kv) & (q - kv < 1024)

    main = compiled(make_call(128, mask_mod=window, q_len=4352, kv_len=4352))["backward_kernel"]
    assert not main.serialised
    assert main.spills <= 64


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_of_dq_that_programs_keep_are_not_added_to_in_memory(head_dim: int) -> None:
    call = make_call(head_dim, mask_mod=causal, q_len=2048, kv_len=2048)
    with mock.patch.object(few_keys, "sweeps", lambda call: True):
        made = compiled(call)
    main = made["backward_kernel"]
    assert not main.serialised
    assert main.shared <= TARGETS["sm_90"][1].shared_bytes
    assert main.spills <= 4 * launch_backward.FEW_SPILLS
    assert "red.relaxed" not in main.text
    assert "st.global.cg.v4.f32" in main.text
    assert "finish_kernel" not in made


IDS = torch.arange(2048) // 170


@pytest.mark.parametrize("swept", [True, False])
def test_ids_of_queries_are_loaded_once_a_step(swept: bool) -> None:
    """A thread of either consumer has 16 queries of a step, and loaded their ids one by one: 36
    loads of 64 bits."""
    call = make_call(
        128, mask_mod=lambda b, h, q, kv: (q >= kv) & (IDS[q] == IDS[kv]), q_len=2048, kv_len=2048
    )
    with (
        mock.patch.object(few_keys, "sweeps", lambda call: swept),
        mock.patch.object(few_keys, "sees_few", lambda call: True),
        mock.patch.object(few_keys, "has_few", lambda blocks, sides: False),
    ):
        main = compiled(call)["backward_kernel"]
    assert not main.serialised
    assert main.spills <= 56
    # one of a query and two of keys for each consumer
    assert len(re.findall(r"ld\.global\.b64", main.text)) == 6
    assert ("red.relaxed.gpu.global.add.v4.f32" in main.text) != swept


def compiled_roles(call: AttentionCall) -> dict[str, Any]:
    """The kernels of a backward of wide heads that has all of it in one."""
    with (
        mock.patch.object(launch_roles, "Launcher", _Compiler),
        mock.patch.object(launch_roles, "FEW_SPILLS", 1 << 20),
        mock.patch.object(launch_roles, "_ready", {}),
    ):
        return compiled(call)


def short_documents(b, h, q, kv):
    return (q >= kv) & (IDS[q] == IDS[kv])


@pytest.mark.parametrize(
    ("mask_mod", "length", "dims", "dtype"),
    [
        (None, 2048, (192, 192), torch.bfloat16),
        (causal, 2048, (192, 192), torch.bfloat16),
        (causal, 2000, (160, 128), torch.float16),
        pytest.param(short_documents, 2000, (136, 64), torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_wide_heads_without_a_score_mod_have_dq_dk_and_dv_in_registers(
    mask_mod: Any, length: int, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """144 of dk or dv beside 48 of scores, and nothing is spilled."""
    call = make_call(dims[0], mask_mod=mask_mod, q_len=length, kv_len=length)
    query, key = call.query.to(dtype), call.key.to(dtype)
    call = replace(call, query=query, key=key, value=key[..., : dims[1]].contiguous())
    made = compiled_roles(call)
    main = made["roles_kernel"]
    assert not main.serialised
    assert main.shared <= TARGETS["sm_90"][1].shared_bytes
    assert main.spills == 0
    # instructions of 96 columns alone, where six panels of 16 are summed over or two of 64 are made
    value_panels = -(-dims[1] // 64)
    scores, weights, dq = 2 * 3 * 4, 4 * (3 + value_panels), 3 * 6
    products = scores + 2 * 4 * value_panels + weights + dq
    assert main.text.count("m64n96k16") == main.text.count("wgmma.mma_async") == products
    # an addition of 16 bytes for eight columns of each, in steps and after the last
    assert main.text.count("red.relaxed.gpu.global.add.v4.f32") == 3 * 12
    for name in ("prepare_kernel", "finish_kernel"):
        assert made[name].spills == 0
    for name in ("prepare_kernel", "roles_kernel"):
        assert "griddepcontrol.launch_dependents" in made[name].text
    for name in ("roles_kernel", "finish_kernel"):
        assert "griddepcontrol.wait" in made[name].text


def compiled_wide(call: AttentionCall) -> dict[str, Any]:
    """The kernels of a backward of wide heads that are not portable ones, where dv is."""
    portable = mock.Mock(), mock.Mock(return_value=torch.empty(2 * 32, 2048))
    with (
        mock.patch.object(launch_roles, "takes", lambda call: False),
        mock.patch.object(launch_wide, "Launcher", _Compiler),
        mock.patch.object(launch_wide, "run_keys", portable[0]),
        mock.patch.object(launch_wide, "row_statistics", portable[1]),
        mock.patch.object(launch_wide, "FEW_SPILLS", 1 << 20),
        mock.patch.object(launch_wide, "_ready", {}),
    ):
        made = compiled(call)
    assert portable[0].called
    return made


@pytest.mark.parametrize("fold", [False, True])
def test_wide_heads_keep_dk_and_dq_in_registers(fold: bool) -> None:
    """With dv they would not; 248 bytes were spilled while dk and the next scores were formed
    together."""
    form = configs_backward.form_in_panels(fold)
    call = make_call(192, mask_mod=causal, q_len=2048, kv_len=2048)
    with mock.patch.object(launch_wide, "form_of", lambda call: form):
        made = compiled_wide(call)
    main = made["wide_kernel"]
    assert not main.serialised
    assert main.shared <= TARGETS["sm_90"][1].shared_bytes
    assert main.spills <= 4 * launch_wide.FEW_SPILLS
    assert made["finish_kernel"].spills == 0


@pytest.mark.long
def test_soft_capping_keeps_its_derivative_and_not_its_score() -> None:
    made = compiled(make_call(128, score_mod=softcap, mask_mod=causal, q_len=2048, kv_len=2048))
    main = made["backward_kernel"]
    assert not main.serialised
    assert main.spills <= 288
    assert main.text.count("tanh.approx") == main.text.count("ex2.approx")


@pytest.mark.long
def test_a_learned_slope_adds_once_a_head() -> None:
    slope = torch.zeros(32, requires_grad=True)
    call = make_call(
        64,
        score_mod=lambda s, b, h, q, kv: s + slope[h] * (kv - q),
        q_len=2048,
        kv_len=2048,
        backend="gluon",
    )
    main = compiled(call)["backward_kernel"]
    assert not main.serialised
    assert main.spills <= 128
    assert len(additions(main.text)) == CONSUMERS


BIAS = torch.zeros(1, 32, 2048, 2048, dtype=torch.bfloat16, requires_grad=True)


def test_a_bias_is_read_and_its_gradient_stored_16_bytes_a_thread() -> None:
    """A consumer's tile of 64 x 64 halves is 4 pieces a thread, which change threads without a
    barrier of more than its warps, read a step ahead."""
    call = make_call(
        64,
        score_mod=lambda s, b, h, q, kv: s + BIAS[b, h, q, kv],
        q_len=2048,
        kv_len=2048,
        backend="gluon",
    )
    main = compiled(call)["backward_kernel"]
    assert not main.serialised
    assert main.spills <= 24
    assert main.shared <= TARGETS["sm_90"][1].shared_bytes
    assert "global.b16" not in main.text
    loads = 2 * 4  # before the first step as well
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", main.text)) == CONSUMERS * loads
    assert len(re.findall(r"st\.global\S*\.v4\.b32", main.text)) == CONSUMERS * 4
    assert "evict_first" in main.text
    # barriers: of a partition's 128 threads, or of all warps together
    ids = set(re.findall(r"bar\.sync\s+(\d+), (\d+)", main.text))
    assert {threads for _, threads in ids} == {"128"}


CONSUMERS = 2
SCALES = torch.ones(32, 2048, requires_grad=True)
BIASES = torch.zeros(2048, requires_grad=True)
FEATURES = torch.zeros(32, 4, requires_grad=True)
KEY_FEATURES = torch.zeros(2048, 4, requires_grad=True)
# what an addition returns goes to a register or, in place of one, nowhere
_ADDITION = re.compile(
    r"\b(?:atom|red)\.(?:global|relaxed|gpu)[.\w]*add\.f32\s+(?:\S+, )?\[ ?(%rd\d+)[^]]*\], (%\w+)"
)


def additions(ptx: str) -> list[tuple[str, str]]:
    """(address, value) of each addition to a captured gradient."""
    return [(found[1], found[2]) for found in _ADDITION.finditer(ptx)]


@pytest.mark.parametrize(
    ("score_mod", "count"),
    [
        # a lane of a warp has 16 of 64 queries and two of 64 keys
        (lambda s, b, h, q, kv: s * SCALES[h, q] + BIASES[kv], 16 + 2),
        pytest.param(
            lambda s, b, h, q, kv: s * (FEATURES[h] * FEATURES[h]).sum(), 1, marks=pytest.mark.long
        ),
        pytest.param(
            lambda s, b, h, q, kv: s * (KEY_FEATURES[kv] * KEY_FEATURES[kv]).sum(),
            2,
            marks=pytest.mark.long,
        ),
    ],
    ids=["query and key", "reduction", "reduction by key"],
)
def test_no_register_is_added_twice(score_mod: Any, count: int) -> None:
    """A gradient by query was twice what it is: a thread holds rows r and r + 8 of a tile, also of
    one that has a single row, and added both."""
    call = make_call(64, score_mod=score_mod, q_len=2048, kv_len=2048, backend="gluon")
    found = additions(compiled(call)["backward_kernel"].text)
    assert len(found) == len(set(found)) == CONSUMERS * count
