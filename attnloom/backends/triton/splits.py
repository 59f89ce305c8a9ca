"""Keys of a call divided among programs: into how many parts, which, and how results are merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from attnloom.backends.triton.config import KernelConfig, value_of
from attnloom.backends.triton.fields import ForwardConfig, Tensors

_MAX_SPLITS = 128
_TILES_TO_BEGIN = 2
_FEW = 16  # up to here all in one step; a kernel for each power of two would be four
_MERGED_ELEMENTS = 8192  # of partial_acc at once: 64 registers a thread of 4 warps


@dataclass(frozen=True, repr=False)
class MergeConfig(KernelConfig):
    """What the merging kernel is compiled for. SPLITS: that a step takes. WIDTH: DV in lanes.
    OVERLAPS: it starts beside the first kernel, and waits. The others as in ForwardConfig."""

    DV: int
    WIDTH: int
    SPLITS: int
    WANT_MAX: bool
    MAX_UNSCALED: bool
    OVERLAPS: bool
    ACC: tl.dtype

    __hash__ = KernelConfig.__hash__


_SHARED = ("WANT_MAX", "MAX_UNSCALED", "OVERLAPS", "ACC")


def merge_config(config: ForwardConfig, splits: int) -> MergeConfig:
    """For results of kernels of this configuration. 33 splits in one step instead of three: 2 us of
    134 on an H200."""
    dv = value_of(config, "DV")
    width = triton.next_power_of_2(dv)
    many = min(_MAX_SPLITS, max(_FEW, _MERGED_ELEMENTS // width))
    return MergeConfig(
        DV=dv,
        WIDTH=width,
        SPLITS=_FEW if splits <= _FEW else many,
        **{name: value_of(config, name) for name in _SHARED},
    )


def merge_options(config: MergeConfig) -> dict[str, Any]:
    """Launch options of the merging kernel."""
    options: dict[str, Any] = {"num_warps": 4}
    return options | {"launch_pdl": True} if value_of(config, "OVERLAPS") else options


def num_splits(num_programs: int, num_tiles: int, slots: int) -> int:
    """Splits of each program's keys that finish soonest on `slots` programs at a time.

    The time is that of the tiles of a split, and of two more until its first copies are there, in
    each round; and a twentieth more where splits must be merged."""
    most = max(1, min(_MAX_SPLITS, num_tiles // 2, 2 * slots // num_programs))

    def cost(splits: int) -> float:
        rounds = -(-num_programs * splits // slots)
        tiles = -(-num_tiles // splits) + _TILES_TO_BEGIN
        return rounds * tiles * (1.05 if splits > 1 else 1.0)

    return min(range(1, most + 1), key=lambda n: (round(cost(n), 6), n))


def partial_results(
    count: int, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """partial_acc, partial_m and partial_l of decode.py for this many rows, in one allocation."""
    # each part starts at a multiple of 16 bytes
    step = -(-count // 4) * 4
    room = tensors.lse.new_empty(2 * step + count * tensors.value.size(3))
    return room[2 * step :], room[:step], room[step : 2 * step]
