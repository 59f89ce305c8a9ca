"""MODS, filled with every row."""

from tests.harness import mask_mods, score_mods
from tests.harness.table import MODS, Captures, Mod, ModPair

__all__ = ["MODS", "Captures", "Mod", "ModPair", "mask_mods", "score_mods"]
