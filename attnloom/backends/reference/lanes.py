"""Run a mod on many scores at once, exactly as if it ran on one score at a time.

A lane is one score with its (b, h, q_idx, kv_idx). The mod runs under `torch.vmap` over a flat list
of lanes, so that inside it every argument has no dimensions: chained indexing `bias[b][h][q, kv]`
and reductions over a captured row mean what they say, which broadcasting would get wrong.

- Where the mod asks for the truth of a lane-dependent value (`if`, `or`, builtin `min`), the lanes
  are parted by that value and each part runs the mod again, so each lane takes its own path.
- Where vmap refuses (`.item()`, a list indexed by a position), lanes run one after the other, up
  to MAX_SERIAL_LANES.
- An index into a captured tensor counts from the end if negative and is then clamped.
- What `captured[i]` leaves to index is gathered when something else than a further index asks for
  it: `bias[b][h][q, kv]` takes one element a lane, as `bias[b, h, q, kv]` does.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

# What torch.vmap itself uses; there is no public unwrap.
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from attnloom.errors import TraceError, UnsupportedError

MAX_SERIAL_LANES = 1 << 16
# A lane-dependent value inside a mod, such as `bias[b]`, may hold this many elements in all.
MAX_ELEMENTS = 1 << 24
_MAX_LANES = 1 << 18
_CALLS_BOOL = torch.Tensor.__bool__
_CALLS_GETITEM = torch.Tensor.__getitem__


class _LanesDisagreeError(Exception):
    """The mod branches on a value that differs between lanes; `truth` [lanes] is that value."""

    def __init__(self, truth: torch.Tensor) -> None:
        self.truth = truth


class _TooManyLanesError(Exception):
    """An intermediate value would pass MAX_ELEMENTS with this many lanes."""


def evaluate_lanes(mod: Callable[..., Any], *lanes: torch.Tensor) -> torch.Tensor:
    """Call `mod(*lane)` for every lane.

    Args:
        mod: a score_mod or mask_mod; its result has no dimensions, or is a Python number.
        lanes: one tensor [N] for each argument of the mod. Gradients flow through them and
            through everything that the mod captures.
    Returns:
        [N] in the dtype that the mod returns.
    Raises:
        UnsupportedError: the mod only runs one lane at a time, and there are too many of them.
    """
    total = lanes[0].shape[0]
    if total == 0:
        return lanes[0].new_empty(0)
    parts: list[torch.Tensor] = []
    start, width = 0, min(total, _MAX_LANES)
    while start < total:
        chunk = tuple(lane[start : start + width] for lane in lanes)
        try:
            parts.append(_run(mod, chunk))
        except _TooManyLanesError:
            width = max(width // 4, 1)
            continue
        start += width
    return torch.cat(parts)


def _run(mod: Callable[..., Any], lanes: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One chunk, parted as often as its lanes disagree."""
    try:
        return _vectorised(mod, lanes)
    except _LanesDisagreeError as split:
        sides = [split.truth.nonzero()[:, 0], (~split.truth).nonzero()[:, 0]]
        parts = [_run(mod, tuple(lane[side] for lane in lanes)) for side in sides]
        return torch.cat(parts)[torch.cat(sides).argsort()]
    except RuntimeError as refusal:  # vmap has no rule for something in the mod
        if lanes[0].shape[0] > MAX_SERIAL_LANES:
            name = getattr(mod, "__qualname__", repr(mod))
            raise UnsupportedError(
                f"backend 'reference' can run {name!r} only one score at a time ({refusal}), and "
                f"{lanes[0].shape[0]} scores are too many (limit {MAX_SERIAL_LANES}). Use smaller "
                "tensors, or write the mod with torch operators."
            ) from refusal
        return _serial(mod, lanes)


def _vectorised(mod: Callable[..., Any], lanes: tuple[torch.Tensor, ...]) -> torch.Tensor:
    device = lanes[0].device

    def one_lane(*args: torch.Tensor) -> torch.Tensor:
        return _scalar(mod(*args), device)

    with _LaneMode(lanes[0].shape[0]):
        return torch.vmap(one_lane)(*lanes)


