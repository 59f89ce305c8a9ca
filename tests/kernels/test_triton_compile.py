"""Forward and decode compiled for GPUs that are not there: they fit, and spill within bounds.

What launchers would do on the device is done here: tiles that do not fit are passed over.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

import attnloom
from attnloom import PageTable
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import launch_decode, launch_forward, launch_paged
from attnloom.backends.triton.configs import Tile
from attnloom.backends.triton.launch import TritonBackend
from attnloom.ir.node import DType
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score
from tests.kernels.cross_compile import TARGETS, Compiled, compile_for, device_is

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass
class _Launcher:
    """In place of launcher.Launcher: compiles, as the device's driver refuses what is too large."""

    kernel: object
    config: object
    grid: int
    options: dict
    operands: int = 0  # how many of the first may begin anywhere: compiled as if aligned
    target = "sm_90"
    compiled = []  # (kernel name, Compiled) of the last call

    spills = 0
    takes_tensors = False

    def __call__(self, aligned, *args) -> None:
        made = compile_for(self.target, self.kernel, (*args, self.config), self.options)
        limit = TARGETS[self.target][1].shared_bytes
        if made.shared > limit:
            raise OutOfResources(made.shared, limit, "shared memory")
        self.spills = (made.spills or 0) // 4
        self.compiled.append((self.kernel.__name__, made))


def compiled(target: str, call: AttentionCall) -> dict[str, Compiled]:
    """The kernels that a forward call launches on a device, by name; of several tries the best."""
    _Launcher.target, _Launcher.compiled = target, []
    launches = (launch_forward, launch_decode, launch_paged)
    with ExitStack() as patches:
        patches.enter_context(device_is(target))
        patches.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: 0))
        for module in launches:
            patches.enter_context(mock.patch.object(module, "Launcher", _Launcher))
            patches.enter_context(mock.patch.object(module, "_ready", {}))
        TritonBackend().forward(call, want_max_scores=True)
    best: dict[str, Compiled] = {}
    for name, made in _Launcher.compiled:
        if name not in best or (made.spills or 0) < (best[name].spills or 0):
            best[name] = made
    return best


def make_call(
    head_dim, dtype=BF16, score_mod=None, mask_mod=None, q_len=8192, kv_len=8192, **options
):
    """A call on uninitialised memory: kernels are compiled for it, never run."""
    query = torch.empty(1, 32, q_len, head_dim, dtype=dtype)
    key = torch.empty(1, 8, kv_len, head_dim, dtype=dtype)
    blocks = mask = None
    if mask_mod is not None:
        mask = trace_mask(mask_mod, CPU)
        blocks = attnloom.create_block_mask(mask_mod, None, None, q_len, kv_len, "cpu").lists()
    score = None if score_mod is None else trace_score(score_mod, DType.F32, CPU)
    return AttentionCall(query, key, key, score, mask, blocks, 0.125, KernelOptions(**options))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def softcap(score, b, h, q_idx, kv_idx):
    return 30 * torch.tanh(score / 30)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
def test_hopper_forward_copies_by_tma_and_multiplies_by_wgmma(head_dim):
    made = compiled("sm_90", make_call(head_dim, mask_mod=causal))["forward_kernel"]
    assert made.spills <= 32
    assert "cp.async.bulk.tensor" in made.text
    assert "wgmma.mma_async" in made.text


def test_ampere_loads_are_vectors_copied_ahead():
    """Strides that the compiler could not prove aligned once made every load scalar."""
    made = compiled("sm_80", make_call(128, mask_mod=causal))["forward_kernel"]
    assert made.text.count("cp.async.cg.shared.global") >= 16
    assert made.spills <= 64


@pytest.mark.parametrize("target", ["sm_86", "sm_100", "gfx942"])
def test_other_targets_fit(target):
    made = compiled(target, make_call(128, score_mod=softcap, mask_mod=causal))["forward_kernel"]
    assert made.shared <= TARGETS[target][1].shared_bytes


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(512, BF16), pytest.param(256, FP32, marks=pytest.mark.long)], ids=str
)
def test_wide_heads_fit_a_small_device(head_dim, dtype):
    """Cases 40 to 44: a raw resource error elsewhere."""
    made = compiled("sm_86", make_call(head_dim, dtype, mask_mod=causal))["forward_kernel"]
    assert made.shared <= TARGETS["sm_86"][1].shared_bytes


