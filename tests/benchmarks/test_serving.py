"""The program that measures serving, on a model small enough for a test."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
import torch

from attnloom.serving import random_decoder
from benchmarks import serving
from benchmarks.serving_peers import Workload, attnloom_engine, sdpa
from tests.serving.models import widen

SMALL = dataclasses.replace(
    serving.SHAPES["small"], hidden_size=64, intermediate_size=96, vocab_size=256, num_layers=2
)


def test_contenders_write_the_same_texts() -> None:
    model = random_decoder(SMALL, "cpu", torch.float32)
    widen(model)
    work = Workload([[1, 2, 3], [4] * 140, list(range(17))], 6)
    ours = attnloom_engine(model, work)
    assert ours.tokens == sdpa(model, work).tokens
    assert ours.seconds > 0 and [len(row) for row in ours.tokens] == [6, 6, 6]


def test_rows_and_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    model = random_decoder(SMALL, "cpu", torch.float32)
    args = argparse.Namespace(sequences=2, prompt=8, tokens=4, peers=["sdpa"], runs=1)
    work = serving.workload(args, 256)
    assert [len(p) for p in work.prompts] == [4, 8]
    rows = serving.measure(model, work, args)
    assert "sdpa: 8 of 8 tokens as ours" in capsys.readouterr().err
    assert [row.peer for row in rows] == ["sdpa", "bound"]
    weights = sum(p.numel() for p in model.parameters()) - 256 * 64
    held = 2 * 2 * 2 * 64  # keys and values, layers, heads, D
    assert serving.step_bytes(model, work) == 4 * (weights + (4 + 2 + 8 + 2) * held)
    assert rows[0].case in serving.table(rows)
