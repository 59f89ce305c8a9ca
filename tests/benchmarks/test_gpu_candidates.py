"""The programs that prepare and try candidates, without a GPU."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from attnloom import flex_attention
from attnloom.api import near, repeats
from attnloom.backends.gluon import configs_backward, configs_forward
from benchmarks import candidates, gpu_candidates, gpu_cases, prewarm
from benchmarks.candidates import (
    CANDIDATES,
    Candidate,
    GluonBackward,
    GluonForward,
)
from benchmarks.gpu_candidates import Trial
from benchmarks.gpu_cases import GpuCase
from benchmarks.timing import Sample

NOTHING = Trial("a candidate", "a case", "forward", "failed")
CASE = GpuCase("causal", 1, 4, 4, 40, 40, 16)


def test_candidates_are_not_what_is_in_use() -> None:
    assert len({candidate.name for candidate in CANDIDATES}) == len(CANDIDATES)
    for candidate in CANDIDATES:
        case, change = candidate.cases[0], candidate.change
        if isinstance(change, GluonForward):
            head_dim = case.head_dim
            assert change.form not in configs_forward.forms(head_dim, head_dim, 128)
        elif isinstance(change, GluonBackward) and case.head_dim == 128 and not case.score:
            if case.mask == "documents12":
                continue  # which `auto` leaves to the portable kernels
            assert change.form != configs_backward.form_for(128, 128, True, may_fold=True)


@pytest.mark.parametrize(
    ("code", "verdict", "detail"),
    [
        ("import time; time.sleep(60)", "hung", "nothing after 0 s"),
        ("raise RuntimeError('an illegal address')", "failed", "RuntimeError: an illegal address"),
        ("import os; os.abort()", "failed", "exit status -6"),
    ],
)
def test_a_candidate_that_ends_badly_is_a_row(code: str, verdict: str, detail: str) -> None:
    limit = 0.4 if verdict == "hung" else 30.0  # a process may take a second to begin
    found = gpu_candidates.run_child([sys.executable, "-c", code], NOTHING, limit)
    assert (found.candidate, found.verdict, found.detail) == ("a candidate", verdict, detail)
    assert found.gain is None


def test_results_come_back_from_a_child() -> None:
    fields = '{"candidate": "x", "case": "y", "phase": "forward", "verdict": "right"}'
    code = f"print('noise'); print({gpu_candidates._RESULT!r} + {fields!r})"
    found = gpu_candidates.run_child([sys.executable, "-c", code], NOTHING, 10.0)
    assert found == Trial("x", "y", "forward", "right")


def test_calls_that_are_repeated_are_kept_apart() -> None:
    """Without a mask a call is the same one under every change: all rows of a table were times of
    the first."""
    ways = [candidates.GluonForward(form) for form in configs_forward.forms(64, 64, None)]
    for module, name in ((repeats, "_buckets"), (repeats, "_met"), (near, "_calls")):
        found = []
        for way in (*ways, *ways):
            with way.installed():
                found.append(id(getattr(module, name)))
        apart = {*found, id(getattr(module, name))}
        assert found[: len(ways)] == found[len(ways) :]
        assert len(apart) == len(ways) + 1


@dataclass(frozen=True)
class Change:
    """In place of a form: results are off by this factor inside."""

    factor: float
    backend: str = "candidate"

    def installed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu_cases, gpu_candidates):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_candidates, "SMALL_LEN", 50)
    times = {"ours": Sample(2.0, 2.0, 2.0, 11), "seen": Sample(3.0, 3.0, 3.0, 11)}
    monkeypatch.setattr(gpu_candidates, "alternate", lambda runs: times)

    def attention_of(backend: str, case: GpuCase, learned: torch.Tensor | None):
        factor = float(backend) if backend != "auto" else 1.0
        options = {"backend": "tiled"}
        score_mod = case.score_mod(learned)
        attend = functools.partial(flex_attention, score_mod=score_mod, kernel_options=options)
        return lambda q, k, v: attend(q, k, v) * factor

    monkeypatch.setattr(gpu_candidates, "attention_of", attention_of)


@pytest.mark.parametrize("variant", ["full", "full+slope"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("factor", [1.0, 1.02, float("nan")])
def test_only_what_is_right_is_timed(
    monkeypatch: pytest.MonkeyPatch, on_the_cpu: None, factor: float, phase: str, variant: str
) -> None:
    case = GpuCase(variant, 1, 4, 4, 40, 40, 16)
    change = Change(factor, backend=str(factor))
    monkeypatch.setattr(Candidate, "phase", phase)
    tried = Candidate("tried", change, (case,), 0, "")  # type: ignore[arg-type]
    monkeypatch.setattr(candidates, "CANDIDATES", (tried,))
    found = gpu_candidates.check_one("tried", case.name)
    if factor == 1.0:
        found = gpu_candidates.time_one(found)
        assert (found.verdict, found.gain) == ("right", 1.5)
        assert found.error_ppm == pytest.approx(found.seen_error_ppm, rel=0.05)
    else:
        assert (found.verdict, found.gain) == ("wrong", None)
        assert found.detail == "too far from the float64 oracle"


def test_the_table_and_the_file_say_the_same(tmp_path) -> None:
    right = Trial("x", "y", "forward", "right", "", 2.0, 3.0, 1500.4, 1500.2)
    gpu_candidates.write(tmp_path / "found.json", [right, NOTHING])
    head, *entries = json.loads((tmp_path / "found.json").read_text())
    assert head["header"] and [e["verdict"] for e in entries] == ["right", "failed"]
    assert entries[0]["gain"] == 1.5
    table = gpu_candidates.table_of([right, NOTHING])
    assert "1.500" in table and "| a candidate" in table


def test_a_candidate_that_faults_when_timed_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import json, os, sys
for trial in json.load(sys.stdin):
    if trial["candidate"] == "faulty":
        print("an illegal address", flush=True)
        os._exit(1)
    print(PREFIX + json.dumps(trial | {"ours_ms": 1.0, "seen_ms": 2.0}), flush=True)
"""
    code = code.replace("PREFIX", repr(gpu_candidates._RESULT))
    monkeypatch.setattr(gpu_candidates, "_SELF", (sys.executable, "-c", code))
    names = ("first", "faulty", "wrong", "last")
    verdicts = ("right", "right", "wrong", "right")
    trials = [Trial(n, "x", "forward", v) for n, v in zip(names, verdicts, strict=True)]
    found = dict(gpu_candidates.timed(trials, 10.0))
    assert [(place, t.candidate, t.verdict, t.gain) for place, t in sorted(found.items())] == [
        (0, "first", "right", 2.0),
        (1, "faulty", "failed", None),
        (3, "last", "right", 2.0),
    ]
    assert found[1].detail == "timed: an illegal address"


