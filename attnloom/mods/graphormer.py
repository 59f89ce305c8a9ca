"""Attention between the nodes of a graph, biased by the paths between them."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.errors import ShapeError, counted
from attnloom.masking.extent import Axis, limited
from attnloom.mods.arguments import check_floats, read_integers
from attnloom.mods.extent import of_table


def graphormer_spatial(distances: Tensor, table: Tensor) -> ScoreMod:
    """A learned bias by the length of the shortest path between two nodes.

        score + table[distances[b, q_idx, kv_idx], h]

    Args:
        distances: [B, N, N] or [N, N] integers, lengths of shortest paths; give pairs without a
            path a row of their own.
        table: [lengths, Hq], one learned number a length and head.
    Returns:
        score_mod; differentiable in score and table.
    Raises:
        ModError: table is not floating point. DtypeError, ShapeError: distances are not integers,
            or dimensions do not fit.
    Source: Ying et al. 2021, arXiv:2106.05234, sec. 3.1.2.
    """
    distances = read_integers("graphormer_spatial", "distances", distances, 2, 3)
    check_floats("graphormer_spatial", "table", table, 2)
    batched = distances.dim() == 3

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        length = distances[b, q_idx, kv_idx] if batched else distances[q_idx, kv_idx]
        return score + table[length.long(), h]

    leading: tuple[Axis, ...] = ("batch",) if batched else ()
    limits = of_table("graphormer_spatial", "distances", distances, *leading, "Q_LEN", "KV_LEN")
    limits += of_table("graphormer_spatial", "table", table, "heads")
    return limited(score_mod, *limits)


def graphormer_edge(paths: Tensor, features: Tensor, weight: Tensor) -> ScoreMod:
    """The mean, along the shortest path, of edge features weighted by place and head.

        score + 1/n * sum_{m < n} features[b, paths[b, q_idx, kv_idx, m]] . weight[m, h]

    Args:
        paths: [B, N, N, L] or [N, N, L] integers: the edges of the shortest path from query to key
            in order, -1 after the last; longer paths are cut at L.
        features: [B, E, d] or [E, d] (as paths), one vector an edge.
        weight: [L, Hq, d], one vector a place on the path and head.
    Returns:
        score_mod; differentiable in score, features and weight. The dot products are one matrix
        product outside the kernel; the kernel adds L numbers a score.
    Raises:
        ModError: features or weight are not floating point. DtypeError, ShapeError: paths are not
            integers, or dimensions do not fit.
    Source: Ying et al. 2021, arXiv:2106.05234, sec. 3.1.3.
    """
    name = "graphormer_edge"
    edges = read_integers(name, "paths", paths, 3, 4)
    batched, longest = edges.dim() == 4, edges.shape[-1]
    check_floats(name, "features", features, 3 if batched else 2)
    check_floats(name, "weight", weight, 3)
    if weight.shape[0] != longest or weight.shape[-1] != features.shape[-1]:
        raise ShapeError(
            f"{name}: weight has shape {list(weight.shape)}; paths of {counted(longest, 'edge')} "
            f"and features of size {features.shape[-1]} need [{longest}, Hq, {features.shape[-1]}]."
        )
    present = edges >= 0
    share = 1.0 / present.sum(-1).clamp(min=1).to(weight.dtype)  # [B, N, N]
    # Absent edges read one more row, of zeros.
    steps = edges.masked_fill(~present, features.shape[-2])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(features, (0, 0, 0, 1))
        values = torch.einsum("...ed,mhd->...emh", padded, weight)
        at = (b, q_idx, kv_idx) if batched else (q_idx, kv_idx)
        total = score
        for m in range(longest):
            edge = steps[(*at, m)]
            total = total + share[at] * (values[b, edge, m, h] if batched else values[edge, m, h])
        return total

    leading: tuple[Axis, ...] = ("batch",) if batched else ()
    limits = of_table(name, "paths", edges, *leading, "Q_LEN", "KV_LEN", None)
    limits += of_table(name, "features", features, *leading, None, None)
    limits += of_table(name, "weight", weight, "heads", None)
    return limited(score_mod, *limits)