@pytest.mark.parametrize(("head_dim", "at_once"), [(64, 4), (128, 2)])
def test_decode_streams_by_tma(head_dim, at_once):
    """Decode at D=64 took tiles of 128 keys, three programs a processor, where 64 are faster."""
    made = compiled("sm_90", make_call(head_dim, q_len=1, kv_len=32768))
    assert made["decode_kernel"].spills == 0
    assert made["decode_kernel"].shared * at_once <= TARGETS["sm_90"][1].shared_bytes
    assert "cp.async.bulk.tensor" in made["decode_kernel"].text
    assert made["combine_kernel"].spills == 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_a_merging_kernel_started_early_waits_before_it_reads(target):
    """Where a device cannot start it early, there is nothing to wait for."""
    made = compiled(target, make_call(128, q_len=1, kv_len=65536))
    first, second = made["decode_kernel"].text, made["combine_kernel"].text
    assert ("griddepcontrol.launch_dependents" in first) == (target == "sm_90")
    assert ("griddepcontrol.wait" in second) == (target == "sm_90")
    if target == "sm_90":
        assert second.index("griddepcontrol.wait") < second.index("ld.global")
        assert made["combine_kernel"].spills == 0


def paged_call(head_dim: int, page_size: int, q_len: int = 1, dtype=BF16) -> AttentionCall:
    """Queries over 4,096 keys in pages."""
    call = make_call(head_dim, mask_mod=causal, q_len=4096, kv_len=4096)
    lengths = torch.full((1,), 4096, dtype=torch.int32)
    pages = torch.zeros(1, 4096 // page_size, dtype=torch.int32)
    stored = torch.empty(4096 // page_size, 8, page_size, head_dim, dtype=dtype)
    table = PageTable(lengths, None, pages, page_size, 4096)
    query = torch.empty(1, 32, q_len, head_dim, dtype=dtype)
    return replace(call, query=query, key=stored, value=stored, table=table)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 32])
def test_pages_smaller_than_a_tile_are_looked_up_a_step_ahead(page_size):
    """Looked up in the step that copies them, they left room for half as many copies in flight
    (20,736 bytes), and each step waited for all of them."""
    made = compiled("sm_90", paged_call(64, page_size))["paged_kernel"]
    assert made.shared >= 2 * 4 * 64 * 64  # two stages of keys and values
    assert made.spills == 0
    assert re.search(r"cp\.async\.wait_group\s+3;", made.text)


def is_read_by_two_warps(target: str, call: AttentionCall) -> bool:
    with device_is(target):
        return launch_paged._tiles(call)[0] == Tile(16, 64, 2, 3)


def test_which_pages_are_read_by_two_warps():
    """Where two warps were not faster, or not seen, four are taken."""
    call = paged_call(128, 16)
    blocks = attnloom.create_block_mask(causal, None, None, 4096, 4096, "cpu", BLOCK_SIZE=16)
    taken = (
        *(call, paged_call(96, 16), paged_call(128, 16, 4), replace(call, blocks=None)),
        *(paged_call(64, 16), paged_call(64, 32), paged_call(64, 64), paged_call(128, 32)),
    )
    others = (
        *(paged_call(128, 64), paged_call(192, 16)),
        *(paged_call(128, 16, 5), paged_call(128, 16, dtype=FP32)),
        replace(call, blocks=blocks.lists()),
    )
    assert [is_read_by_two_warps("sm_90", one) for one in taken] == [True] * len(taken)
    assert [is_read_by_two_warps("sm_90", one) for one in others] == [False] * len(others)
    assert not is_read_by_two_warps("sm_80", call)  # not timed


@pytest.mark.slow
@pytest.mark.parametrize("score_mod", [None, softcap], ids=["plain", "softcap"])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_pages_of_16_tokens_are_gathered_by_two_warps(head_dim, q_len, score_mod):
    """Two programs share a processor's memory."""
    call = paged_call(head_dim, 16, q_len)
    score = None if score_mod is None else trace_score(score_mod, DType.F32, CPU)
    made = compiled("sm_90", replace(call, score=score))["paged_kernel"]
    assert made.spills == 0
    assert "cp.async.cg" in made.text
    assert made.shared <= TARGETS["sm_90"][1].shared_bytes // 2


def test_exact_math_calls_the_device_library():
    """The library's functions were once called through stubs that return nothing."""
    made = compiled("sm_90", make_call(64, score_mod=softcap, exact_math=True))
    assert "tanh.approx" not in made["forward_kernel"].text
    fast = compiled("sm_90", make_call(64, score_mod=softcap))
    assert "tanh.approx" in fast["forward_kernel"].text


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("q_len", [1, 8192])
def test_keys_and_values_of_eight_bits(stored, q_len):
    """Converted as they are loaded; where a device cannot, they are before (api/quantized.py)."""
    call = make_call(64, mask_mod=causal if q_len > 1 else None, q_len=q_len)
    call = replace(call, key=call.key.to(stored), value=call.value.to(stored))
    for made in compiled("sm_90", call).values():
        assert (made.spills or 0) <= 16
