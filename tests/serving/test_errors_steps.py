"""Errors of what users hand to a step, an attention or a tokenizer, and of overlapping steps;
their texts are pinned."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest
import torch

from attnloom.errors import OutOfPagesError, ShapeError
from attnloom.serving import ByteTokenizer, Engine, Limits, OverlapError, Request, SamplingParams
from attnloom.serving.service import Service, StepFailedError
from tests.harness.pinned import Pinned, assert_says
from tests.serving.models import LLAMA, tiny

LIMITS = Limits(max_running=1, max_length=64)
ONE = SamplingParams(max_tokens=1)


class BadTokenizer(ByteTokenizer):
    def decode(self, tokens: Any) -> str:
        raise ValueError("boom")


def engine() -> Engine:
    return Engine(tiny(LLAMA), BadTokenizer(), LIMITS, page_size=16)


def attended(attention: Any) -> None:
    tiny(LLAMA)(torch.tensor([1, 2, 3]), torch.arange(3), attention)


def failed_tokenizer() -> None:
    service = Service(engine())

    async def ask() -> None:
        async for _ in await service.submit(Request((1,), ONE)):
            pass

    try:
        asyncio.run(ask())
    finally:
        service.close()


def overlap() -> None:
    served = engine()
    served.add(Request((1,), ONE))
    with mock.patch.object(served._runner, "run", lambda *_: served.step()):
        served.step()


def no_room() -> None:
    served = engine()
    served.cache.extend([served.cache.new()], [64])
    served.add(Request((1,), ONE, "mine"))
    served.step()


STEPS: dict[str, Pinned] = {
    "an attention of another shape": (
        lambda: attended(lambda layer, query, key, value: query),
        ShapeError,
        "the attention given to the decoder returned [3, 4, 16] in layer 0; for a query [T, Hq, D] "
        "of [3, 4, 16] it must return [T, Hq * D], [3, 64], as out.flatten(1) of [T, Hq, D] is.",
    ),
    "an attention without a result": (
        lambda: attended(lambda layer, query, key, value: None),
        ShapeError,
        "the attention given to the decoder returned a NoneType in layer 0; for a query "
        "[T, Hq, D] of [3, 4, 16] it must return [T, Hq * D], [3, 64], as out.flatten(1) of "
        "[T, Hq, D] is.",
    ),
    "a tokenizer that raises": (
        failed_tokenizer,
        StepFailedError,
        "the tokenizer failed: ValueError.",
    ),
    "a step in the midst of a step": (
        overlap,
        OverlapError,
        "step was called in thread 'MainThread' while step (thread 'MainThread') of the same "
        "engine runs; an engine takes one step at a time. Call step, generate and warm_up in one "
        "thread, or make an engine for each.",
    ),
    "pages that others hold": (
        no_room,
        OutOfPagesError,
        "request 'mine' finds no room though nothing runs: 0 pages are free of 4, others are held "
        "by sequences of the engine's cache that are not its own. Free those, or cancel the "
        "request.",
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_errors_of_steps(name: str) -> None:
    assert_says(STEPS[name])
