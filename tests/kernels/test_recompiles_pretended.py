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
from attnloom.serving.kernels.launch import KernelOps
from attnloom.serving.ops import Norm
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


def compiled_where_tensors_begin(call: Callable[[list[int]], Any]) -> dict[str, int]:
    """How many kernels there are of each name after three tensors began at multiples of 16 bytes or
    an element further, in every combination."""
    asked: dict[str, set[object]] = {}
    with hopper() as gpu:
        for n in range(8):
            call([(n >> i) & 1 for i in range(3)])
            wait_for_all()
        for kernel in gpu.compiled:
            asked.setdefault(kernel.kernel, set()).add(kernel)
    return {name: len(found) for name, found in asked.items()}


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("q_len", [300, 1])
def test_where_captured_tensors_begin_compiled_kernels(backend: str, q_len: int) -> None:
    """Eight kernels, for each combination of three that begin at multiples of 16 bytes."""
    q, k = torch.zeros(1, 2, q_len, 64), torch.zeros(1, 2, 300, 64)
    q, k = (x.bfloat16().requires_grad_() for x in (q, k))
    block_mask = attnloom.create_block_mask(
        lambda b, h, i, j: i + 300 - q_len >= j, 1, 1, q_len, 300
    )

    def call(firsts: list[int]) -> None:
        bias, scale, slope = (torch.zeros(301)[first : first + 300] for first in firsts)
        attnloom.flex_attention(
            q, k, k, block_mask=block_mask, kernel_options={"backend": backend},
            score_mod=lambda s, b, h, i, j: s * scale[i] + bias[j] + slope[h],
        ).sum().backward()  # fmt: skip

    found = compiled_where_tensors_begin(call)
    main = {"forward_kernel", "decode_kernel"} & found.keys()
    assert len(main) == 1 and {"key_kernel", "backward_kernel"} & found.keys()
    assert set(found.values()) <= {1, 2}
    assert found[main.pop()] == 2


def test_where_a_decoders_tensors_begin_compiled_kernels() -> None:
    def call(firsts: list[int]) -> None:
        x, added, weight = (
            torch.zeros(4 * 64 + 1)[first : first + 4 * 64].view(4, 64) for first in firsts
        )
        KernelOps().add_norm(x, added, Norm(weight[0], 1e-6, False))

    assert compiled_where_tensors_begin(call) == {"add_norm_kernel": 2}


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
