"""Attention with the Triton backward in either of its modes, and how to see that it repeats itself.

The harness draws fresh memory as NaN by torch's deterministic mode, which chooses deterministic
gradients too; `in_mode` overrides that choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from attnloom.backends.registry import AttentionCall, Gradients
from attnloom.backends.triton import launch_backward
from tests.harness.case import Case, draw_problem
from tests.harness.check import check_attention, run
from tests.harness.implementations import attnloom_with


@contextlib.contextmanager
def in_mode(deterministic: bool) -> Iterator[None]:
    """Inside, the Triton backward runs with or without deterministic captured gradients."""
    backward = launch_backward.backward

    def chosen(call: AttentionCall, *rest: Any) -> Gradients:
        options = replace(call.options, deterministic=deterministic)
        return backward(replace(call, options=options), *rest)

    with mock.patch.object(launch_backward, "backward", chosen):
        yield


def check_gradients(case: Case, deterministic: bool, device: str = "cpu", **options: Any) -> None:
    """Every result and gradient of a case, within the harness's error budget."""
    with in_mode(deterministic):
        check_attention(case, attnloom_with(device, backend="triton", **options))


def check_repeats(case: Case, device: str, times: int) -> None:
    """Deterministic gradients are bitwise equal over several runs."""
    implementation = attnloom_with(device, backend="triton", deterministic=True)
    problem = draw_problem(case)
    first = run(problem.copy(), implementation, True)
    for _ in range(times):
        again = run(problem.copy(), implementation, True)
        differing = [name for name in first if not torch.equal(first[name], again[name])]
        assert not differing, f"{case}: {differing} differ between runs"
