"""One example of each variant of attnloom.mods: what the gallery draws and measures."""

from __future__ import annotations

from benchmarks.variant import Variant
from benchmarks.variants_masks import MASKS
from benchmarks.variants_scores import SCORES_AND_COMBINATORS

__all__ = ["VARIANTS", "Variant"]

VARIANTS: tuple[Variant, ...] = (*MASKS, *SCORES_AND_COMBINATORS)
