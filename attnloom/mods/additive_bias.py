"""Biases that are given for each pair, or for each head."""

from __future__ import annotations

from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.masking.extent import Axis, limited
from attnloom.mods.arguments import check_floats
from attnloom.mods.extent import of_table


def additive_bias(bias: Tensor) -> ScoreMod:
    """A full bias, as scaled_dot_product_attention's attn_mask.

        score + bias[b, h, q_idx, kv_idx]

    Args:
        bias: [Q_LEN, KV_LEN], [H, Q_LEN, KV_LEN] or [B, H, Q_LEN, KV_LEN], floating point; B and H
            may be 1, which broadcasts. -inf hides a score, but a BlockMask is what saves its time.
    Returns:
        score_mod; differentiable in score and bias.
    Raises:
        ModError: bias is not floating point. ShapeError: it has not 2 to 4 dimensions.
    Source: the pair bias of Jumper et al. 2021 (AlphaFold 2), doi:10.1038/s41586-021-03819-2,
        supplement 1.6.1, among many.
    """
    check_floats("additive_bias", "bias", bias, 2, 3, 4)
    batched = bias.dim() == 4 and bias.shape[0] > 1
    headed = bias.dim() > 2 and bias.shape[-3] > 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        # One look-up: of a chain, what runs on many scores at once would gather whole rows.
        table, at = bias, (q_idx, kv_idx)
        if bias.dim() > 2:
            table, at = (table, (h, *at)) if headed else (table[..., 0, :, :], at)
        if bias.dim() == 4:
            table, at = (table, (b, *at)) if batched else (table[0], at)
        return score + table[at]

    leading: tuple[Axis, ...] = ("batch", "heads")
    limits = of_table("additive_bias", "bias", bias, *leading[4 - bias.dim() :], "Q_LEN", "KV_LEN")
    return limited(score_mod, *limits)


def head_bias(bias: Tensor) -> ScoreMod:
    """One number a head.

        score + bias[h]

    The softmax does not change by what all scores of a row share; lse does, and so does what is
    computed from it (joining attentions, a sink's share).

    Args:
        bias: [Hq], floating point.
    Returns:
        score_mod; differentiable in score and bias, the latter through lse alone.
    Raises:
        ModError: bias is not floating point. ShapeError: it has not 1 dimension.
    Source: the mod `head_bias` of torch's FlexAttention tutorials and tests.
    """
    check_floats("head_bias", "bias", bias, 1)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h]

    return limited(score_mod, *of_table("head_bias", "bias", bias, "heads"))


def pair_bias(bias: Tensor, factor: Tensor | None = None) -> ScoreMod:
    """One number a pair of tokens, shared by the heads or weighted by each.

        score + bias[q_idx, kv_idx]
        score + factor[h] * bias[q_idx, kv_idx]

    Args:
        bias: [Q_LEN, KV_LEN], or [B, Q_LEN, KV_LEN], floating point.
        factor: [Hq]; default: 1 for every head.
    Returns:
        score_mod; differentiable in score, bias and factor.
    Raises:
        ModError: an argument is not floating point. ShapeError: its dimensions are others.
    Source: as `additive_bias`, with one channel.
    """
    check_floats("pair_bias", "bias", bias, 2, 3)
    if factor is not None:
        check_floats("pair_bias", "factor", factor, 1)
    batched = bias.dim() == 3

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        value = bias[b, q_idx, kv_idx] if batched else bias[q_idx, kv_idx]
        return score + (value if factor is None else factor[h] * value)

    leading: tuple[Axis, ...] = ("batch",) if batched else ()
    limits = of_table("pair_bias", "bias", bias, *leading, "Q_LEN", "KV_LEN")
    if factor is not None:
        limits += of_table("pair_bias", "factor", factor, "heads")
    return limited(score_mod, *limits)
