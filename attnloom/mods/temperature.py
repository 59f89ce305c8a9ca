"""Temperatures of the softmax."""

from __future__ import annotations

from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.masking.extent import Axis, limited
from attnloom.mods.arguments import check_floats
from attnloom.mods.extent import of_table


def head_temperature(temperature: Tensor) -> ScoreMod:
    """One temperature a head.

        score / temperature[h]

    Args:
        temperature: [Hq] floating point, not 0.
    Returns:
        score_mod; differentiable in score and temperature.
    Raises:
        ModError: temperature is not floating point. ShapeError: it has not 1 dimension.
    Source: Henry et al. 2020 (query-key normalisation), arXiv:2010.04245, learns such a factor.
    """
    check_floats("head_temperature", "temperature", temperature, 1)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score / temperature[h]

    return limited(score_mod, *of_table("head_temperature", "temperature", temperature, "heads"))


def position_temperature(scale: Tensor) -> ScoreMod:
    """One factor a query, such as s * log(n) for a query that sees n keys.

        score * scale[q_idx]

    Args:
        scale: [Q_LEN], or [Hq, Q_LEN], floating point: the inverse of a temperature.
    Returns:
        score_mod; differentiable in score and scale.
    Raises:
        ModError: scale is not floating point. ShapeError: it has not 1 or 2 dimensions.
    Source: Nakanishi 2025 (scalable softmax), arXiv:2501.19399, sec. 2.
    """
    check_floats("position_temperature", "scale", scale, 1, 2)
    headed = scale.dim() == 2

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * (scale[h, q_idx] if headed else scale[q_idx])

    leading: tuple[Axis, ...] = ("heads",) if headed else ()
    return limited(score_mod, *of_table("position_temperature", "scale", scale, *leading, "Q_LEN"))
