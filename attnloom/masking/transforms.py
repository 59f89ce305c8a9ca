"""Lists of a mask are made outside the transforms of torch.func.

What an operator returns inside torch.func.grad, vjp or jvp is a wrapper without memory: a kernel
cannot read it, and it is dead once the transform ends, while a mask lives on. A mask has no
gradient, so nothing is lost where its tensors are computed as if no transform were there.

Not taken are tensors that torch.vmap maps: each entry would have lists of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch import pyfunctorch

from attnloom.errors import UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")

active = torch._C._are_functorch_transforms_active
_is_wrapper = _functorch.is_functorch_wrapped_tensor
_left = threading.local()  # layers: those that `outside` took away, innermost first


def outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run outside all transforms and with plain tensors as its arguments."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not active():
            return function(*args, **kwargs)
        named = {name: _plain_argument(value) for name, value in kwargs.items()}
        with outside():
            return function(*map(_plain_argument, args), **named)  # type: ignore[arg-type]

    return run


@contextmanager
def outside() -> Iterator[None]:
    """No transform is active in here, but for code under `inside_again`."""
    before = getattr(_left, "layers", None)
    with pyfunctorch.temporarily_clear_interpreter_stack() as layers:
        _left.layers = layers
        try:
            yield
        finally:
            _left.layers = before


def inside_again() -> AbstractContextManager[None]:
    """The transforms that `outside` left, for code of a user's, which may compute with wrappers."""
    layers = getattr(_left, "layers", None)
    if not layers or active():
        return nullcontext()
    return pyfunctorch.temporarily_restore_interpreter_stack(layers)


def is_wrapped(value: Any) -> bool:
    """Whether it is a tensor that a transform has wrapped; pytrees may hold something else."""
    return isinstance(value, torch.Tensor) and _is_wrapper(value)


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether torch.vmap maps it, at any level."""
    while _is_wrapper(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, without the wrappers of transforms.

    Raises:
        UnsupportedError: torch.vmap maps it.
    """
    while _is_wrapper(tensor):
        if _functorch.is_batchedtensor(tensor):
            raise UnsupportedError(
                f"a tensor of shape {list(tensor.shape)}, from which a BlockMask is made, is "
                "mapped by torch.vmap; each entry would have a mask with lists of its own. Build "
                "one mask outside of vmap, with a batch dimension that its mask_mod reads by b, "
                "and call flex_attention on the whole batch."
            )
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def _plain_argument(value: Any) -> Any:
    return plain(value) if isinstance(value, torch.Tensor) else value
