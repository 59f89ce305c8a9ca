"""explain_html: an Explanation as one page that needs neither network nor matplotlib."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import numpy as np

from attnloom.errors import OptionError, counted
from attnloom.plots.cells import Kind, tile_kinds
from attnloom.plots.colours import EMPTY, FULL, PARTIAL, palette_rgb
from attnloom.plots.plan import amount, statement_runs
from attnloom.plots.png import png_bytes
from attnloom.plots.region import Region
from attnloom.tools.alike import pairs_text
from attnloom.tools.explanation import Explanation, MaskSummary
from attnloom.tools.speed import SpeedEstimate

_MOST_CELLS = 128  # a side of the picture; each cell is a tile, or as many tiles as it takes
_MOST_ENTRIES = 16
_MIXED = 1  # cells that stand for tiles of more than one kind; others are Kinds
_NOWHERE = "Point at the picture: which queries and keys a cell stands for is written here."


def explain_html(explanation: Explanation) -> str:
    """An Explanation as a page: block map, programs and where they run, gradients, cost.

    Args:
        explanation: what `attnloom.explain` returns.
    Returns:
        HTML, complete in itself: styles, script and pictures are inside. Without JavaScript it
        shows the same, but for the tooltip of the block map and the choice of a head.
    Raises:
        OptionError: it is no Explanation.
    """
    if not isinstance(explanation, Explanation):
        raise OptionError(
            f"explain_html shows what attnloom.explain returns, got {type(explanation).__name__}. "
            "Pass explain_html(attnloom.explain(score_mod, mask_mod, ...))."
        )
    names = " with ".join(f"{mod.kind} {mod.name}" for mod in explanation.mods)
    body = "\n".join(_body(explanation, names))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>attnloom: {html.escape(names)}</title>\n<style>\n{_asset('page.css')}</style>\n"
        f"</head>\n<body>\n{body}\n<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("attnloom.plots").joinpath(name).read_text(encoding="utf-8")


def _body(explanation: Explanation, names: str) -> Iterator[str]:
    s = explanation.setting
    dtype = str(s.dtype).removeprefix("torch.")
    yield f"<h1>{html.escape(names)}</h1>"
    yield _paragraph(
        f"query [{s.batch}, {s.heads}, {s.q_len}, {s.head_dim}], key and value [{s.batch}, "
        f"{s.kv_heads}, {s.kv_len}, {s.head_dim}], {dtype} on {s.device}"
    )
    yield from (_paragraph(note, "quiet") for note in s.notes)
    if explanation.mask is not None:
        yield from _block_map(explanation, explanation.mask)
    yield from _programs(explanation)
    if explanation.gradient is not None:
        yield from _gradient(explanation)
    yield "<h2>Backend</h2>"
    backend = explanation.backend
    yield _paragraph(f"{backend.backend} (kernel: {backend.kernel}): {backend.why}")
    yield from (_paragraph(f"Not {r.backend}: {r.reason}", "quiet") for r in backend.rejected)
    if explanation.speed is not None:
        yield from _cost(explanation, explanation.speed)


def _block_map(explanation: Explanation, mask: MaskSummary) -> Iterator[str]:
    yield "<h2>Block map</h2>"
    grids = _grids(explanation)
    q_block, kv_block = explanation.setting.block_size
    entries = list(grids)
    yield '<div class="map">\n<figure>'
    if len(entries) > 1:
        options = "".join(
            f'<option value="{n}">{n + 1}: {pairs_text(pairs)}</option>'
            for n, pairs in enumerate(mask.alike[: len(entries)])
        )
        yield f'<p><label>Shown: <select id="entry">{options}</select></label></p>'
    for place, ((b, h), cells) in enumerate(grids.items()):
        encoded = base64.b64encode(png_bytes(_coloured(cells))).decode()
        what = f"Block map of batch entry {b}, head {h}: rows are queries, columns are keys"
        hidden = " hidden" if place else ""
        yield f'<img src="data:image/png;base64,{encoded}" alt="{what}"{hidden}>'
    yield f'<output id="cell">{_NOWHERE}</output>\n</figure>\n<div class="beside">'
    empty = mask.num_tiles - mask.num_full - mask.num_partial
    rows = [
        (_swatch(FULL) + "full", mask.num_full, "the mask_mod is not asked"),
        (_swatch(PARTIAL) + "partial", mask.num_partial, "asked at every score"),
        (_swatch(EMPTY) + "empty", empty, "skipped"),
    ]
    yield _table(
        ("tiles", "", "", ""),
        [
            (name, _number(str(n)), _number(f"{n / mask.num_tiles:.1%}"), _cell(text))
            for name, n, text in rows
        ],
    )
    yield _paragraph(
        f"{mask.density:.2%} of the scores lie in tiles that are computed. Tiles are {q_block} "
        f"queries by {kv_block} keys; the map was built in {mask.build_seconds * 1e3:.1f} ms."
    )
    yield from _who_shares(mask, len(entries))
    yield "</div>\n</div>"
    assert explanation.block_mask is not None, "a BlockMask has numbers"
    data = {
        "cells": [["".join(map(str, row)) for row in cells.tolist()] for cells in grids.values()],
        "tiles": _steps(explanation),
        "block": [q_block, kv_block],
        "lengths": [explanation.setting.q_len, explanation.setting.kv_len],
    }
    yield f'<script type="application/json" id="map-data">{_json(data)}</script>'


def _who_shares(mask: MaskSummary, num_shown: int) -> Iterator[str]:
    if len(mask.alike) == 1:
        yield _paragraph("The tiles of all batch entries and heads are alike.")
        return
    same = f"{len(mask.alike)} block maps differ over batch entries and heads."
    if num_shown < len(mask.alike):
        same += f" The first {num_shown} are shown."
    yield _paragraph(same)
    lines = [f"<li>{html.escape(pairs_text(pairs))}</li>" for pairs in mask.alike[:num_shown]]
    yield f'<ol class="quiet">{"".join(lines)}</ol>'


def _grids(explanation: Explanation) -> dict[tuple[int, int], np.ndarray]:
    """(batch entry, head) -> [rows, columns] of Kind or _MIXED, the first of those that share a
    map."""
    block_mask, mask = explanation.block_mask, explanation.mask
    assert block_mask is not None and mask is not None, "a BlockMask has numbers"
    s = explanation.setting
    found = {}
    for (b, h), *_ in mask.alike[:_MOST_ENTRIES]:
        kinds = tile_kinds(block_mask, Region(b, (h,), (0, s.q_len), (0, s.kv_len)), h)
        for axis, step in enumerate(_steps(explanation)):
            kinds = _joined(kinds, axis, step)
        found[b, h] = kinds
    return found


def _steps(explanation: Explanation) -> list[int]:
    """Tiles of a cell, along queries and along keys."""
    s = explanation.setting
    lengths = zip((s.q_len, s.kv_len), s.block_size, strict=True)
    return [math.ceil(math.ceil(length / block) / _MOST_CELLS) for length, block in lengths]


def _joined(kinds: np.ndarray, axis: int, step: int) -> np.ndarray:
    """Runs of `step` cells along an axis as one: their kind, or _MIXED."""
    if step == 1:
        return kinds
    starts = np.arange(0, kinds.shape[axis], step)
    low, high = (f.reduceat(kinds, starts, axis=axis) for f in (np.minimum, np.maximum))
    return np.where(low == high, low, _MIXED).astype(np.uint8)


def _coloured(cells: np.ndarray) -> np.ndarray:
    """Colours of cells; a mixed one is between empty and live."""
    palette = palette_rgb()
    palette[_MIXED] = (palette[Kind.EMPTY] + palette[Kind.PARTIAL]) / 2
    return palette[cells]


def _programs(explanation: Explanation) -> Iterator[str]:
    runs = statement_runs(explanation)
    most = math.log10(max(10, *(count for _, _, count in runs)))
    for mod in explanation.mods:
        yield f"<h2>{mod.kind} <code>{html.escape(mod.name)}</code></h2>"
        yield _paragraph(f"defined in {mod.place}", "quiet")
        for c in mod.captures:
            learnable = ", gets a gradient" if c.learnable else ""
            dtype = str(c.dtype).removeprefix("torch.")
            yield _paragraph(f"reads {c.name} {list(c.shape)} {dtype}{learnable}")
        rows = []
        for kind, line, count in runs:
            if kind == mod.kind:
                share = 100 * math.log10(max(1, count)) / most
                bar = f'<div class="bar {kind}" style="width: {share:.1f}%"></div>'
                rows.append(
                    (
                        f'<td class="when">{line.when}',
                        _number(amount(count)),
                        f'<td class="chart">{bar}',
                        f'<td class="code">{html.escape(_assignment(line))}',
                    )
                )
        yield _table(("computed", "times", "(logarithmic)", "statement"), rows)
        yield "<details><summary>every operation</summary>"
        yield f"<pre>{html.escape(mod.program)}</pre></details>"


def _gradient(explanation: Explanation) -> Iterator[str]:
    found = explanation.gradient
    assert found is not None, "the caller looked"
    yield "<h2>Gradient</h2>"
    yield _paragraph(f"{counted(found.num_nodes, 'operation')}, the recomputed score included")
    rows = [
        (f'<td class="when">{s.when}', f'<td class="code">{html.escape(_assignment(s))}')
        for s in found.statements
    ]
    for c in found.captured:
        over = f"summed over {c.summed_over}" if c.summed_over else ""
        text = f"d_{c.name}[{c.index}] += {c.value}"
        rows.append((f'<td class="when">{over}', f'<td class="code">{html.escape(text)}'))
    yield _table(("computed", "statement"), rows)
    if not found.captured:
        yield _paragraph("No captured tensor requires grad.", "quiet")


def _cost(explanation: Explanation, speed: SpeedEstimate) -> Iterator[str]:
    yield "<h2>Expected forward</h2>"
    mask, num_scores = explanation.mask, explanation.setting.num_scores
    areas = (num_scores, 0) if mask is None else (mask.full_scores, mask.partial_scores)
    parts = [
        0.0 if not area else area * ns / 1e6
        for area, ns in zip(areas, (speed.full_ns, speed.partial_ns), strict=True)
    ]
    most = max(speed.dense_ms, sum(parts)) or 1.0

    def bar(*pieces: tuple[str, float]) -> str:
        inner = "".join(
            f'<div class="bar {kind}" style="width: {100 * ms / most:.1f}%"></div>'
            for kind, ms in pieces
            if ms
        )
        return f'<td class="chart"><div class="stack">{inner}</div>'

    plain = f"{speed.plain_ns:.3f} ns a score"
    costs = [
        f"{name} tiles {ns:.3f} ns a score"
        for name, ns in (("full", speed.full_ns), ("partial", speed.partial_ns))
        if not math.isnan(ns)
    ]
    yield _table(
        ("", "milliseconds", "", "measured here, now"),
        [
            (
                _cell("dense, without mods"),
                _number(f"{speed.dense_ms:.3g}"),
                bar(("dense", speed.dense_ms)),
                _cell(plain),
            ),
            (
                _cell("this call"),
                _number(f"{speed.expected_ms:.3g}"),
                bar(("full", parts[0]), ("partial", parts[1])),
                _cell("; ".join(costs)),
            ),
        ],
    )
    if math.isfinite(speed.speedup):
        yield _paragraph(f"Expected speed-up over dense attention: {speed.speedup:.2f}")
    yield _paragraph(speed.how, "quiet")


def _assignment(statement: Any) -> str:
    joint = " " if statement.name == "return" else " = "
    return f"{statement.name}{joint}{statement.text}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML; one that does not open a <td> itself gets a plain one."""
    top = "".join(f"<th>{head}</th>" for head in heads)
    lines = [f"<tr>{top}</tr>"]
    for row in rows:
        cells = (cell if cell.startswith("<td") else f"<td>{cell}" for cell in row)
        lines.append("<tr>" + "".join(f"{cell}</td>" for cell in cells) + "</tr>")
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _number(text: str) -> str:
    return f'<td class="number">{html.escape(text)}'


def _cell(text: str) -> str:
    return f"<td>{html.escape(text)}"


def _swatch(colour: str) -> str:
    return f'<td><span class="swatch" style="background: {colour}"></span>'


def _paragraph(text: str, kind: str = "") -> str:
    shown = f' class="{kind}"' if kind else ""
    return f"<p{shown}>{html.escape(text)}</p>"


def _json(data: object) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
