"""The program that measures serving, on a model small enough for a test."""

from __future__ import annotations

import argparse
import dataclasses
import math

import pytest
import torch

from attnloom.serving import Decoder, random_decoder
from benchmarks import render, rows, serving, serving_table
from benchmarks.serving_peers import PEERS, attnloom_engine
from benchmarks.serving_work import (
    Speed,
    Workload,
    decode_bytes,
    least_seconds,
    mixed,
    prompt_flops,
    together,
)
from tests.serving.models import widen

SMALL = dataclasses.replace(
    serving.SHAPES["small"],
    hidden_size=64,
    intermediate_size=96,
    vocab_size=256,
    num_layers=2,
    windows=(None,) * 2,
)
HEAD = rows.header("attnloom")


@pytest.fixture(scope="module")
def model() -> Decoder:
    made = random_decoder(SMALL, "cpu", torch.float32)
    widen(made)
    return made


def test_contenders_write_the_same_texts(model: Decoder) -> None:
    """More requests than run at once, prompts in several steps, outputs that end one by one."""
    work = Workload([[1, 2, 3], [4] * 140, list(range(17)), [7]], [6, 3, 1, 5], 2, 50)
    ours = attnloom_engine(model, work)(math.inf)
    theirs = PEERS["sdpa"](model, work)(math.inf)
    assert ours.tokens == theirs.tokens
    assert [len(row) for row in ours.tokens] == work.counts
    assert ours.num_tokens == 15
    assert 0 < theirs.decode_seconds < theirs.seconds
    assert ours.seconds > 0


def test_who_is_stopped_has_what_was_done_by_then(model: Decoder) -> None:
    work = Workload([[1, 2, 3]] * 4, [30] * 4, 2, 50)
    for prepare in (attnloom_engine, PEERS["sdpa"]):
        served = prepare(model, work)(0.0)
        assert served.num_tokens < 120 and len(served.tokens) == 4


def test_batches_are_sorted_by_output() -> None:
    work = Workload([[1]] * 5, [9, 2, 7, 3, 1], 2, 50)
    assert work.batches() == [[4, 1], [3, 2], [0]]
    assert work.part([3, 2]).counts == [3, 7]


def test_works_are_the_same_each_time() -> None:
    work = mixed(10, (64, 32), 4, 20, 256)
    assert work == mixed(10, (64, 32), 4, 20, 256)
    assert sorted(map(len, work.prompts))[::9] == [4, 64]
    assert sorted(work.counts)[::9] == [2, 32]
    assert work.counts != sorted(work.counts)
    work = together(2, 8, 4, 256)
    assert [len(p) for p in work.prompts] == [4, 8] and work.step_tokens == 12


def test_the_bound(model: Decoder) -> None:
    work = together(2, 8, 4, 256)
    weights = sum(p.numel() for p in model.parameters()) - 256 * 64
    held = 2 * 2 * 2 * 64  # keys and values, layers, heads, D
    seen = sum(length + i for length in (4, 8) for i in (1, 2, 3))
    assert decode_bytes(model, work) == 4 * (3 * weights + seen * held)
    one = Workload([[1] * 3], [1], 1, 8)  # a prompt alone
    in_layers = weights - 256 * 64 - 64
    scores = 2 * 8 * (1 + 2 + 3)
    assert prompt_flops(model, one) == 2 * in_layers * 3 + 2 * 256 * 64 + 4 * 64 * scores
    assert least_seconds(model, one, Speed(1.0, 2.0)) == (prompt_flops(model, one) / 2, 0.0)
    waits = Workload([[1]] * 5, [3, 3, 3, 3, 9], 2, 8)
    assert waits.num_steps == 8
    assert dataclasses.replace(waits, counts=[3] * 5).num_steps == 5


@pytest.mark.parametrize("phase", ["requests", "decode"])
def test_rows_and_their_table(
    model: Decoder, phase: str, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    args = argparse.Namespace(limit=math.inf, runs=1)
    work = together(2, 8, 4, 256)
    contenders = {"attnloom": attnloom_engine, "sdpa": PEERS["sdpa"]}
    found = serving.measure(model, work, phase, contenders, args)
    assert "sdpa: " in (said := capsys.readouterr().err) and "8 of 8 tokens, 8 as ours" in said
    made = serving.make_rows(model, work, phase, found, 5.0)
    assert [row.peer for row in made] == ["sdpa", "bound"]
    assert made[0].case == "r2-p4-8-t4" and made[1].theirs == 5.0
    assert "200,000" in serving_table.table(made)
    rows.write(tmp_path / "h200-serving.json", HEAD, made)
    text = "<!-- benchmarks:h200-serving.json:serving -->\n<!-- /benchmarks -->\n"
    assert "python -m benchmarks.serving --json" in render.render(text, tmp_path / "none")
    assert made[0].case in render.render(text, tmp_path)


def test_a_peer_that_was_stopped_says_so(model: Decoder) -> None:
    work = together(2, 8, 4, 256)
    found = {"attnloom": serving.Measured([1.0], None), "sdpa": serving.Measured([2.0], 5)}
    made = serving.make_rows(model, work, "requests", found, 0.5)
    assert [row.peer for row in made] == ["sdpa, 5 tokens", "bound"]
