"""What a GPU refuses, seen without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _OwnGenerators(TorchFunctionMode):
    """Refuses to draw on one device by a generator of another, as CUDA does."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None:
            drawn_on = torch.device(kwargs.get("device") or "cpu")
            assert drawn_on.type == generator.device.type, f"{func} on {drawn_on}"
        return func(*args, **kwargs)


@contextlib.contextmanager
def another_default_device() -> Iterator[None]:
    """Inside, torch's default device is neither the CPU nor one that keeps values."""
    with _OwnGenerators(), torch.device("meta"):
        yield
