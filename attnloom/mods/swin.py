"""Windows of an image, and their relative bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.errors import ModError, ShapeError, counted
from attnloom.masking.arguments import shown
from attnloom.masking.extent import limited
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import check_floats, read_canvas, read_sizes
from attnloom.mods.extent import of_canvas, of_table


def swin_window(canvas: Any, window: Any, shift: Any = 0) -> MaskMod:
    """A token of an image sees its own window of a partition into windows.

        (y - shift) // window is the same for both, and the same along x

    Args:
        canvas: (height, width) in tokens, which lie row by row.
        window: side of a window, or one a axis.
        shift: of the partition, 0 or more, or one a axis; half a window in every second block.
            Windows that the border cuts stay small: what the paper's cyclic shift and its mask do.
    Returns:
        mask_mod for the whole image in one sequence; no rolling, no regrouping into a batch.
    Raises:
        ModError: sizes are too small or not one an axis.
    Source: Liu et al. 2021, arXiv:2103.14030, sec. 3.2.
    """
    name = "swin_window"
    sizes = _image(name, canvas)
    width = sizes[1]
    tall, wide = read_sizes(name, "window", window, 2)
    down, right = read_sizes(name, "shift", shift, 2, least=0)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        same_rows = (q_idx // width - down) // tall == (kv_idx // width - down) // tall
        same_columns = (q_idx % width - right) // wide == (kv_idx % width - right) // wide
        return same_rows & same_columns

    return limited(mask_mod, *of_canvas(name, sizes))


def swin_bias(canvas: Any, window: Any, table: Tensor) -> ScoreMod:
    """A learned bias by the distance in both axes, inside the windows of `swin_window`.

        score + table[(y_q - y_kv + M - 1) * (2 * M - 1) + x_q - x_kv + M - 1, h]

    Args:
        canvas: (height, width) in tokens.
        window: side M of a window, or (height, width) of one.
        table: [(2 * M_y - 1) * (2 * M_x - 1), Hq], as the paper's relative_position_bias_table.
    Returns:
        score_mod; differentiable in score and table. Pairs outside a window read the bias of the
        nearest pair inside, so join it with swin_window.
    Raises:
        ModError, ShapeError: sizes do not fit together, or the table is not floating point.
    Source: Liu et al. 2021, arXiv:2103.14030, sec. 3.2 (relative position bias).
    """
    name = "swin_bias"
    sizes = _image(name, canvas)
    width = sizes[1]
    tall, wide = read_sizes(name, "window", window, 2)
    check_floats(name, "table", table, 2)
    rows = (2 * tall - 1) * (2 * wide - 1)
    if table.shape[0] != rows:
        raise ShapeError(
            f"{name}: table has shape {list(table.shape)}; a window of {tall} x {wide} needs "
            f"{counted(rows, 'row')}, (2 * {tall} - 1) * (2 * {wide} - 1)."
        )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        down = (q_idx // width - kv_idx // width).clamp(1 - tall, tall - 1) + (tall - 1)
        right = (q_idx % width - kv_idx % width).clamp(1 - wide, wide - 1) + (wide - 1)
        return score + table[down * (2 * wide - 1) + right, h]

    limits = [*of_canvas(name, sizes), *of_table(name, "table", table, "heads")]
    return limited(score_mod, *limits)


def _image(factory: str, canvas: Any) -> tuple[int, ...]:
    sizes = read_canvas(factory, canvas)
    if len(sizes) == 2:
        return sizes
    if not isinstance(canvas, Sequence):
        return sizes * 2
    raise ModError(
        f"{factory}: canvas is {shown(canvas)}; an image has 2 axes. Give (height, width), or one "
        "int for a square."
    )
