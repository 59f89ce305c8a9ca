"""The backward compiled for GPUs that are not there: it fits, and spills within bounds."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import launch_around, launch_backward, ready_backward
from tests.kernels.cross_compile import TARGETS, Compiled, compile_for, device_is
from tests.kernels.test_triton_compile import causal, make_call, softcap
from tests.kernels.test_triton_compile import compiled as forward_kernels


class _Compiler:
    """In place of launcher.Launcher: compiles, and refuses what the device would."""

    target = "sm_90"
    made: dict[str, Compiled] = {}

    def __init__(
        self, kernel: Any, config: Any, grid: int, options: dict[str, int], operands: int = 0
    ) -> None:
        self.kernel, self.config, self.grid, self.options = kernel, config, grid, options
        self.spills = 0

    def __call__(self, aligned: bool, *args: object) -> None:
        made = compile_for(self.target, self.kernel, (*args, self.config), self.options)
        limit = TARGETS[self.target][1].shared_bytes
        if made.shared > limit:
            raise OutOfResources(made.shared, limit, "shared memory")
        self.spills = (made.spills or 0) // 4
        name = self.kernel.__name__
        known = self.made.get(name)
        if known is None or (made.spills or 0) < (known.spills or 0):
            self.made[name] = made


def compiled(target: str, call: AttentionCall) -> dict[str, Compiled]:
    """The kernels of a backward by name; of several tries the one that is kept."""
    _Compiler.target, _Compiler.made = target, {}
    ready_backward._ready.clear()
    launch_around._statistics.clear()
    rows = call.query.shape[:3]
    out = torch.empty(*rows, call.value.size(3), dtype=call.query.dtype)
    with (
        device_is(target),
        mock.patch.object(launch_around, "Launcher", _Compiler),
        mock.patch.object(ready_backward, "Launcher", _Compiler),
    ):
        launch_backward.backward(call, out, torch.empty(rows), torch.empty_like(out), None)
    ready_backward._ready.clear()
    launch_around._statistics.clear()
    return _Compiler.made


def num_atomics(made: Compiled) -> int:
    return len(re.findall(r"\b(?:atom|red)\.(?:relaxed\.|gpu\.)*global", made.text))


def learned(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, requires_grad=True)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_backward_copies_by_tma_and_multiplies_by_wgmma(head_dim: int) -> None:
    """Row statistics once took 32 copies of 4 bytes a thread, and spilled for their addresses."""
    made = compiled("sm_90", make_call(head_dim, mask_mod=causal, q_len=512, kv_len=512))
    for name in ("row_kernel", "key_kernel"):
        assert (made[name].spills or 0) <= 64
        assert "cp.async.bulk.tensor" in made[name].text
        assert "wgmma.mma_async" in made[name].text
        assert "cp.async.ca" not in made[name].text


def test_a_learned_slope_adds_once_a_tile_at_most() -> None:
    slope = learned((32,))
    call = make_call(
        64, score_mod=lambda s, b, h, q, kv: s + slope[h] * (kv - q), q_len=512, kv_len=512
    )
    made = compiled("sm_90", call)["key_kernel"]
    assert num_atomics(made) == 1
    assert (made.spills or 0) <= 64


def test_an_element_for_each_score_is_stored() -> None:
    bias = learned((1, 32, 256, 256))
    call = make_call(
        64, score_mod=lambda s, b, h, q, kv: s + bias[b, h, q, kv], q_len=256, kv_len=256
    )
    made = compiled("sm_90", call)["key_kernel"]
    assert num_atomics(made) == 0


def test_a_score_was_rounded_otherwise_than_in_the_forward() -> None:
    """Of `score * 90 + distance * 0.3` one kernel fused the first product, another the second: of a
    score of 800, probabilities of the backward were 6e-5 off."""
    call = make_call(
        16, torch.float32, lambda s, b, h, q, kv: s * 90 + (q - kv) * 0.3, q_len=256, kv_len=256
    )
    kernels = forward_kernels("sm_90", call) | compiled("sm_90", call)
    for name in ("forward_kernel", "row_kernel", "key_kernel"):
        uses = [line for line in kernels[name].text.splitlines() if "0f3E99999A" in line]
        assert any("mul.rn.f32" in line for line in uses), name
        assert not any("fma" in line for line in uses), name


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_100", "gfx942"])
def test_other_targets_fit(target: str) -> None:
    call = make_call(128, score_mod=softcap, mask_mod=causal, q_len=512, kv_len=512)
    made = compiled(target, call)
    for name in ("row_kernel", "key_kernel"):
        assert made[name].shared <= TARGETS[target][1].shared_bytes
        assert (made[name].spills or 0) <= 384


@pytest.mark.long
def test_deterministic_gradients_compile() -> None:
    table = learned((32, 1024))
    call = make_call(
        64,
        score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + 511],
        q_len=512,
        kv_len=512,
        deterministic=True,
    )
    made = compiled("sm_90", call)["key_kernel"]
    assert ".add.u64" in made.text


@pytest.mark.long
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(512, torch.bfloat16), (256, torch.float32)], ids=str
)
def test_wide_heads_fit_a_small_device(head_dim: int, dtype: torch.dtype) -> None:
    made = compiled("sm_86", make_call(head_dim, dtype, mask_mod=causal, q_len=256, kv_len=256))
    assert {"row_kernel", "key_kernel"} <= set(made)
