"""The cases of tests/cases/test_recompiles.py on a Hopper GPU that is not there: which kernels
would be compiled for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import attnloom
from attnloom.backends.triton.beside import wait_for_all
from benchmarks.pretended import hopper
from tests.cases import test_recompiles
from tests.kernels.recompiles import Kernel, beyond_the_first

_Config = make_dataclass("_Config", ["TILE", "TMA"], frozen=True)
NAMES = sorted(
    name
    for name in vars(test_recompiles)
    if name.startswith("test_case") and not name.startswith("test_case_089")
)


def recompiles(call: Callable[[int], Any], repeats: int = 5) -> int:
    """What the listener of test_gpu_cases.py counts; repetitions are found in Triton's memory."""
    calls: list[list[Kernel]] = []
    known: set[object] = set()
    with hopper() as gpu:
        for n in range(repeats + 1):
            start = len(gpu.compiled)
            call(n)
            wait_for_all()
            made: list[Kernel] = []
            for asked in gpu.compiled[start:]:
                if asked not in known:
                    known.add(asked)
                    made.append(Kernel.of(asked.kernel, asked.config, asked.kinds))
            calls.append(made)
    return beyond_the_first(calls)


@pytest.mark.parametrize("name", NAMES)
def test_variations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_recompiles, "kernels_after_the_first", recompiles)
    getattr(test_recompiles, name)()


@pytest.mark.parametrize(
    "values", [[4, 7, 0, 1, -3, 90], [0.5, 2.0, 1.0, 0.0, -1.5, 1e-3]], ids=str
)
def test_captured_numbers(values: list[int | float]) -> None:
    def call(n: int) -> None:
        value = values[n]
        test_recompiles.attend(score_mod=lambda s, b, h, i, j: s * value + (i - j) * value)

    assert recompiles(call) == 0


def test_where_views_begin_compiled_kernels() -> None:
    """Triton tells pointers apart by whether they begin at multiples of 16 bytes: eight kernels for
    three inputs that the configuration calls unaligned anyway."""

    def call(n: int) -> None:
        q, k, v = (
            torch.zeros(1, 2, 300, 64 + 2, dtype=torch.bfloat16)[
                ..., (n >> i) % 2 : 64 + (n >> i) % 2
            ]
            for i in range(3)
        )
        for x in (q, k, v):
            x.requires_grad_()
        attnloom.flex_attention(q, k, v).sum().backward()

    assert recompiles(call, 7) == 0


def test_numbers_of_splits_compiled_a_merge_each() -> None:
    """Two, four, eight and sixteen splits had kernels of their own that merged them."""

    def call(n: int) -> None:
        q, x = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 100 << n, 64)
        attnloom.flex_attention(*(t.bfloat16() for t in (q, x, x)))

    assert recompiles(call, 8) == 0


def test_the_rule() -> None:
    def kernel(tile: int, tma: bool, *kinds: str) -> list[Kernel]:
        return [Kernel.of("row_kernel", _Config(tile, tma), kinds)]

    four = [kernel(tile, tma) for tile in (64, 128) for tma in (True, False)]
    assert beyond_the_first(four) == 0
    assert beyond_the_first([*four, kernel(64, True)]) == 1  # nothing of ours differs
    assert beyond_the_first([*four, kernel(32, True)]) == 1  # a third tile
    assert beyond_the_first([*four, kernel(32, True) + kernel(64, True, "*fp32")]) == 0
    assert beyond_the_first([kernel(64, True, kind) for kind in ("*fp32", "*bf16", "*fp16")]) == 1
