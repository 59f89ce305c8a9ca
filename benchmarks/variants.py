"""One example of each variant of attnloom.mods, at any size: what the gallery draws and measures.

The code of an example is text, so that a page shows what was run. It may use torch, attnloom's
`mods`, and the sizes B, H, S (a length of queries and keys, a power of 4, also 64 or 4096 where
`cubic`), and sets `mask_mod`, `score_mod`, or both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from attnloom import mods

Mod = Callable[..., Any]
Family = Literal["mask", "score", "combinator"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One example.

    names: what it shows of attnloom.mods, the first gives the example its name.
    summary: one line for its caption.
    mask_axes: which of "b", "h" the mask depends on.
    cubic: S must be a cube as well as a square (64, 4096).
    """

    names: tuple[str, ...]
    family: Family
    summary: str
    code: str
    mask_axes: str = ""
    cubic: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    def build(self, B: int, H: int, S: int) -> tuple[Mod | None, Mod | None]:
        """(score_mod, mask_mod) at these sizes; None for what the example does not set."""
        scope: dict[str, Any] = {"torch": torch, "math": math, "mods": mods, "B": B, "H": H, "S": S}
        exec(compile(self.code, f"<variant {self.name}>", "exec"), scope)
        return scope.get("score_mod"), scope.get("mask_mod")


VARIANTS: tuple[Variant, ...] = (
    Variant(
        ("causal_mask",),
        "mask",
        "Each token sees itself and what comes before it.",
        "mask_mod = mods.causal_mask",
    ),
    Variant(
        ("sliding_window",),
        "mask",
        "Causal, a number of tokens back.",
        "mask_mod = mods.sliding_window(window_left=S // 8)",
    ),
    Variant(
        ("documents_from_cu_seqlens",),
        "mask",
        "Documents packed into one row, here causal inside each.",
        "cu_seqlens = torch.tensor([0, S // 8, S // 2, S // 2 + 1, S])\n"
        "packed = mods.documents_from_cu_seqlens(cu_seqlens)\n"
        "mask_mod = mods.and_masks(mods.causal_mask, packed)",
    ),
    Variant(
        ("alibi",),
        "score",
        "Penalises distance linearly, one slope a head.",
        "mask_mod = mods.causal_mask\nscore_mod = mods.alibi(num_heads=H)",
    ),
    Variant(
        ("softcap",),
        "score",
        "Keeps scores within bounds, smoothly.",
        "mask_mod = mods.causal_mask\nscore_mod = mods.softcap(cap=20.0)",
    ),
)
