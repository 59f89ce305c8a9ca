"""Keeps torch.compile out of mask building: its loops depend on data, and are fast as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_graph(function: Callable[P, R]) -> Callable[P, R]:
    """The function, at which a compiled caller leaves its graph and comes back after."""
    beside = torch._disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # The wrapper of torch imports all of dynamo when called, so not in eager code.
        if torch.compiler.is_dynamo_compiling():
            return beside(*args, **kwargs)
        return function(*args, **kwargs)

    return run
