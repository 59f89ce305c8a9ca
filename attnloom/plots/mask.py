"""plot_mask: which scores a mask keeps, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attnloom.api.masks import create_block_mask
from attnloom.block_mask import BlockMask
from attnloom.errors import ShapeError
from attnloom.masking.arguments import read_int
from attnloom.masking.captures import captured_tensors
from attnloom.masking.views import MaskMod
from attnloom.plots.cells import Kind
from attnloom.plots.panels import draw_image, key_of_kinds, label_axes, panels, read_labels, rule
from attnloom.plots.reduced import token_colours
from attnloom.plots.region import (
    Heads,
    Region,
    Span,
    check_inside,
    check_tokens,
    read_heads,
    read_span,
)
from attnloom.tools.lengths import axis_lengths
from attnloom.trace.tracer import trace_mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TOKENS = ((Kind.FULL, "kept"), (Kind.EMPTY, "masked"))
_TOKENS_IN_TILES = (
    (Kind.FULL, "kept, full tile"),
    (Kind.PARTIAL, "kept, partial tile"),
    (Kind.DROPPED, "masked, partial tile"),
    (Kind.EMPTY, "masked, tile skipped"),
)


def plot_mask(
    mask: MaskMod | BlockMask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    block_size: int | tuple[int, int] | None = None,
    batch: int = 0,
    heads: Heads = None,
    q_range: Span | None = None,
    kv_range: Span | None = None,
    tokens: Sequence[str] | None = None,
    kv_tokens: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw which scores a mask keeps, token by token; one panel a head.

    With a BlockMask, or a block_size, colours also tell what is computed for it: dark scores lie in
    full tiles, where the mask_mod is not asked; orange ones in partial tiles, whose masked scores
    (pale) are computed and dropped; white ones are never computed. The colours differ in grey too.

    Args:
        mask: a mask_mod, or a BlockMask.
        q_len, kv_len: lengths in tokens of a mask_mod; kv_len is q_len by default. A BlockMask has
            its own.
        block_size: tiles to show a mask_mod in, one size or (query, key).
        batch: the batch entry.
        heads: a head or several. Default: the heads that differ, as far as captured tensors or the
            BlockMask tell; else head 0.
        q_range, kv_range: zoom in on tokens (first, end).
        tokens: a label for each query, and each key if their lengths agree. kv_tokens: for keys.
        title: above the panels.
    Returns:
        matplotlib Figure. More than 1,024 tokens a side are averaged; above 2^24 scores that is
        done tile by tile, in memory that goes with the live tiles.
    Raises:
        ShapeError: a size, range or number of labels does not fit, or partial tiles have more than
            2^30 scores. UnsupportedError: matplotlib is not installed.
        TraceError: the mask_mod cannot be traced.
    """
    if isinstance(mask, BlockMask):
        block_mask: BlockMask | None = mask
        check_tokens(mask)
        mask_mod, (rows, columns) = mask.mask_mod, mask.seq_lengths
        told = mask.lists().num_heads
        batches, count = (1, 1, *mask.shape)[-4:-2]
        check_inside("batch", read_int("batch", batch), batches)
        for head in read_heads(heads, told):
            check_inside("heads", head, count)
    else:
        mask_mod = mask
        rows, columns = given_lengths(q_len, kv_len)
        told = told_heads(mask_mod)
        block_mask = None
        if block_size is not None:
            block_mask = create_block_mask(
                mask_mod, batch + 1, told, rows, columns, BLOCK_SIZE=block_size
            )
    region = Region(
        read_int("batch", batch),
        read_heads(heads, told),
        read_span("q_range", q_range, rows),
        read_span("kv_range", kv_range, columns),
    )
    labels = read_labels(tokens, kv_tokens, rows, columns)
    figure, all_axes = panels(len(region.heads), title)
    several = len(region.heads) > 1
    for axes, head in zip(all_axes, region.heads, strict=True):
        draw_image(axes, token_colours(mask_mod, block_mask, region, head), region)
        rule(axes, region, (1, 1) if block_mask is None else block_mask.BLOCK_SIZE)
        label_axes(axes, region, labels, several)
        if several:
            axes.set_title(f"head {head}", fontsize=8)
    key_of_kinds(figure, _TOKENS if block_mask is None else _TOKENS_IN_TILES)
    return figure


def given_lengths(q_len: int | None, kv_len: int | None) -> tuple[int, int]:
    """Lengths of a picture of a mod.

    Raises:
        ShapeError: q_len is missing, or a length is no positive int.
    """
    if q_len is None:
        raise ShapeError(
            "q_len is missing: a mod has no length of its own. Pass q_len=, in tokens."
        )
    lengths = {"q_len": q_len, "kv_len": q_len if kv_len is None else kv_len}
    for name, length in lengths.items():
        if read_int(name, length) < 1:
            raise ShapeError(f"{name} is {length}; a picture needs 1 token or more.")
    return lengths["q_len"], lengths["kv_len"]


def told_heads(mask_mod: MaskMod) -> int:
    """Heads as captured tensors that h indexes have them; 1 where none says."""
    bound = trace_mask(mask_mod, _device(mask_mod))
    names = ("",) * len(bound.tensors)
    lengths = [found.length for found in axis_lengths(bound, names) if found.axis == "h"]
    return min(lengths, default=1)


def _device(mask_mod: MaskMod) -> torch.device:
    return next((t.device for t in captured_tensors(mask_mod)), torch.device("cpu"))
