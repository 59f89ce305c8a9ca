"""Checks of what factories of mods are given; every text names the factory."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from attnloom.errors import ModError, ShapeError, any_of, counted
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
            f"{factory}: {name} is {shown(value)}, which has {counted(len(value), 'axis')}; the "
            f"canvas has {count}. Give one int for every axis, or a single one for all."
        )
    return tuple(
        read_size(factory, axis_name(name, value, axis), size, least)
        for axis, size in enumerate(value)
    )


def read_canvas(factory: str, canvas: Any) -> tuple[int, ...]:
    """Sizes of a grid of tokens. Raises ModError unless they are 1 to 3 ints of 1 or more."""
    sizes = canvas if isinstance(canvas, Sequence) else (canvas,)
    if not 1 <= len(sizes) <= 3:
        raise ModError(
            f"{factory}: canvas is {shown(canvas)}; it must have 1, 2 or 3 axes, the slowest first."
        )
    return tuple(
        read_size(factory, axis_name("canvas", canvas, axis), size, 1)
        for axis, size in enumerate(sizes)
    )


def axis_name(name: str, value: Any, axis: int) -> str:
    """What the caller gave for an axis: `canvas[0]`, or `canvas` where one value serves all."""
    return f"{name}[{axis}]" if isinstance(value, Sequence) else name


def read_integers(factory: str, name: str, value: Integers, *ranks: int) -> torch.Tensor:
    """An integer tensor of one of these ranks; lists are converted.

    Raises:
        DtypeError: other values than integers. ShapeError: another rank.
    """
    if not isinstance(value, torch.Tensor) and len(value) == 0:
        raise ShapeError(f"{factory}: {name} is empty; it must hold at least one integer.")
    tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    check_integer(f"{factory}: {name}", tensor, ranks)
    return tensor


def check_floats(factory: str, name: str, value: Any, *ranks: int) -> None:
    """Raises ModError or ShapeError unless it is a floating-point tensor of one of these ranks."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        what = value.dtype if isinstance(value, torch.Tensor) else shown(value)
        raise ModError(f"{factory}: {name} is {what}; it must be a floating-point tensor.")
    if value.dim() not in ranks:
        raise ShapeError(
            f"{factory}: {name} has shape {list(value.shape)}; it must have "
            f"{any_of(ranks, 'dimension')}."
        )


def read_factor(
    factory: str, name: str, value: Any, positive: bool = False
) -> float | torch.Tensor:
    """A number, or a floating-point tensor of one element, without its dimensions: mods capture
    it, so that it may be learned.

    Raises:
        ModError: it is neither, or not finite. A tensor on the CPU is looked at, others are not.
    """
    low, what = (0.0, " above 0") if positive else (-math.inf, "")
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() == 1:
        if value.device.type == "cpu" and type(value) in (torch.Tensor, torch.nn.Parameter):
            read_within(factory, name, value.detach(), low, what)
        return value.reshape(())
    return read_within(factory, name, value, low, what)


def read_within(factory: str, name: str, value: Any, low: float, what: str) -> float:
    """A finite number above `low`. Raises ModError for others."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not low < number < math.inf:
        raise ModError(f"{factory}: {name} is {shown(value)}; it must be a finite number{what}.")
    return number


def read_odd(factory: str, name: str, value: object) -> int:
    """An odd number of 1 or more, of which one is the middle. Raises ModError for others."""
    size = read_size(factory, name, value, 1)
    if size % 2 == 0:
        raise ModError(f"{factory}: {name} is {size}; it must be odd, so that it has a middle.")
    return size


def check_values(
    factory: str, name: str, table: torch.Tensor, valid: torch.Tensor, rule: str
) -> None:
    """Raises ModError unless all are valid. Tables on other devices than the CPU are taken as they
    are, since looking at them would wait for the device."""
    if table.device.type != "cpu" or type(table) is not torch.Tensor or bool(valid.all()):
        return
    place = (~valid).nonzero()[0].tolist()
    raise ModError(f"{factory}: {name}{place} is {table[tuple(place)].item()}; {rule}.")


def read_flags(factory: str, name: str, value: object) -> torch.Tensor:
    """One flag a token, [S] or [B, S]. Raises ModError unless it is a tensor of such."""
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or value.is_floating_point() or value.dim() not in (1, 2):
        what = f"{value.dtype} of shape {list(value.shape)}" if is_tensor else shown(value)
        raise ModError(
            f"{factory}: {name} is {what}; it must be a bool tensor [S] or [B, S], one flag a "
            "token."
        )
    if value.dtype is not torch.bool:
        check_values(factory, name, value, (value == 0) | (value == 1), "a flag is 0 or 1")
    return value.to(torch.bool)
