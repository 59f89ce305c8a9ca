"""MODS and PUBLISHED, filled with every row, and the row of a name of either."""

from tests.harness import mask_mods, published_masks, published_scores, score_mods
from tests.harness.published import PUBLISHED
from tests.harness.table import MODS, Captures, Mod, ModPair

__all__ = [
    "MODS",
    "PUBLISHED",
    "Captures",
    "Mod",
    "ModPair",
    "mask_mods",
    "published_masks",
    "published_scores",
    "row_of",
    "score_mods",
]


def row_of(name: str) -> Mod:
    """KeyError if there is none of that name."""
    return PUBLISHED[name] if name in PUBLISHED else MODS[name]
