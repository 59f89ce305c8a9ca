"""A learned bias for each head and distance."""

from __future__ import annotations

from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.errors import ShapeError, counted
from attnloom.masking.extent import limited
from attnloom.mods.arguments import check_floats
from attnloom.mods.extent import of_table


def relative_bias(table: Tensor) -> ScoreMod:
    """A learned bias for each head and distance; far keys share the last one.

        score + table[h, clamp(q_idx - kv_idx, -M, M) + M]

    Args:
        table: [Hq, 2 * M + 1]; column M is distance 0, later columns are keys further back.
    Returns:
        score_mod; differentiable in score and table.
    Raises:
        ModError: table is not floating point. ShapeError: it has an even number of columns, or not
            2 dimensions.
    Source: Shaw et al. 2018, arXiv:1803.02155, sec. 3.2 (clipping); a scalar a head as in T5,
        arXiv:1910.10683, sec. 2.1.
    """
    check_floats("relative_bias", "table", table, 2)
    reach, even = divmod(table.shape[1] - 1, 2)
    if even or reach < 0:
        raise ShapeError(
            f"relative_bias: table has {counted(table.shape[1], 'column')}; it must have 2 * M + "
            "1, for the distances -M to M."
        )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, (q_idx - kv_idx).clamp(-reach, reach) + reach]

    return limited(score_mod, *of_table("relative_bias", "table", table, "heads", None))
