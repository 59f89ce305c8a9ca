"""Kernels of the CPU backend compiled with -O1, in two thirds of the time that users' -O2 takes.

Compiling is most of what tests do that give a mod or a call a kernel of its own. Tests of the
kernels themselves compile them as for users, and so do the processes that tests start.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from attnloom.backends.cpu import build, launch, toolchain

_kernels: dict[Any, Any] = {}  # in place of launch._kernels, which does not ask how they were made


@contextlib.contextmanager
def optimised_less() -> Iterator[None]:
    """Inside, kernels that are new are compiled with -O1, and none of others is used."""
    tools = toolchain.available()
    native = () if tools is None else tools.flags()[len(tools.flags(())) :]
    spec = functools.partial(build.KernelSpec, target=(*native, "-O1"))
    with (
        mock.patch.object(build, "KernelSpec", spec),
        mock.patch.object(launch, "_kernels", _kernels),
    ):
        yield
