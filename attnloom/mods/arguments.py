"""Checks of what factories of mods are given; every text names the factory."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from attnloom.errors import ModError, ShapeError
from attnloom.masking.arguments import shown
from attnloom.masking.known_masks import check_integer

Integers = torch.Tensor | Sequence[int]


def read_size(factory: str, name: str, value: object, least: int = 0) -> int:
    """A whole number. Raises ModError unless it is an int of `least` or more."""
    try:
        size = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError, ValueError):
        size = None
    if size is None or isinstance(value, bool) or size < least:
        raise ModError(
            f"{factory}: {name} is {shown(value)}; it must be an int of {least} or more."
        )
    return size


def read_sizes(factory: str, name: str, value: Any, count: int, least: int = 1) -> tuple[int, ...]:
    """One whole number an axis; a single one stands for all axes.

    Raises:
        ModError: they are not `count` ints of `least` or more.
    """
    if not isinstance(value, Sequence):
        return (read_size(factory, name, value, least),) * count
    if len(value) != count:
        raise ModError(
            f"{factory}: {name} is {shown(value)}, which has {len(value)} axes; the canvas has "
            f"{count}. Give one int for every axis, or a single one for all."
        )
    return tuple(read_size(factory, name, size, least) for size in value)


def read_canvas(factory: str, canvas: Any) -> tuple[int, ...]:
    """Sizes of a grid of tokens. Raises ModError unless they are 1 to 3 ints of 1 or more."""
    sizes = canvas if isinstance(canvas, Sequence) else (canvas,)
    if not 1 <= len(sizes) <= 3:
        raise ModError(
            f"{factory}: canvas is {shown(canvas)}; it must have 1, 2 or 3 axes, the slowest first."
        )
    return tuple(read_size(factory, "canvas", size, 1) for size in sizes)


def read_integers(name: str, value: Integers, *ranks: int) -> torch.Tensor:
    """An integer tensor of one of these ranks; lists are converted.

    Raises:
        DtypeError: other values than integers. ShapeError: another rank.
    """
    tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    check_integer(name, tensor, ranks)
    return tensor


def check_floats(factory: str, name: str, value: Any, *ranks: int) -> None:
    """Raises ModError or ShapeError unless it is a floating-point tensor of one of these ranks."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        what = value.dtype if isinstance(value, torch.Tensor) else shown(value)
        raise ModError(f"{factory}: {name} is {what}; it must be a floating-point tensor.")
    if value.dim() not in ranks:
        raise ShapeError(
            f"{factory}: {name} has shape {list(value.shape)}; it must have "
            f"{' or '.join(map(str, ranks))} dimensions."
        )


def read_positive(factory: str, name: str, value: Any) -> float:
    """A number. Raises ModError unless it is finite and above 0."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ModError(f"{factory}: {name} is {shown(value)}; it must be a number above 0.")
    return number


def read_odd(factory: str, name: str, value: object) -> int:
    """An odd number of 1 or more, of which one is the middle. Raises ModError for others."""
    size = read_size(factory, name, value, 1)
    if size % 2 == 0:
        raise ModError(f"{factory}: {name} is {size}; it must be odd, so that it has a middle.")
    return size


def read_flags(factory: str, name: str, value: object) -> torch.Tensor:
    """One flag a token, [S] or [B, S]. Raises ModError unless it is a tensor of such."""
    if (
        not isinstance(value, torch.Tensor)
        or value.is_floating_point()
        or value.dim() not in (1, 2)
    ):
        raise ModError(
            f"{factory}: {name} is {shown(value)}; it must be a bool tensor [S] or [B, S], one "
            "flag a token."
        )
    return value.to(torch.bool)
