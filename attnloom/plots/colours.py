"""The colours of masks and tiles: apart in colour, in grey print, and to colour-blind readers.

From dark to light by how much is computed. `lightness` is what is left of a colour in grey; the
tests hold neighbours at least 10 of 100 apart.
"""

from __future__ import annotations

import numpy as np

FULL = "#12355b"
PARTIAL = "#e08e45"
DROPPED = "#f1d9ba"
EMPTY = "#ffffff"
LINE = "#8a8a8a"
# By kind of cell, see `cells.Kind`.
PALETTE = (EMPTY, DROPPED, PARTIAL, FULL)


def rgb(colour: str) -> np.ndarray:
    """[3] float64 in 0 .. 1 of "#rrggbb"."""
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def palette_rgb() -> np.ndarray:
    """[4, 3] float64: PALETTE by kind of cell."""
    return np.stack([rgb(colour) for colour in PALETTE])


def lightness(colour: str) -> float:
    """CIE L*, 0 black to 100 white."""
    channels = rgb(colour)
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    y = float(linear @ np.array([0.2126, 0.7152, 0.0722]))
    return 116 * y ** (1 / 3) - 16 if y > (6 / 29) ** 3 else y * (29 / 3) ** 3
