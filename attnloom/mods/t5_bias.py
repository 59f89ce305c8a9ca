"""T5's learned bias by buckets of distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.errors import ModError, counted
from attnloom.masking.extent import Limit, limited
from attnloom.mods.arguments import check_floats, read_size


def t5_bias(table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """A learned bias for each head and bucket of distance; far buckets widen logarithmically.

        score + table[bucket(kv_idx - q_idx), h]

    Args:
        table: [num_buckets, Hq], the weight of T5's relative_attention_bias.
        bidirectional: half of the buckets for later keys (encoder); False puts all later keys into
            bucket 0 (decoder).
        max_distance: distances from here on share the last bucket; more than half of a side's
            buckets.
    Returns:
        score_mod; differentiable in score and table.
    Raises:
        ModError: table is not floating point, has too few buckets, or max_distance is too small.
        ShapeError: table has not 2 dimensions.
    Source: Raffel et al. 2020, arXiv:1910.10683, sec. 2.1; buckets as in the authors' code.
    """
    check_floats("t5_bias", "table", table, 2)
    max_distance = read_size("t5_bias", "max_distance", max_distance, 1)
    buckets = t5_buckets(table.shape[0], bidirectional, max_distance).to(table.device)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (kv_idx - q_idx).clamp(-max_distance, max_distance)
        # The bucket of each distance is looked up by torch, outside the kernel.
        return score + table[buckets][distance + max_distance, h]

    source = f"t5_bias: table has shape {list(table.shape)}, [num_buckets, Hq]"
    return limited(score_mod, Limit("heads", table.shape[1], True, source))


def t5_buckets(num_buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """The bucket of each distance kv - q from -max_distance to max_distance, int64.

    Raises:
        ModError: there are too few buckets or distances.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2  # the first half of a side: one bucket a distance
    if exact < 1 or max_distance <= exact:
        raise ModError(
            f"t5_bias: table has {counted(num_buckets, 'bucket')} and max_distance is "
            f"{max_distance}; a side needs at least 2 buckets, and max_distance must exceed half "
            "of them."
        )
    distance = torch.arange(-max_distance, max_distance + 1)
    size = distance.abs() if bidirectional else (-distance).clamp(min=0)
    ratio = torch.log(size.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (side - exact)).long()).clamp(max=side - 1)
    bucket = torch.where(size < exact, size, far)
    return bucket + side * (distance > 0) if bidirectional else bucket
