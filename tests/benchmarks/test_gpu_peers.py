"""Who takes part in the suites on a device, and what is made of the results; without a device."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from benchmarks import gpu, gpu_cases, gpu_peers, run
from benchmarks.gpu_cases import GpuCase
from benchmarks.gpu_peers import CONTENDERS, taking_part

FA4 = "flash_attn.cute.interface"
CASES = tuple(
    GpuCase(variant, 1, 2, kv_heads, 1100, 1100, 16)
    for variant, kv_heads in (
        ("full", 2),
        ("causal", 1),
        ("window1024", 2),
        ("causal+softcap", 1),
    )
)


def flash_attn_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What FlashAttention 4 documents, in float32: tensors [B, L, H, D], a window of so many keys
    before and behind the query, the log-sum-exp beside the output."""
    group = query.shape[2] // key.shape[2]
    query, key, value = (x.float().transpose(1, 2) for x in (query, key, value))
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(query.shape[2])
    behind = places[:, None] - places  # positions of a key before the query
    left, right = window_size
    if causal:
        right = 0
    if left is not None:
        scores = scores.masked_fill(behind > left, -torch.inf)
    if right is not None:
        scores = scores.masked_fill(-behind > right, -torch.inf)
    out = (scores.softmax(-1) @ value).to(torch.bfloat16).transpose(1, 2).contiguous()
    return out, scores.logsumexp(-1)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of that name, in place of FlashAttention 4."""
    module = ModuleType(FA4)
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, FA4, module)
    return module


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu, gpu_cases, gpu_peers):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "_timed", lambda run: float(run() is not None))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("installed", "on_the_cpu")
def test_flash_attention_4_is_asked_for_the_same_problem(case: GpuCase) -> None:
    phases = (gpu._forward("gpu", "forward", case), gpu._backward("gpu", case))
    for phase in phases:
        contest = gpu._Field(("fa4",))
        (row,) = contest.compare(phase)
        assert (row.peer, row.phase) == ("fa4", phase.name)
        contest.require_agreement()


@pytest.mark.usefixtures("on_the_cpu")
def test_another_window_is_seen(installed: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def one_key_more(*inputs: torch.Tensor, window_size: tuple[int, int]) -> Any:
        return flash_attn_func(*inputs, window_size=(window_size[0] - 400, window_size[1]))

    installed.flash_attn_func = one_key_more  # type: ignore[attr-defined]
    contest = gpu._Field(("fa4",))
    assert not list(contest.compare(gpu._forward("gpu", "forward", CASES[2])))
    said = "forward of window1024-b1-s1100-d16: attnloom and fa4 differ by"
    assert said in capsys.readouterr().err
    with pytest.raises(gpu.DisagreementError, match=said):
        contest.require_agreement()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "case",
    [
        GpuCase("prefix", 1, 2, 2, 64, 64, 16),
        GpuCase("causal+alibi", 1, 2, 2, 64, 64, 16),
        GpuCase("full", 1, 2, 2, 1, 64, 16),
    ],
    ids=lambda case: case.name,
)
def test_what_flash_attention_4_has_no_option_for_is_left_out(case: GpuCase) -> None:
    assert CONTENDERS["fa4"].prepare(case, None) is None


def test_an_absent_package_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("flash_attn", "flash_attn.cute", FA4):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    assert taking_part(("fa4", "sdpa-cudnn", "torch-flex-flash")) == ("sdpa-cudnn",)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "fa4 takes no part",
        "torch-flex-flash takes no part",
    ]
    assert all(FA4 in line and "flash_attn" in line for line in lines)


@pytest.mark.usefixtures("installed")
def test_an_installed_package_takes_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert taking_part(gpu_peers.GPU_PEERS) == gpu_peers.GPU_PEERS
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("on_the_cpu")
def test_torch_flex_is_told_which_kernels_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    def flex(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        told.append(options)
        return inputs[0]

    monkeypatch.setattr(torch_flex, "flex_attention", flex)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = GpuCase("causal", 1, 4, 2, 64, 64, 16)
    for name in ("torch-flex-flash", "torch-flex"):
        attention = CONTENDERS[name].prepare(case, None)
        assert attention is not None
        attention(*case.inputs())
    assert [options.get("kernel_options") for options in told] == [{"BACKEND": "FLASH"}, None]
    assert all(options["enable_gqa"] and options["block_mask"] is not None for options in told)
    learned = torch.zeros(4)
    assert CONTENDERS["torch-flex-flash"].prepare(case, learned) is None


@pytest.mark.usefixtures("on_the_cpu")
def test_two_attentions_of_torch_flex_keep_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing the second forgot the graph of the first, whose first timed run was a compilation
    of seconds, timed once because it was so slow."""
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append("graph")
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setitem(
        CONTENDERS,
        "torch-flex-flash",
        gpu_peers.Contender(functools.partial(gpu_peers._torch_flex, {"PRESCALE_QK": True})),
    )
    case = GpuCase("causal", 1, 1, 1, 128, 128, 16)
    phase = gpu._forward("gpu", "forward", case)
    runs, _ = gpu._results(phase, ("torch-flex", "torch-flex-flash"))
    assert len(compiled) == 2
    for name in ("torch-flex", "torch-flex-flash"):
        runs[name]()
    assert len(compiled) == 2


@pytest.mark.usefixtures("on_the_cpu")
def test_who_is_wrong_does_not_end_the_suite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One peer's wrong gradient ended a run on a device, and what came after was not measured."""

    def prepare(factor: float, case: GpuCase, learned: torch.Tensor | None) -> Any:
        attention = gpu_peers.attention_of("reference", case, learned)
        return lambda query, key, value: attention(query, key, value) * factor

    for name, factor in (("fa4", 0.5), ("sdpa-cudnn", 1.0)):
        contender = gpu_peers.Contender(functools.partial(prepare, factor))
        monkeypatch.setitem(CONTENDERS, name, contender)
    cases = tuple(GpuCase("causal", 1, 2, 2, length, length, 16) for length in (32, 64))
    monkeypatch.setattr(gpu, "SCALING", cases)
    command = ["--suite", "scaling", "--peers", "fa4", "sdpa-cudnn"]
    assert run.main(command) == 1
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if line.startswith("[")]
    assert len(lines) == 4 and all("sdpa-cudnn" in line for line in lines)
    assert printed.err.count("attnloom and fa4 differ by") == 8  # as they came, and at the end


def test_a_peer_that_refuses_a_phase_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on_the_cpu: None
) -> None:
    def refuses(case: GpuCase, learned: torch.Tensor | None) -> Any:
        raise NotImplementedError("no backward\n  target: flex_attention_backward")

    monkeypatch.setitem(CONTENDERS, "fa4", gpu_peers.Contender(refuses))
    case = GpuCase("causal", 1, 2, 2, 32, 32, 16)
    assert not list(gpu._Field(("fa4",)).compare(gpu._backward("gpu", case)))
    assert capsys.readouterr().err == (
        "fa4 cannot run backward of causal-b1-s32-d16: NotImplementedError: no backward\n"
    )
