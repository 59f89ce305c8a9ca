"""What the figures share: panels in a grid, axes in tokens, labels, legends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from attnloom.errors import ShapeError, UnsupportedError, counted
from attnloom.plots.colours import LINE, PALETTE
from attnloom.plots.region import Region

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_INCHES = 4.6
_SMALL_PANEL_INCHES = 2.8
_MOST_LABELS = 40
_MOST_LINES = 72
_MOST_TICKS = 6


@dataclass(frozen=True, slots=True)
class Labels:
    """Texts of tokens along each side, of the whole length; None shows numbers."""

    q: Sequence[str] | None
    kv: Sequence[str] | None


def read_labels(
    tokens: Sequence[str] | None, kv_tokens: Sequence[str] | None, q_len: int, kv_len: int
) -> Labels:
    """Labels of queries and keys; keys have those of queries if their lengths agree.

    Raises:
        ShapeError: there are not as many as tokens.
    """
    if kv_tokens is None and q_len == kv_len:
        kv_tokens = tokens
    for name, given, length in (("tokens", tokens, q_len), ("kv_tokens", kv_tokens, kv_len)):
        if given is not None and len(given) != length:
            raise ShapeError(
                f"{name} has {counted(len(given), 'label')}; there are {counted(length, 'token')}, "
                "and each needs one."
            )
    return Labels(tokens, kv_tokens)


def panels(count: int, title: str | None) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of panels.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    side = _PANEL_INCHES if count == 1 else _SMALL_PANEL_INCHES
    figure = new_figure((columns * side + 0.4, rows * side + 0.9))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    if title:
        figure.suptitle(title)
    return figure, axes[:count]


def new_figure(inches: tuple[float, float]) -> Figure:
    """A figure that no global state knows.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(
            "pictures need matplotlib, which the core of attnloom does not install. Run: pip "
            "install 'attnloom[plots]'. (print(block_mask) and `attnloom explain --html` do "
            "without.)"
        ) from None
    return Figure(figsize=inches, layout="constrained")


def draw_image(axes: Axes, image: Any, region: Region, **options: Any) -> Any:
    """An image over the tokens of a region, query 0 at the top."""
    extent = (region.kv[0] - 0.5, region.kv[1] - 0.5, region.q[1] - 0.5, region.q[0] - 0.5)
    return axes.imshow(
        image, extent=extent, interpolation="nearest", aspect=_aspect(region), **options
    )


def label_axes(axes: Axes, region: Region, labels: Labels, small: bool) -> None:
    """Token texts or numbers along both sides."""
    for axis, span, texts, name in (
        (axes.yaxis, region.q, labels.q, "q_idx"),
        (axes.xaxis, region.kv, labels.kv, "kv_idx"),
    ):
        if texts is not None:
            step = -(-(span[1] - span[0]) // _MOST_LABELS)
            places = list(range(span[0], span[1], step))
            turned = 90 if axis is axes.xaxis else 0
            axis.set_ticks(places, [texts[i] for i in places], fontsize=7, rotation=turned)
        else:
            axis.set_major_locator(whole_numbers())
        if not small:
            axis.set_label_text(name)
    if small:
        axes.tick_params(labelsize=6)


def rule(axes: Axes, region: Region, steps: tuple[int, int]) -> None:
    """Thin lines every `steps` (query, key) tokens, where there are few enough to help."""
    for draw, span, step in (
        (axes.axhline, region.q, steps[0]),
        (axes.axvline, region.kv, steps[1]),
    ):
        first = -(-(span[0] + 1) // step) * step
        places = range(first, span[1], step)
        if len(places) <= _MOST_LINES:
            for place in places:
                draw(place - 0.5, color=LINE, linewidth=0.4)


def key_of_kinds(figure: Figure, entries: Sequence[tuple[int, str]]) -> None:
    """A legend of colours under the panels: (kind, text) pairs."""
    from matplotlib.patches import Patch

    marks = [
        Patch(facecolor=PALETTE[kind], edgecolor=LINE, linewidth=0.6, label=text)
        for kind, text in entries
    ]
    narrow = figure.get_figwidth() < 7
    figure.legend(
        handles=marks, loc="outside lower center", ncols=2 if narrow else len(marks), fontsize=7,
        frameon=False,
    )  # fmt: skip


def _aspect(region: Region) -> Literal["equal", "auto"]:
    """Square tokens, but for regions so narrow that they would become a line."""
    rows, columns = region.shape
    return "equal" if max(rows, columns) <= 4 * min(rows, columns) else "auto"


def whole_numbers() -> Any:
    """A few ticks, none between integers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(_MOST_TICKS, integer=True)
