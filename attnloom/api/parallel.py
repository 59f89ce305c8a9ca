"""Attention over several processes or steps: parts of the keys merged, rows of queries shared out.

Each part is an ordinary call; its log-sum-exp says how much it counts. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnloom.api.validate import check_is_tensor, check_mask_type
from attnloom.block_mask import BlockMask
from attnloom.errors import OptionError, ShapeError, counted
from attnloom.masking.arguments import read_int


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What attention over all keys gives, from what it gives over parts of them.

        lse = log(sum_i exp(lses[i])),  out = sum_i exp(lses[i] - lse) * outs[i]

    Args:
        outs: [..., Q_LEN, Dv] of each part, of one shape.
        lses: [..., Q_LEN] of each part: natural logarithms, -inf for rows without keys in it, as
            return_aux=AuxRequest(lse=True) gives them.
    Returns:
        (out, lse) in the dtypes of the first part; out 0 and lse -inf where no part has a key.
        Differentiable in all of them, so that gradients reach every part.
    Raises:
        ShapeError, OptionError: not as many outs as lses, or of different shapes.
    Source: Liu et al. 2023 (ring attention), arXiv:2310.01889; Milakov and Gimelshein 2018,
        arXiv:1805.02867 (the sum).
    """
    outs, lses = list(outs), list(lses)
    _check_parts(outs, lses)
    stacked = torch.stack([lse.to(torch.promote_types(lse.dtype, torch.float32)) for lse in lses])
    greatest = stacked.detach().amax(0)
    # rows without keys: any finite number will do, their weights are exp(-inf)
    greatest = torch.where(greatest == -torch.inf, 0.0, greatest)
    weights = (stacked - greatest).exp()
    total = weights.sum(0)
    kept = total > 0
    safe = torch.where(kept, total, 1.0)
    lse = torch.where(kept, greatest + safe.log(), -torch.inf)
    out = sum(o.to(weights.dtype) * w.unsqueeze(-1) for o, w in zip(outs, weights, strict=True))
    return (out / safe.unsqueeze(-1)).to(outs[0].dtype), lse.to(lses[0].dtype)


def balanced_rows(block_mask: BlockMask, parts: int) -> list[tuple[int, int]]:
    """Spans of queries, one a process, with about as many live tiles in each.

    Args:
        block_mask: of the whole problem; its heads and batch entries are counted together.
        parts: how many spans, 1 or more.
    Returns:
        `parts` pairs (start, stop) of token positions, one after the other, cut at whole tiles;
        the fullest span is as empty as cuts at tiles allow. Spans may be empty at the end. Process
        r computes queries start .. stop - 1 with block_mask.rows(start, stop).
    Raises:
        OptionError: not a BlockMask, or fewer than one part.
    """
    check_mask_type(block_mask)
    if read_int("parts", parts) < 1:
        raise OptionError(f"parts is {parts}; there is a span of queries for 1 or more.")
    lists = block_mask.lists()
    rows_of_tiles = lists.grid.num_q_blocks
    per_row = lists.row_counts.reshape(-1, max(1, rows_of_tiles)).sum(0).tolist()[:rows_of_tiles]
    # A row of tiles without keys still has its zeros written.
    costs = [max(1, int(tiles)) for tiles in per_row]
    low, high = max(costs, default=0), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(costs, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    stops = [min(stop * lists.q_block, lists.q_len) for stop in _cuts(costs, low)]
    stops += [lists.q_len] * (parts - len(stops))
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _cuts(costs: list[int], capacity: int) -> list[int]:
    """Where spans end that take rows while they cost no more than `capacity` together."""
    stops, cost = [], 0
    for row, more in enumerate(costs):
        if cost + more > capacity:
            stops.append(row)
            cost = 0
        cost += more
    return [*stops, len(costs)]


def _check_parts(outs: list[Tensor], lses: list[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise OptionError(
            f"merge_attention was given {counted(len(outs), 'out')} and {len(lses)} of lses; it "
            "takes one of each for every part, and at least one part."
        )
    for part, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_is_tensor(f"outs[{part}]", out)
        check_is_tensor(f"lses[{part}]", lse)
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise ShapeError(
                f"part {part} has out {list(out.shape)} and lse {list(lse.shape)}, part 0 out "
                f"{list(outs[0].shape)}; all parts are of the same queries: out is [..., Q_LEN, "
                "Dv], lse the same without Dv."
            )
