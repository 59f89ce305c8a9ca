"""Score_mods in a chain."""

from __future__ import annotations

from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.masking.extent import limited, limits_of
from attnloom.mods.mod_kinds import check_kinds


def compose(*score_mods: ScoreMod) -> ScoreMod:
    """score_mods one after the other, the first one first; without any, the score.

        compose(alibi(8), softcap(30.0))    # the cap sees scores with their bias

    Raises:
        ModError: one of them is not a score_mod.
    """
    check_kinds("compose", score_mods, "score_mod")

    def composed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for score_mod in score_mods:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return score

    return limited(composed, *limits_of(*score_mods))
