"""The cases of tests/cases on a real GPU: inputs that broke other implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

import attnloom
from attnloom.backends.triton.beside import wait_for_all
from tests.cases import (
    test_captures,
    test_dtypes_and_transforms,
    test_empty_rows_and_memory,
    test_recompiles,
    test_shapes,
    test_wrong_numbers,
)
from tests.kernels.recompiles import KERNELS, Kernel, beyond_the_first

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Case numbers, or beginnings of names, of tests that say nothing about a GPU.
ELSEWHERE = (
    "test_case_002",  # test_gpu_launch.py: the precision of a GPU is another question
    "test_case_004",  # the harness draws there; test_gpu_forward.py draws on the GPU
    "test_case_014_captured_tensor",  # test_gpu_launch.py, at its true size
    "test_case_015",
    "test_case_043",
    "test_case_044",
    "test_case_110",  # measures the memory of the host
    "test_case_113",  # autocast of the CPU
    "test_case_131",  # asks for an exact zero that is the rounding of two sums
    "test_case_135",  # of the CPU
    "test_case_136",
    "test_case_138",
    "test_the_counter",
    "test_block_sizes_compile",  # tiles of a block are a constant of the kernels
)


def _cases(module: ModuleType) -> dict[str, Any]:
    return {
        name: test
        for name, test in vars(module).items()
        if name.startswith("test_") and callable(test) and not name.startswith(ELSEWHERE)
    }


for _module in (
    test_captures,
    test_dtypes_and_transforms,
    test_empty_rows_and_memory,
    test_recompiles,
    test_shapes,
    test_wrong_numbers,
):
    globals().update(_cases(_module))


@pytest.fixture(autouse=True)
def _tensors_on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@pytest.fixture(autouse=True)
def _not_of_the_cpu(request: pytest.FixtureRequest) -> None:
    given = getattr(request.node, "callspec", None)
    if given is not None and given.params.get("backend") == "cpu":
        pytest.skip("names the CPU backend")


@pytest.fixture(autouse=True)
def _at_most_one_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_recompiles, "kernels_after_the_first", recompiles_beyond_the_first)


def recompiles_beyond_the_first(call: Callable[[int], Any], repeats: int = 5) -> int:
    """The rule of recompiles.py over call(0) .. call(repeats)."""
    calls: list[list[Kernel]] = []
    earlier = knobs.compilation.listener

    def listener(*, src: Any, **others: Any) -> None:
        name = getattr(getattr(src, "fn", None), "__name__", "")
        if name in KERNELS:
            *_, config = src.constants.values()
            calls[-1].append(Kernel.of(name, config, tuple(src.signature.values())))
        if earlier is not None:
            earlier(src=src, **others)

    knobs.compilation.listener = listener
    try:
        for n in range(repeats + 1):
            calls.append([])
            call(n)
            wait_for_all()  # kernels of a backward are compiled in threads
    finally:
        knobs.compilation.listener = earlier
    return beyond_the_first(calls)


def test_the_recompile_counter_counts() -> None:
    """Guard of this file: head dimensions do compile anew."""

    def call(n: int) -> None:
        x = torch.zeros(1, 1, 100, 16 * (n + 1), dtype=torch.bfloat16)
        attnloom.flex_attention(x, x, x, lambda s, b, h, i, j: s + i * 0.37)

    assert recompiles_beyond_the_first(call, 4) == 3
