"""A mod of its own for each head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnloom.errors import ModError, counted
from attnloom.masking.extent import Limit, limited, limits_of
from attnloom.mods.arguments import read_integers
from attnloom.mods.mod_kinds import Mod, check_functions, check_kinds, kind_of_mod


def per_head(*mods: Mod, heads: Sequence[int] | Tensor | None = None) -> Mod:
    """A mod of its own for each head, all mask_mods or all score_mods.

        per_head(sliding_window(128), causal_mask, heads=[0, 0, 0, 1])

    Args:
        mods: one or more.
        heads: [Hq] integers, which of the mods each query head uses; default: head h uses mods[h].
            A tensor says where the table lies; a list makes it on torch's default device.
    Returns:
        A mod of their kind. Kernels compute all of them and choose, so that similar mods (windows
        of different lengths) are faster as one that captures a table; skipped tiles are those of
        each head.
    Raises:
        ModError: there are none, they are of different kinds, or heads names one that is not there.
    """
    if not mods:
        raise ModError("per_head: there are no mods; give one or more.")
    check_functions("per_head", mods, "mod")
    kind = kind_of_mod(mods[0])
    check_kinds("per_head", mods, kind)
    named = "mods" if heads is None else "heads"
    heads = read_integers("per_head", "heads", range(len(mods)) if heads is None else heads, 1)
    wrong = heads[(heads < 0) | (heads >= len(mods))]
    if wrong.numel():
        raise ModError(
            f"per_head: heads names mod {int(wrong[0])} of {counted(len(mods), 'mod')}; valid are "
            f"0 to {len(mods) - 1}."
        )
    if len(mods) == 1:
        return mods[0]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        number = heads[h]
        kept = mods[-1](b, h, q_idx, kv_idx)
        for place, mod in enumerate(mods[:-1]):
            kept = torch.where(number == place, mod(b, h, q_idx, kv_idx), kept)
        return kept

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        number = heads[h]
        found = mods[-1](score, b, h, q_idx, kv_idx)
        for place, mod in enumerate(mods[:-1]):
            found = torch.where(number == place, mod(score, b, h, q_idx, kv_idx), found)
        return found

    source = f"per_head: {named} has {counted(heads.numel(), 'element')}"
    limits = [Limit("heads", heads.numel(), False, source), *limits_of(*mods)]
    return limited(mask_mod if kind == "mask_mod" else score_mod, *limits)