TWO = (
    Candidate(
        "a backward",
        GluonBackward(configs_backward.form_for(64, 64, may_mask=True, may_fold=True)),
        (CASE, GpuCase("full", 1, 4, 4, 40, 40, 16)),
        0,
        "",
    ),
    Candidate("a forward", GluonForward(configs_forward.forms(64, 64, None)[0]), (CASE,), 0, ""),
)


def test_a_run_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    ends = iter(["hung", "right"])
    monkeypatch.setattr(
        gpu_candidates, "run_child", lambda *_: Trial("x", "y", "forward", next(ends))
    )
    monkeypatch.setattr(candidates, "CANDIDATES", TWO)
    monkeypatch.setattr(gpu_candidates, "timed", lambda trials, limit: ())
    assert gpu_candidates.main(["--only", "a backward"]) == 0
    assert capsys.readouterr().out.count("x: y forward") == 2
    assert gpu_candidates.main(["--only", "a backward", "--budget", "1"]) == 1


def test_a_run_that_is_cut_short_leaves_what_it_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    found = [Trial("x", "y", "forward", "right")]
    monkeypatch.setattr(gpu_candidates, "run_child", lambda *_: found.pop())
    monkeypatch.setattr(candidates, "CANDIDATES", TWO)
    with pytest.raises(IndexError):
        gpu_candidates.main(["--only", "a backward", "--json", str(tmp_path / "found.json")])
    _, *entries = json.loads((tmp_path / "found.json").read_text())
    assert [entry["candidate"] for entry in entries] == ["x"]


def test_prewarm_covers_every_case_of_its_suites() -> None:
    assert {job.case for job in prewarm.jobs_of("gpu")} == set(gpu_cases.PREFILL)
    assert {job.how for job in prewarm.jobs_of("decode")} == {"auto", "triton"}
    assert len(prewarm.jobs_of("candidates")) == sum(len(c.cases) for c in CANDIDATES)
    assert len(set(prewarm.jobs_of("scaling"))) == 4 * len(gpu_cases.SCALING)
    assert {job.how for job in prewarm.jobs_of("scaling", ("auto",))} == {"auto"}


def test_prewarm_finds_the_smaller_blocks_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiled tiles of 128, and the suite those of 64 once more."""
    compiled = []
    monkeypatch.setattr(
        prewarm, "_compile", lambda launch, aligned, *args: compiled.append(launch.config)
    )
    case = GpuCase("documents12", 2, 8, 8, 2048, 2048, 64)
    outcome = prewarm.compile_job(prewarm.Job(case, "forward", "auto"))
    assert outcome.error == ""
    assert [(config.CONSUMERS, config.TILE_N, config.SUB) for config in compiled] == [(1, 64, 1)]


def test_prewarm_says_which_call_failed(capsys) -> None:
    job = prewarm.Job(CASE, "forward", "auto")
    outcomes = [prewarm.Outcome(job, 1.0, 2, 0), prewarm.Outcome(job, 1.0, 0, 1, "OSError: full")]
    assert prewarm.report(iter(outcomes[:1])) == 0
    assert prewarm.report(iter(outcomes)) == 1
    said = capsys.readouterr()
    assert "2 calls: 2 kernels compiled, 1 found" in said.out
    assert "OSError: full" in said.err


@pytest.mark.long
def test_a_second_prewarm_finds_every_kernel(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    job = prewarm.Job(gpu_cases.DECODE[0], "forward", "triton")
    (first,) = prewarm.run_jobs([job], 1)
    (second,) = prewarm.run_jobs([job], 1)
    assert first.error == second.error == ""
    assert first.compiled > 0 and (second.compiled, second.found) == (0, first.compiled)
