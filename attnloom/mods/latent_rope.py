"""The rotary part of multi-head latent attention."""

from __future__ import annotations

from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.errors import ShapeError
from attnloom.masking.extent import limited
from attnloom.mods.arguments import check_floats, read_factor
from attnloom.mods.extent import of_table


def latent_rope(q_rope: Tensor, k_rope: Tensor, scale: float | Tensor) -> ScoreMod:
    """Adds the dot product of rotary features, whose key is shared by all heads.

        score + factor * (q_rope[b, h, q_idx] . k_rope[b, kv_idx])

    Args:
        q_rope: [B, Hq, Q_LEN, R] rotated query features.
        k_rope: [B, KV_LEN, R] rotated key features, R up to 256.
        scale: factor of the dot product; DeepSeek-V2's is 1 / sqrt(D + R), to be passed as `scale`
            to flex_attention too. A tensor of one element is captured, and gets its gradient.
    Returns:
        score_mod; differentiable in score, q_rope and k_rope. It reads R features for each score;
        longer ones are faster as extra features of query and key.
    Raises:
        ModError, ShapeError: features are not floating point, or their shapes do not fit together.
    Source: DeepSeek-AI 2024 (DeepSeek-V2), arXiv:2405.04434, sec. 2.1.3.
    """
    check_floats("latent_rope", "q_rope", q_rope, 4)
    check_floats("latent_rope", "k_rope", k_rope, 3)
    if q_rope.shape[-1] != k_rope.shape[-1]:
        raise ShapeError(
            f"latent_rope: q_rope has shape {list(q_rope.shape)}, k_rope {list(k_rope.shape)}; "
            "their last dimensions are multiplied, so they must be equal."
        )
    if q_rope.shape[-1] > 256:
        raise ShapeError(
            f"latent_rope: q_rope has {q_rope.shape[-1]} features; a mod reduces up to 256 for a "
            "score. Append them to query and key as further features instead."
        )
    factor = read_factor("latent_rope", "scale", scale)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + factor * (q_rope[b, h, q_idx] * k_rope[b, kv_idx]).sum()

    limits = of_table("latent_rope", "q_rope", q_rope, "batch", "heads", "Q_LEN", None)
    limits += of_table("latent_rope", "k_rope", k_rope, "batch", "KV_LEN", None)
    return limited(score_mod, *limits)
