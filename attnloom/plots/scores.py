"""plot_scores: what a score_mod makes of scores, or of nothing but positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnloom.api.attention import ScoreMod
from attnloom.block_mask import BlockMask
from attnloom.errors import ShapeError
from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType
from attnloom.masking.arguments import check_flag, check_tensor, read_int
from attnloom.masking.captures import captured_tensors
from attnloom.masking.views import MaskMod, noop_mask
from attnloom.plots.cells import MAX_SCORES, Kind, token_kinds
from attnloom.plots.mask import given_lengths, told_heads
from attnloom.plots.panels import draw_image, label_axes, panels, read_labels
from attnloom.plots.region import Heads, Region, Span, check_tokens, read_heads, read_span
from attnloom.tools.lengths import axis_lengths
from attnloom.trace.tracer import trace_score

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = "viridis"  # its lightness rises all the way, so that it prints in grey
_MASKED = "#ffffff"
_WIDEST = 1e4  # greatest over least weight that colours tell apart


@dataclass(frozen=True, slots=True)
class _Source:
    """Where scores come from. query [B, Hq, Q_LEN, D] and key [B, Hkv, KV_LEN, D], or neither: then
    every score is 0. score: the traced score_mod, None leaves scores as they are."""

    query: torch.Tensor | None
    key: torch.Tensor | None
    score: BoundProgram | None
    mask_mod: MaskMod
    block_mask: BlockMask | None


def plot_scores(
    score_mod: ScoreMod | None = None,
    mask: MaskMod | BlockMask | None = None,
    *,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
    softmax: bool = False,
    batch: int = 0,
    heads: Heads = None,
    q_range: Span | None = None,
    kv_range: Span | None = None,
    tokens: Sequence[str] | None = None,
    kv_tokens: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw scores after a score_mod, or the attention weights that come of them; one panel a head.

    Without query and key every score is 0 before the mod, so that the picture shows what positions
    alone add. All panels share one scale of colours, whose lightness rises with the value, for
    weights of the softmax with its logarithm, over four decades at most; masked scores are white.

    Args:
        score_mod: as flex_attention takes it; None leaves scores as they are.
        mask: a mask_mod or a BlockMask; None keeps every score.
        query, key: [B, Hq, Q_LEN, D] and [B, Hkv, KV_LEN, D], both or neither; scaled by
            1 / sqrt(D).
        q_len, kv_len: lengths in tokens, where neither query and key nor a BlockMask has them.
        softmax: draw the weights of a row's softmax instead of its scores.
        batch: the batch entry.
        heads: a head or several. Default: those of query, else as captured tensors tell.
        q_range, kv_range: zoom in on tokens (first, end).
        tokens: a label for each query, and each key if their lengths agree. kv_tokens: for keys.
        title: above the panels.
    Returns:
        matplotlib Figure.
    Raises:
        ShapeError: sizes, ranges or labels do not fit, or there are more than 2^24 scores to draw.
        TraceError: a mod cannot be traced. UnsupportedError: matplotlib is not installed.
    """
    check_flag("softmax", softmax)
    rows, columns = _lengths(query, key, mask, q_len, kv_len)
    source = _source(score_mod, mask, query, key)
    region = Region(
        read_int("batch", batch),
        read_heads(heads, _num_heads(source)),
        read_span("q_range", q_range, rows),
        read_span("kv_range", kv_range, columns),
    )
    _check_region(source, region, columns)
    labels = read_labels(tokens, kv_tokens, rows, columns)
    values = [_values(source, region, head, columns, softmax) for head in region.heads]
    shown = np.concatenate([v[np.isfinite(v)] for v in values])
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0)
    scale: dict[str, Any] = {"vmin": low, "vmax": high}
    if softmax:
        scale = {"norm": _log_scale(low, high)}
    figure, all_axes = panels(len(region.heads), title)
    from matplotlib import colormaps

    colours = colormaps[_COLOURS].with_extremes(bad=_MASKED)
    several = len(region.heads) > 1
    for axes, head, image in zip(all_axes, region.heads, values, strict=True):
        finite = np.ma.masked_invalid(image)
        drawn = draw_image(axes, finite, region, cmap=colours, **scale)
        label_axes(axes, region, labels, several)
        if several:
            axes.set_title(f"head {head}", fontsize=8)
    bar = figure.colorbar(drawn, ax=all_axes, shrink=0.8)
    if softmax:
        from matplotlib.ticker import FuncFormatter, LogLocator

        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda weight, _: f"{weight:.3g}"))
    bar.set_label("weight after the softmax" if softmax else "score")
    return figure


