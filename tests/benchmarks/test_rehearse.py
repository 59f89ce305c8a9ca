"""What a suite will time is run once, in processes side by side, each case by one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_cases, gpu_peers, rehearse
from benchmarks.gpu_cases import GpuCase
from benchmarks.gpu_peers import CONTENDERS

CASES = [GpuCase(variant, 1, 2, 2, 64, 64, 16) for variant in ("full", "causal", "prefix")]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu, gpu_cases, gpu_peers):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setitem(rehearse.SUITES, "gpu", CASES)


@pytest.mark.usefixtures("on_the_cpu")
def test_both_phases_of_a_share_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse.main(["--peers", "--jobs", "2", "--part", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [CASES[0].name, CASES[2].name]
    wanted = [f"{phase} {name}: attnloom" for name in names for phase in ("forward", "backward")]
    assert [line.partition(",")[0] for line in lines] == wanted


@pytest.mark.usefixtures("on_the_cpu")
def test_a_peer_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(case: GpuCase, learned: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setitem(CONTENDERS, "fa4", gpu_peers.Contender(broken))
    (line, _) = rehearse.rehearsed(CASES[:1], "gpu", ["fa4"])
    assert "attnloom," in line
    assert "fa4 cannot run forward of" in capsys.readouterr().err


def test_each_process_has_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Started:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            started.append(command)

        def wait(self) -> int:
            return int("1" in started[0][-1:])

    monkeypatch.setattr(rehearse.subprocess, "Popen", Started)
    monkeypatch.setitem(rehearse.SUITES, "gpu", CASES)
    assert rehearse.main(["--jobs", "8"]) == 0
    assert [command[-2:] for command in started] == [["--part", str(i)] for i in range(3)]
    assert rehearse.main(["--cases", "no such"]) == 1
