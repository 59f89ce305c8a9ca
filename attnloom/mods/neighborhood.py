"""Neighbourhood attention on a line, an image or a video."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnloom.errors import ModError, counted
from attnloom.masking.extent import limited
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_canvas, read_sizes
from attnloom.mods.extent import of_canvas
from attnloom.mods.token_order import TokenOrder, axis_positions


def neighborhood(
    canvas: Any,
    kernel_size: Any,
    dilation: Any = 1,
    is_causal: bool | Sequence[bool] = False,
    order: TokenOrder | None = None,
) -> MaskMod:
    """Each token of a grid sees a kernel around it, which is moved inside at the borders.

    On each axis, for a query at i and a key at j among the n tokens of the axis:

        first = clamp(i - kernel_size // 2, 0, n - kernel_size);  first <= j < first + kernel_size
        i - kernel_size < j <= i                                  causal: cut off, not moved

    so that every token sees equally many keys (but on causal axes). Dilation parts an axis into
    `dilation` interleaved lines, and the rule holds on each.

    Args:
        canvas: sizes of the grid, 1 to 3 axes, the slowest first: L, (H, W) or (T, H, W).
        kernel_size: keys along each axis, or one for every axis, 1 or more. An even kernel has one
            more key before the query than after it.
        dilation: as kernel_size; kernel_size * dilation must not exceed the canvas.
        is_causal: axes on which a token sees what comes before it only; one flag for every axis, or
            one an axis.
        order: how tokens lie in the sequence (see `tiled_order`, `morton_order`); default: row by
            row.
    Returns:
        mask_mod for sequences of canvas volume. With an order it captures a table an axis.
    Raises:
        ModError: a size is too small or too large, or not one an axis; order is of another canvas.
    Source: Hassani et al. 2023, arXiv:2204.07143, sec. 3; dilation: arXiv:2209.15001; causal axes:
        arXiv:2403.04690 and the NATTEN library.
    """
    name = "neighborhood"
    sizes = read_canvas(name, canvas)
    kernels = read_sizes(name, "kernel_size", kernel_size, len(sizes))
    steps = read_sizes(name, "dilation", dilation, len(sizes))
    causal = (is_causal,) * len(sizes) if isinstance(is_causal, bool) else tuple(is_causal)
    if len(causal) != len(sizes):
        raise ModError(
            f"{name}: is_causal is {is_causal}; the canvas has {counted(len(sizes), 'axis')}. Give "
            "one flag for every axis, or a single one for all."
        )
    axes = [_Axis(*axis) for axis in zip(sizes, kernels, steps, causal, strict=True)]
    for axis in axes:
        if axis.kernel * axis.dilation > axis.size:
            raise ModError(
                f"{name}: a kernel of {axis.kernel} with dilation {axis.dilation} does not fit an "
                f"axis of {axis.size}; kernel_size * dilation must not exceed the canvas {sizes}."
            )
    positions = positions_in(name, sizes, order)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        kept = None
        for axis, i, j in zip(axes, positions(q_idx), positions(kv_idx), strict=True):
            near = axis.sees(i, j)
            kept = near if kept is None else kept & near
        assert kept is not None
        return kept

    return limited(mask_mod, *of_canvas(name, sizes))


def positions_in(
    factory: str, canvas: tuple[int, ...], order: TokenOrder | None
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """From a place in the sequence to positions on the axes: by arithmetic, or by tables.

    Raises:
        ModError: the order is of another canvas.
    """
    if order is None:
        return lambda index: axis_positions(index, canvas)
    if order.canvas != canvas:
        raise ModError(
            f"{factory}: order is of a canvas {order.canvas}, the mask of {canvas}; make both of "
            "the same."
        )
    tables = order.coordinates()
    return lambda index: tuple(table[index] for table in tables)


@dataclass(frozen=True, slots=True)
class _Axis:
    size: int
    kernel: int
    dilation: int
    causal: bool

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        if self.dilation == 1:
            return self._near(i, j, self.size)
        line, step = i % self.dilation, self.dilation
        length = (self.size + (step - 1) - line) // step
        return (j % step == line) & self._near(i // step, j // step, length)

    def _near(self, i: Tensor, j: Tensor, length: int | Tensor) -> Tensor:
        if self.causal:
            return (j <= i) & (j > i - self.kernel)
        first = (i - self.kernel // 2).clamp(min=0)
        last = length - self.kernel
        first = first.clamp(max=last) if isinstance(last, int) else first.minimum(last)
        return (j >= first) & (j < first + self.kernel)
