"""Keys of a call divided among programs: into how many parts, and memory for their results."""

from __future__ import annotations

import torch

from attnloom.backends.triton.fields import Tensors

_MAX_SPLITS = 128


def num_splits(num_programs: int, num_tiles: int, slots: int) -> int:
    """Splits of each program's keys that finish soonest on `slots` programs at a time.

    The time is the number of rounds over the splits, and a twentieth more where splits must be
    merged."""
    most = max(1, min(_MAX_SPLITS, num_tiles // 2, 2 * slots // num_programs))

    def cost(splits: int) -> float:
        rounds = -(-num_programs * splits // slots)
        return rounds / splits * (1.05 if splits > 1 else 1.0)

    return min(range(1, most + 1), key=lambda n: (round(cost(n), 6), n))


def partial_results(
    count: int, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """partial_acc, partial_m and partial_l of decode.py for this many rows, in one allocation."""
    # each part starts at a multiple of 16 bytes
    step = -(-count // 4) * 4
    room = tensors.lse.new_empty(2 * step + count * tensors.value.size(3))
    return room[2 * step :], room[:step], room[step : 2 * step]
