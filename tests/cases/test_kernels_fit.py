"""Kernels that found no configuration elsewhere, compiled for the devices of the reports: no such
device is needed, and none has run them here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from attnloom.backends.registry import AttentionCall
from tests.kernels.cross_compile import TARGETS, Compiled
from tests.kernels.test_triton_compile import causal, compiled, make_call
from tests.kernels.test_triton_compile_backward import compiled as compiled_backward

BF16, FP16 = torch.bfloat16, torch.float16


def training(target: str, call: AttentionCall) -> dict[str, Compiled]:
    """Kernels of forward and backward; all fit the device."""
    made = compiled(target, call) | compiled_backward(target, call)
    assert made.keys() == {"forward_kernel", "delta_kernel", "row_kernel", "key_kernel"}
    for name, kernel in made.items():
        assert kernel.shared <= TARGETS[target][1].shared_bytes, name
    return made


def with_values(call: AttentionCall, value_dim: int) -> AttentionCall:
    """The same call with values of another width than the keys."""
    value = torch.empty(*call.key.shape[:3], value_dim, dtype=call.key.dtype)
    return replace(call, value=value)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_86", pytest.param("sm_75", marks=pytest.mark.long)])
def test_case_041_keys_of_192_and_values_of_128(target: str) -> None:
    """139,776 bytes of shared memory were asked for where an sm_86 has 101,376: no valid config."""
    call = make_call(192, BF16, mask_mod=causal, q_len=2048, kv_len=2048)
    training(target, with_values(call, 128))


@pytest.mark.slow
def test_case_041_decode_of_keys_of_192_and_values_of_128() -> None:
    call = with_values(make_call(192, BF16, q_len=1, kv_len=2048), 128)
    made = compiled("sm_86", call)
    assert made.keys() == {"decode_kernel", "combine_kernel"}
    assert all(m.shared <= TARGETS["sm_86"][1].shared_bytes for m in made.values())


@pytest.mark.slow
def test_case_042_wide_heads_on_hopper() -> None:
    """A wide head dimension asked for 247,808 of 232,448 bytes."""
    training("sm_90", make_call(512, BF16, mask_mod=causal, q_len=1024, kv_len=1024))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_case_052_turing_has_no_matrix_instructions_in_triton(dtype: torch.dtype) -> None:
    """An RTX 2080 Ti did not run at all. Every kernel is made of multiply-adds there, whose tiles
    are those of float32: larger ones spilled 652 bytes a thread."""
    made = training("sm_75", make_call(64, dtype, mask_mod=causal, q_len=512, kv_len=512))
    assert [m.spills for m in made.values()] == [0, 0, 0, 0]
    assert "mma" not in "".join(m.text for m in made.values())
