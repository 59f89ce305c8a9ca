"""A decoder by kernels: on a device, and compiled for one that is not there."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from attnloom.errors import OptionError
from attnloom.serving import SamplingParams
from attnloom.serving.kernels import launch
from attnloom.serving.ops import TORCH, Heads, Norm, ops_for
from tests.kernels.cross_compile import CompilingLauncher
from tests.serving.models import GEMMA, LLAMA, prompt, tiny
from tests.serving.row_ops import DTYPES, check_appends, check_gates, check_norms, check_rotation

SHAPES = {"8b": (4096, 14336, Heads(32, 8, 128)), "odd": (1000, 1408, Heads(9, 3, 96))}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_compile(dtype: torch.dtype, target: str) -> None:
    """Next to nothing spills (None off NVIDIA), and whole vectors are loaded."""
    hidden, inner, heads = SHAPES["8b"]
    ops = launch.KernelOps()
    row = torch.zeros(2, hidden, dtype=dtype)
    projected = torch.zeros(2, (heads.num_q + 2 * heads.num_kv) * heads.dim, dtype=dtype)
    turn = (torch.zeros(2, 1, heads.dim // 2, dtype=dtype),) * 2
    CompilingLauncher.target, CompilingLauncher.compiled = target, {}
    with (
        mock.patch.object(launch, "Launcher", CompilingLauncher),
        mock.patch.dict(launch._ready, clear=True),
    ):
        ops.add_norm(row, row, Norm(row[0], 1e-5, False))
        ops.gated(torch.zeros(2, 2 * inner, dtype=dtype), "silu")
        _, key, value = ops.rotate(projected, turn, heads)
        stored = (torch.zeros(64, heads.dim, dtype=dtype),) * 2
        ops.append((key, value), stored, torch.zeros(2 * heads.num_kv, dtype=torch.int64))
    assert len(CompilingLauncher.compiled) == 4
    for name, made in CompilingLauncher.compiled.items():
        assert not made.spills or made.spills <= 8, name
        if target.startswith("sm"):
            loads = set(re.findall(r"ld\.global[.\w]*", made.text))
            assert any(".v" in load or "b64" in load for load in loads), (name, loads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_on_a_device(shape: str, dtype: torch.dtype) -> None:
    hidden, inner, heads = SHAPES[shape]
    for num_tokens in (1, 32, 1000):
        for gemma in (False, True):
            check_norms(dtype, "cuda", num_tokens, hidden, gemma)
        for activation in ("silu", "gelu", "gelu_pytorch_tanh"):
            check_gates(dtype, "cuda", num_tokens, inner, activation)
        check_rotation(dtype, "cuda", num_tokens, heads)
        check_appends(dtype, "cuda", num_tokens, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [LLAMA, GEMMA], ids=["llama", "gemma2"])
def test_texts_by_kernels_on_a_device(given: dict) -> None:
    """In float32, under graphs and in mixed steps, texts are those of torch's operators."""
    from tests.serving.test_static import events, make

    found = []
    for kernels in (False, True):
        model = tiny({**given, "head_dim": 64}).to("cuda")
        model.kernels = kernels
        engine = make(model, mode=None, cuda_graphs=True)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        prompts = [[i, *prompt(20 + 13 * i, i)] for i in range(3)]
        texts = engine.generate(prompts, params)
        found.append((texts, events(make(model, mode=None, cuda_graphs=True), 2)))
    assert found[0] == found[1]


def test_kernels_where_there_are_none() -> None:
    assert ops_for("cpu", torch.float32, None) is TORCH
    model = tiny()
    model.kernels = True
    with pytest.raises(
        OptionError, match=r"kernels is True, but the model is torch.float32 on cpu"
    ):
        _ = model.ops
