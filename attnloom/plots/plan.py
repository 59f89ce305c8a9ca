"""plot_plan: what a call computes, how often, in which tiles, and what that costs."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from attnloom.errors import OptionError, counted
from attnloom.masking.lists import of_kind
from attnloom.plots.colours import EMPTY, FULL, LINE, PARTIAL
from attnloom.plots.panels import new_figure, whole_numbers
from attnloom.tools.explanation import Explanation
from attnloom.tools.formula import WHEN, Statement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINE = 92  # characters
_MOST_BARS = 128


def plot_plan(explanation: Explanation, *, title: str | None = None) -> Figure:
    """Draw the plan of a call: every statement of its mods by how often it runs, the live tiles of
    each row of tiles, and the expected time beside dense attention.

    Args:
        explanation: what `attnloom.explain` returns. Parts that it does not have (a mask, measured
            costs) are left out.
        title: above the panels; default: the backend and the sizes.
    Returns:
        matplotlib Figure.
    Raises:
        OptionError: it is no Explanation. UnsupportedError: matplotlib is not installed.
    """
    if not isinstance(explanation, Explanation):
        raise OptionError(
            f"plot_plan draws what attnloom.explain returns, got {type(explanation).__name__}. "
            "Pass plot_plan(attnloom.explain(score_mod, mask_mod, ...))."
        )
    lower = [
        draw
        for draw, shown in (
            (_draw_rows, explanation.block_mask is not None),
            (_draw_costs, explanation.speed is not None),
        )
        if shown
    ]
    runs = statement_runs(explanation)
    heights = [0.5 + sum(map(_height, runs)) * 0.32] + [2.6] * bool(lower)
    figure = new_figure((9.5, sum(heights) + 0.6))
    grid = figure.add_gridspec(len(heights), max(1, len(lower)), height_ratios=heights)
    _draw_statements(figure.add_subplot(grid[0, :]), runs)
    for place, draw in enumerate(lower):
        draw(figure.add_subplot(grid[1, place]), explanation)
    figure.suptitle(title or _title(explanation), fontsize=10)
    return figure


def statement_runs(explanation: Explanation) -> list[tuple[str, Statement, int]]:
    """(kind of mod, statement, how often it runs) of each statement of the mods.

    "every score" of a score_mod are the scores of live tiles, of a mask_mod those of partial tiles.
    """
    s, mask = explanation.setting, explanation.mask
    outer = s.batch * s.heads
    live = s.num_scores if mask is None else mask.full_scores + mask.partial_scores
    asked = 0 if mask is None else mask.partial_scores
    found = []
    for mod in explanation.mods:
        scores = live if mod.kind == "score_mod" else asked
        by_level = dict(
            zip(WHEN.values(), (outer, outer * s.q_len, outer * s.kv_len, scores), strict=True)
        )
        found += [(mod.kind, line, by_level[line.when]) for line in mod.statements]
    return found


def row_work(explanation: Explanation) -> tuple[np.ndarray, np.ndarray]:
    """Full and partial tiles of each row of tiles of batch entry 0 and head 0, [rows] int64."""
    assert explanation.block_mask is not None, "the caller looked"
    lists = explanation.block_mask.lists()
    rows = lists.grid.num_q_blocks
    entries = slice(0, int(lists.row_offsets[rows]))
    owner = lists.entry_rows()[entries].cpu().numpy()
    partial = of_kind(lists, "partial")[entries].cpu().numpy()
    counts = [np.bincount(owner[chosen], minlength=rows) for chosen in (~partial, partial)]
    return counts[0], counts[1]


def _draw_statements(axes: Axes, runs: list[tuple[str, Statement, int]]) -> None:
    from matplotlib.ticker import NullFormatter

    most = max(count for _, _, count in runs)
    heights = [_height(run) for run in runs]
    places = [sum(heights[:n]) + (heights[n] - 1) / 2 for n in range(len(runs))]
    for place, run in zip(places, runs, strict=True):
        kind, _, count = run
        colour = FULL if kind == "score_mod" else PARTIAL
        axes.barh(place, max(count, 1), color=colour, height=0.62, left=0.8)
        axes.text(
            max(count, 1) * 1.3, place, "\n".join(_lines(run)), va="center", fontsize=7,
            family="monospace", clip_on=False,
        )  # fmt: skip
    axes.set_yticks(places, [kind for kind, _, _ in runs], fontsize=7)
    axes.set(xscale="log", xlim=(0.8, max(most, 10) ** 2.6), title="how often each line runs")
    ticks = [10**e for e in range(0, 1 + math.ceil(math.log10(max(most, 10))), 3)]
    axes.set_xticks(ticks, [amount(t) for t in ticks], fontsize=7)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.invert_yaxis()
    _open(axes)


def _lines(run: tuple[str, Statement, int]) -> list[str]:
    """What stands beside a bar; long statements go on, indented."""
    _, line, count = run
    text = f"return {line.text}" if line.name == "return" else f"{line.name} = {line.text}"
    whole = f"{line.when}, {amount(count)}: {text}"
    return textwrap.wrap(whole, _LINE, subsequent_indent="    ", break_on_hyphens=False)


def _height(run: tuple[str, Statement, int]) -> float:
    """In bars: further lines of text take half a one each."""
    return 1 + 0.5 * (len(_lines(run)) - 1)


def _draw_rows(axes: Axes, explanation: Explanation) -> None:
    full, partial = row_work(explanation)
    step = -(-full.size // _MOST_BARS)
    starts = np.arange(0, full.size, step)
    widths = np.minimum(step, full.size - starts)
    full, partial = (np.add.reduceat(x, starts) / widths for x in (full, partial))
    at = starts + (widths - 1) / 2
    axes.bar(at, full, width=widths, color=FULL, label="full")
    axes.bar(
        at, partial, width=widths, bottom=full, color=PARTIAL, label="partial",
    )  # fmt: skip
    assert explanation.mask is not None, "a BlockMask has numbers"
    same = "" if len(explanation.mask.alike) == 1 else " (batch 0, head 0)"
    axes.set(
        title="tiles of each row" + same,
        xlabel=f"row of tiles of {counted(explanation.setting.block_size[0], 'query')}",
        ylabel="live tiles",
    )
    axes.xaxis.set_major_locator(whole_numbers())
    axes.yaxis.set_major_locator(whole_numbers())
    axes.legend(fontsize=7, frameon=False)
    _open(axes)


def _draw_costs(axes: Axes, explanation: Explanation) -> None:
    speed, mask = explanation.speed, explanation.mask
    assert speed is not None, "the caller looked"
    scores = (explanation.setting.num_scores, 0)
    if mask is not None:
        scores = (mask.full_scores, mask.partial_scores)
    full, partial = (
        0.0 if not n else n * ns / 1e6
        for n, ns in zip(scores, (speed.full_ns, speed.partial_ns), strict=True)
    )
    axes.barh(1, speed.dense_ms, color=EMPTY, edgecolor=LINE, height=0.5)
    axes.barh(0, full, color=FULL, height=0.5, label="full tiles")
    axes.barh(0, partial, left=full, color=PARTIAL, height=0.5, label="partial tiles")
    axes.set_yticks([0, 1], ["this call", "dense"])
    factor = f"{speed.speedup:.1f} times as fast" if math.isfinite(speed.speedup) else "nothing"
    axes.set(title=f"expected forward: {factor}", xlabel="milliseconds, from measured tiles")
    axes.legend(fontsize=7, frameon=False)
    _open(axes)


def _open(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.title.set_fontsize(9)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)


def _title(explanation: Explanation) -> str:
    s = explanation.setting
    return (
        f"backend {explanation.backend.backend}: query [{s.batch}, {s.heads}, {s.q_len}, "
        f"{s.head_dim}], key [{s.batch}, {s.kv_heads}, {s.kv_len}, {s.head_dim}]"
    )


def amount(count: int) -> str:
    """3 digits and a unit: 12, 4.1k, 2.36M."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
