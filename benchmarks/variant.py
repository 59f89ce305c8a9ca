"""An example of a variant of attention, at any size.

The code of an example is text, so that a page shows what was run. It may use torch, math,
attnloom's `mods`, and the sizes B, H (4 or more) and S (a power of 4 from 64; 64 or 4096 where
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

    names: what it shows, the first of attnloom.mods; joined they are the example's name.
    summary: one line for its caption.
    mask_axes: which of "b", "h" the mask depends on.
    q_len, kv_len: lengths where they are not S, as functions of it ("S // 2").
    cubic: S must be a cube as well as a square (64, 4096).
    """

    names: tuple[str, ...]
    family: Family
    summary: str
    code: str
    mask_axes: str = ""
    q_len: str = "S"
    kv_len: str = "S"
    cubic: bool = False

    @property
    def name(self) -> str:
        return "-".join(self.names)

    def lengths(self, S: int) -> tuple[int, int]:
        """(Q_LEN, KV_LEN) at size S."""
        q_len, kv_len = (eval(text, {"S": S}) for text in (self.q_len, self.kv_len))
        return q_len, kv_len

    def build(self, B: int, H: int, S: int) -> tuple[Mod | None, Mod | None]:
        """(score_mod, mask_mod) at these sizes; None for what the example does not set.

        What it draws, on torch's default device, is the same every time.
        """
        scope: dict[str, Any] = {"torch": torch, "math": math, "mods": mods, "B": B, "H": H, "S": S}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            exec(compile(self.code, f"<variant {self.name}>", "exec"), scope)
        return scope.get("score_mod"), scope.get("mask_mod")
