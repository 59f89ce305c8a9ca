"""plot_block_map: which tiles of a BlockMask are full, partial and empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnloom.block_mask import BlockMask
from attnloom.errors import ModError
from attnloom.masking.arguments import read_int
from attnloom.plots.cells import Kind, tile_colours, tile_kinds, tile_spans
from attnloom.plots.panels import Labels, draw_image, key_of_kinds, label_axes, panels, rule
from attnloom.plots.region import Heads, Region, Span, check_tokens, read_heads, read_span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_COUNTED = 1 << 22


def plot_block_map(
    block_mask: BlockMask,
    *,
    batch: int = 0,
    heads: Heads = None,
    q_range: Span | None = None,
    kv_range: Span | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the tiles of a BlockMask; one panel a head. Takes a mask of any length.

    Full tiles are dark: the mask_mod is not asked there. Partial ones are orange: it is asked at
    every score. Empty ones are white: never computed. The colours differ in grey too.

    Args:
        block_mask: what create_block_mask returns.
        batch: the batch entry.
        heads: a head or several. Default: those that differ, at most 64.
        q_range, kv_range: zoom in on the tiles that tokens (first, end) lie in.
        title: above the panels.
    Returns:
        matplotlib Figure. More than 1,024 tiles a side are averaged.
    Raises:
        ModError: it is no BlockMask. ShapeError: a head, batch entry or range is not in the mask,
            or it has no tokens.
        UnsupportedError: matplotlib is not installed.
    """
    if not isinstance(block_mask, BlockMask):
        raise ModError(
            f"plot_block_map draws a BlockMask, got {type(block_mask).__name__}. Make one with "
            "create_block_mask, or draw a mask_mod with plot_mask."
        )
    check_tokens(block_mask)
    rows, columns = block_mask.seq_lengths
    asked = Region(
        read_int("batch", batch),
        read_heads(heads, block_mask.lists().num_heads),
        read_span("q_range", q_range, rows),
        read_span("kv_range", kv_range, columns),
    )
    region = _whole_tiles(block_mask, asked)
    figure, all_axes = panels(len(region.heads), title)
    several = len(region.heads) > 1
    for axes, head in zip(all_axes, region.heads, strict=True):
        draw_image(axes, tile_colours(block_mask, region, head), region)
        rule(axes, region, block_mask.BLOCK_SIZE)
        label_axes(axes, region, Labels(None, None), several)
        # The last tiles may overhang the lengths; the picture ends where the tokens do.
        axes.set_xlim(region.kv[0] - 0.5, min(region.kv[1], columns) - 0.5)
        axes.set_ylim(min(region.q[1], rows) - 0.5, region.q[0] - 0.5)
        density = _density(block_mask, region, head)
        text = f"{density:.1%} of the scores lie in live tiles"
        axes.set_title(f"head {head}: {density:.1%} live" if several else text, fontsize=8)
    q_block, kv_block = block_mask.BLOCK_SIZE
    key_of_kinds(
        figure,
        (
            (Kind.FULL, f"full tile of {q_block} x {kv_block}"),
            (Kind.PARTIAL, "partial: mask asked"),
            (Kind.EMPTY, "empty: skipped"),
        ),
    )
    return figure


def _whole_tiles(block_mask: BlockMask, region: Region) -> Region:
    """The region grown to the tiles that it touches."""
    spans = tile_spans(block_mask, region)
    q, kv = (
        (first * block, end * block)
        for (first, end), block in zip(spans, block_mask.BLOCK_SIZE, strict=True)
    )
    return Region(region.batch, region.heads, q, kv)


def _density(block_mask: BlockMask, region: Region, head: int) -> float:
    """Scores in live tiles over all scores of a region, overhanging parts left out: where it is the
    whole mask, what `sparsity` and `explain` count."""
    live = tile_kinds(block_mask, region, head) != Kind.EMPTY
    heights, widths = (
        np.minimum(np.arange(first, end, block) + block, length) - np.arange(first, end, block)
        for (first, end), block, length in zip(
            (region.q, region.kv), block_mask.BLOCK_SIZE, block_mask.seq_lengths, strict=True
        )
    )
    return float(heights @ live @ widths) / float(heights.sum() * widths.sum())
