"""Rows, tables, verdicts and rendering of the benchmarks."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import render, rows, tables
from benchmarks.cases import DTYPES, VARIANTS, decode_cases, document_ids, prefill_cases
from benchmarks.contenders import CONTENDERS
from benchmarks.rows import Row, geometric_mean
from benchmarks.suites import Selection, cpu_suite
from benchmarks.timing import MIN_TURNS, RUNS_A_TURN, alternate
from benchmarks.verdict import judge

DOCUMENTS = sorted(Path(__file__).parents[2].glob("*.md")) + sorted(
    Path(__file__).parents[2].glob("docs/**/*.md")
)
WIN = Row("cpu", "full-s512-d64", "forward", "ms", 1.0, dtype="fp32", peer="torch-flex", theirs=4.0)
LOSS = dataclasses.replace(WIN, case="causal-s512-d64", theirs=0.5)
HEAD = rows.header("attnloom")


def test_rows_survive_json(tmp_path):
    path = tmp_path / "results.json"
    rows.write(path, HEAD, [WIN, LOSS])
    entries = json.loads(path.read_text())
    assert entries[0]["header"] is True
    assert (entries[1]["ours_ms"], entries[1]["peer_ms"], entries[1]["ratio"]) == (1.0, 4.0, 4.0)
    assert rows.read(path) == (HEAD, [WIN, LOSS])


def test_means_and_losses():
    assert geometric_mean([4.0, 0.25]) == pytest.approx(1.0)
    assert "causal-s512-d64" in tables.losses([WIN, LOSS])
    assert "full-s512-d64" not in tables.losses([WIN, LOSS])
    assert tables.losses([WIN]) == "No peer was better in any row."
    assert "1.41" in tables.mean_table([WIN, LOSS])


def test_targets_are_reached_missed_or_not_measured():
    words = {v.target.text: v.word for v in judge([WIN])}
    assert words["forward over compiled torch flex, fp32, geometric mean"] == "reached"
    assert words["forward over compiled torch flex, bf16, geometric mean"] == "not measured"
    words = {v.target.text: v.word for v in judge([WIN, LOSS])}
    assert words["forward over compiled torch flex, fp32, geometric mean"] == "missed"
    assert words["forward over compiled torch flex, worst case"] == "missed"


def test_render_says_where_nothing_was_measured(tmp_path):
    text = "<!-- benchmarks:cpu.json:means -->\n<!-- /benchmarks -->\n"
    once = render.render(text, tmp_path)
    assert "No results are committed yet; `python -m benchmarks.run --json" in once
    assert render.render(once, tmp_path) == once
    rows.write(tmp_path / "cpu.json", HEAD, [WIN])
    assert "torch-flex" in render.render(once, tmp_path)


def test_render_replaces_only_what_stands_between_markers(tmp_path):
    rows.write(tmp_path / "cpu.json", HEAD, [WIN, LOSS])
    text = "before\n<!-- benchmarks:cpu.json:losses -->\nold\n<!-- /benchmarks -->\nafter\n"
    once = render.render(text, tmp_path)
    assert once.startswith("before\n<!-- benchmarks:cpu.json:losses -->\n")
    assert once.endswith("<!-- /benchmarks -->\nafter\n")
    assert "old" not in once
    assert "causal-s512-d64" in once
    assert render.render(once, tmp_path) == once


def test_documents_show_what_the_results_say():
    assert render.main([*map(str, DOCUMENTS), "--check"]) == 0


def test_alternation_measures_every_callable_equally_often():
    calls = []
    samples = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 0.0)
    turn = ["a"] * (1 + RUNS_A_TURN) + ["b"] * (1 + RUNS_A_TURN)
    assert calls == ["a", "b"] * 2 + turn * MIN_TURNS
    assert samples["a"].num_runs == samples["b"].num_runs >= MIN_TURNS * RUNS_A_TURN
    assert samples["a"].p10_ms <= samples["a"].median_ms <= samples["a"].p90_ms


def test_there_are_24_prefill_cases_a_dtype():
    cases = prefill_cases(["fp32"], all_sizes=False)
    assert len(cases) == len({case.name for case in cases}) == 24
    assert len(prefill_cases(["fp32"], all_sizes=True)) == 48
    assert {case.variant for case in cases + decode_cases(list(DTYPES))} <= VARIANTS.keys()


def test_documents_are_uneven_and_all_there():
    ids = document_ids(1000, num_documents=8)
    assert ids.unique().tolist() == list(range(8))
    assert ids.bincount().unique().numel() > 1


def test_a_contender_that_computes_something_else_is_not_timed(monkeypatch):
    wrong = dataclasses.replace(CONTENDERS["math"], prepare=lambda case: lambda q, k, v: v * 0.5)
    monkeypatch.setitem(CONTENDERS, "math", wrong)
    selection = Selection("math", ("sdpa",), ("fp32",), cases=("full-s512",), budget_s=0.0)
    with pytest.raises(RuntimeError, match="full-s512-d128 fp32: math and sdpa differ by"):
        next(cpu_suite(selection))