def _serial(mod: Callable[..., Any], lanes: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with _LaneMode(1):
        rows = [_scalar(mod(*lane), lanes[0].device) for lane in zip(*lanes, strict=True)]
    return torch.stack(rows)


def _scalar(value: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, (bool, int, float, np.generic)):
            raise TraceError(
                f"a mod must return one value for one score, but returned a {type(value).__name__}."
                + (" Did you forget `return`?" if value is None else "")
            )
        value = torch.tensor(value, device=device)
    if value.ndim != 0:
        raise TraceError(
            f"a mod must return one value for one score, but returned shape {list(value.shape)}."
        )
    return value


class _Picks(NamedTuple):
    """Elements of a tensor. at: an index in each lane for each dimension, None for all of it."""

    tensor: torch.Tensor
    at: list[torch.Tensor | None]

    def indexed(self, index: tuple[Any, ...]) -> _Picks:
        """With these entries for the dimensions that are whole: integers, tensors without
        dimensions, slices."""
        if len(index) > len(self.shape):
            raise IndexError(
                f"too many indices for a tensor of dimension {len(self.shape)}: {len(index)}"
            )
        plain: list[Any] = []
        at: list[torch.Tensor | None] = []
        entries = iter(index)
        for size, pick in zip(self.tensor.shape, self.at, strict=True):
            entry = slice(None) if pick is not None else next(entries, slice(None))
            plain.append(slice(None) if isinstance(entry, torch.Tensor) else entry)
            if isinstance(entry, torch.Tensor):
                pick = _wrapped_and_clamped(entry, size)
            if not isinstance(entry, int):
                at.append(pick)
        return _Picks(self.tensor[tuple(plain)], at)

    @property
    def shape(self) -> list[int]:
        return [n for n, pick in zip(self.tensor.shape, self.at, strict=True) if pick is None]

    def gathered(self, width: int) -> torch.Tensor:
        """In a vmap over that many lanes."""
        if 0 in self.tensor.shape:
            return self.tensor.new_zeros(self.shape)
        if math.prod(self.shape) * width > MAX_ELEMENTS and width > 1:
            raise _TooManyLanesError
        return torch.ops.aten.index.Tensor(self.tensor, self.at)


class _Pending(torch.Tensor):
    """Picks that leave dimensions, as a tensor that has no elements yet."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]
    picks: _Picks

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} was given elements that were not gathered")

    @staticmethod
    def of(picks: _Picks) -> _Pending:
        like = picks.tensor
        found = torch.Tensor._make_wrapper_subclass(
            _Pending, picks.shape, dtype=like.dtype, device=like.device
        )
        found.picks = picks
        return found


class _LaneMode(TorchFunctionMode):
    """Gives `bool(x)` and `captured[x]` their meaning for lane-dependent x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width
        self._has_pending = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _CALLS_BOOL:
            return _truth(args[0])
        if func is _CALLS_GETITEM:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if _is_integer_lookup(index, isinstance(args[0], _Pending)):
                return self._lookup(args[0], index)
        if self._has_pending:
            args, kwargs = tree_map_only(_Pending, self._gathered, (args, kwargs))
        return func(*args, **kwargs)

    def _gathered(self, pending: _Pending) -> torch.Tensor:
        return pending.picks.gathered(self._width)

    def _lookup(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
        """`tensor[index]` with integer tensors without dimensions among the indices, now or
        before."""
        index = _without_ellipsis(index, tensor.ndim)
        if isinstance(tensor, _Pending):
            picks = tensor.picks
        else:
            # dimensions that `None` adds
            added = tuple(None if i is None else slice(None) for i in index)
            tensor = tensor[added]
            index = tuple(slice(None) if i is None else i for i in index)
            picks = _Picks(tensor, [None] * tensor.ndim)
        picks = picks.indexed(index)
        if not picks.shape:
            return picks.gathered(self._width)
        self._has_pending = True
        return _Pending.of(picks)


def _truth(value: torch.Tensor) -> bool:
    if not _functorch.is_batchedtensor(value):
        return bool(value)
    # Only the lane axis is left: the mod's own value has no dimensions, or bool() is an error.
    truth = _functorch.get_unwrapped(value).detach() != 0
    if truth.ndim != 1:
        raise RuntimeError("the truth value of a tensor with more than one element is ambiguous")
    if bool(truth.all()):
        return True
    if not bool(truth.any()):
        return False
    raise _LanesDisagreeError(truth)


def _is_integer_lookup(index: tuple[Any, ...], further: bool) -> bool:
    """Whether an index has integer tensors; a further one may have integers and slices alone."""
    found = [entry for entry in index if isinstance(entry, torch.Tensor)]
    if further and None in [entry for entry in index if not isinstance(entry, torch.Tensor)]:
        return False
    # torch reads bool and uint8 indices as masks; their result has no fixed size.
    masks = (torch.bool, torch.uint8)
    return (further or bool(found)) and all(
        entry.ndim == 0 and entry.dtype not in masks and not entry.dtype.is_floating_point
        for entry in found
    )


def _without_ellipsis(index: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    at = [n for n, entry in enumerate(index) if isinstance(entry, types.EllipsisType)]
    if not at:
        return index
    given = sum(1 for entry in index if entry is not None) - 1
    fill = (slice(None),) * (ndim - given)
    return index[: at[0]] + fill + index[at[0] + 1 :]


def _wrapped_and_clamped(index: torch.Tensor, size: int) -> torch.Tensor:
    index = index.long()
    return torch.where(index < 0, index + size, index).clamp(0, max(size - 1, 0))