def _log_scale(low: float, high: float) -> Any:
    """Colours by the logarithm of a weight: one row that sees a single key has weight 1, and would
    leave rows of hundreds of keys black. Weights below high / _WIDEST are drawn as that."""
    from matplotlib.colors import FuncNorm

    least = max(low, high / _WIDEST) if high > 0 else 1.0
    least = least if least < high else high / 2 or 0.5

    def forward(weights: Any) -> Any:
        return np.log(np.maximum(weights, least))

    return FuncNorm((forward, np.exp), vmin=least, vmax=max(high, 2 * least), clip=True)


def _lengths(
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    mask: MaskMod | BlockMask | None,
    q_len: int | None,
    kv_len: int | None,
) -> tuple[int, int]:
    if (query is None) != (key is None):
        raise ShapeError("query and key make scores together; give both or neither.")
    if query is not None and key is not None:
        for name, tensor in (("query", query), ("key", key)):
            check_tensor(name, tensor)
            if tensor.dim() != 4:
                raise ShapeError(f"{name} is {list(tensor.shape)}; it must be [B, H, L, D].")
        if query.size(3) != key.size(3) or query.size(1) % key.size(1):
            raise ShapeError(
                f"query {list(query.shape)} and key {list(key.shape)} do not fit: D must agree, "
                "and heads of query must be a multiple of those of key."
            )
        return query.size(2), key.size(2)
    if isinstance(mask, BlockMask) and q_len is None:
        check_tokens(mask)
        return mask.seq_lengths
    return given_lengths(q_len, kv_len)


def _source(
    score_mod: ScoreMod | None,
    mask: MaskMod | BlockMask | None,
    query: torch.Tensor | None,
    key: torch.Tensor | None,
) -> _Source:
    score = None
    if score_mod is not None:
        device = next((t.device for t in captured_tensors(score_mod)), torch.device("cpu"))
        with torch.no_grad():
            score = trace_score(score_mod, DType.F32, device)
    if isinstance(mask, BlockMask):
        return _Source(query, key, score, mask.mask_mod, mask)
    return _Source(query, key, score, noop_mask if mask is None else mask, None)


def _num_heads(source: _Source) -> int:
    if source.query is not None:
        return source.query.size(1)
    told = [told_heads(source.mask_mod)]
    if source.block_mask is not None:
        told.append(source.block_mask.lists().num_heads)
    if source.score is not None:
        found = axis_lengths(source.score, ("",) * len(source.score.tensors))
        told += [length.length for length in found if length.axis == "h"]
    return min((n for n in told if n > 1), default=1)


def _check_region(source: _Source, region: Region, kv_len: int) -> None:
    rows, _ = region.shape
    if rows * kv_len > MAX_SCORES:
        raise ShapeError(
            f"a picture of {rows} queries by {kv_len} keys asks for {rows * kv_len} scores, more "
            f"than {MAX_SCORES}. Zoom in with q_range=(first, end)."
        )
    if source.query is not None:
        sizes = (("batch", region.batch, 0), ("heads", max(region.heads), 1))
        for name, index, dim in sizes:
            if index >= source.query.size(dim):
                raise ShapeError(
                    f"{name} is {index}; query {list(source.query.shape)} has "
                    f"{source.query.size(dim)}, counted from 0."
                )


def _values(source: _Source, region: Region, head: int, kv_len: int, softmax: bool) -> np.ndarray:
    """[queries, keys] float64 of a region; NaN where masked."""
    row = Region(region.batch, region.heads, region.q, (0, kv_len))
    scores = _raw(source, row, head)
    if source.score is not None:
        at = {
            "b": torch.full((1, 1), region.batch),
            "h": torch.full((1, 1), head),
            "q": torch.arange(*region.q)[:, None],
            "kv": torch.arange(kv_len)[None],
        }
        device = next((t.device for t in source.score.tensors), torch.device("cpu"))
        inputs = {name: x.to(device) for name, x in {"score": scores, **at}.items()}
        with torch.no_grad():
            scores = interpret(source.score, inputs)[0].expand(row.shape).cpu()
    kinds = token_kinds(source.mask_mod, source.block_mask, row, head)
    kept = torch.from_numpy((kinds == Kind.PARTIAL) | (kinds == Kind.FULL))
    scores = scores.double().masked_fill(~kept, -math.inf)
    if softmax:
        scores = torch.softmax(scores, -1).masked_fill(~kept, math.nan)
    return scores.masked_fill(scores == -math.inf, math.nan)[:, slice(*region.kv)].numpy()


def _raw(source: _Source, region: Region, head: int) -> torch.Tensor:
    """[queries, keys] float32: scores before the mod."""
    if source.query is None or source.key is None:
        return torch.zeros(region.shape)
    group = source.query.size(1) // source.key.size(1)
    with torch.no_grad():
        query = source.query[region.batch, head, slice(*region.q)].float().cpu()
        key = source.key[min(region.batch, source.key.size(0) - 1), head // group].float().cpu()
        return query @ key.T / math.sqrt(query.size(-1))
