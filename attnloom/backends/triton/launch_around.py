"""What a backward launches before its kernels: row statistics, and zeros where another backend's
kernel will add up dq (gluon/launch_wide.py)."""

from __future__ import annotations

import torch
import triton

from attnloom.backends.triton.arguments import is_aligned, steps
from attnloom.backends.triton.backward import delta_kernel
from attnloom.backends.triton.beside import Launch
from attnloom.backends.triton.choice import keep
from attnloom.backends.triton.fields import triton_type
from attnloom.backends.triton.fields_backward import DeltaConfig
from attnloom.backends.triton.launcher import Launcher
from attnloom.backends.triton.operands import Operands
from attnloom.backends.triton.packed import pack_ints
from attnloom.backends.triton.ready_backward import pitch_of

_ROWS = 64
_COLUMNS = 64
_PAIR = 2  # out, dout: operands of the preprocess


_statistics: dict[tuple[object, ...], Launcher] = {}


def row_statistics(operands: Operands, dq_sum: torch.Tensor | None = None) -> torch.Tensor:
    """`stats` of backward.py, [2 * B * Hq, PITCH]. dq_sum: is filled with zeros, [B * Hq * PITCH,
    columns]."""
    stats = empty_statistics(operands)
    key = _key(operands, dq_sum)
    launch = _statistics.get(key)
    if launch is None:
        launch = _prepare(operands, dq_sum)
        keep(_statistics, key, launch)
    launch(operands.rows_aligned, *_arguments(operands, stats, dq_sum))
    return stats


def _key(operands: Operands, dq_sum: torch.Tensor | None) -> tuple[object, ...]:
    return operands.signature, 0 if dq_sum is None else dq_sum.size(1)


def empty_statistics(operands: Operands) -> torch.Tensor:
    batch, heads, _, _ = operands.dout.shape
    size = (2 * batch * heads, pitch_of(operands))
    return torch.empty(size, dtype=operands.real, device=operands.query.device)


def _arguments(
    operands: Operands, stats: torch.Tensor, dq_sum: torch.Tensor | None
) -> tuple[object, ...]:
    batch, heads, q_len, _ = operands.dout.shape
    pair, lse = (operands.out, operands.dout), operands.lse
    return (
        *pair, lse if operands.dlse is None else operands.dlse, lse, stats,
        stats if dq_sum is None else dq_sum,
        pack_ints((heads, q_len, pitch_of(operands), batch * heads)), packed_strides(*pair),
    )  # fmt: skip


def _prepare(operands: Operands, dq_sum: torch.Tensor | None) -> Launcher:
    batch, heads, _, width = operands.dout.shape
    config = DeltaConfig(
        TILE_M=_ROWS,
        CHUNK=min(_COLUMNS, max(16, triton.next_power_of_2(width))),
        DV=width,
        HAS_DLSE=operands.dlse is not None,
        NATURAL=operands.by_multiply_adds,
        USE_TMA=False,
        ALIGNED=is_aligned(operands.out) and is_aligned(operands.dout),
        ACC=triton_type(operands.real),
        CLEARED=0 if dq_sum is None else dq_sum.size(1),
    )
    grid = pitch_of(operands) // _ROWS * batch * heads
    return Launcher(delta_kernel, config, grid, {"num_warps": 4}, _PAIR)


def lines_of_queries(operands: Operands, columns: int) -> torch.Tensor:
    """Memory that dq is added to, as row statistics lie: [B * Hq * PITCH, columns]."""
    batch, heads, _, _ = operands.query.shape
    size = (batch * heads * pitch_of(operands), columns)
    return torch.empty(size, dtype=operands.real, device=operands.query.device)


def one_line(stats: torch.Tensor, columns: int) -> torch.Tensor:
    """What stands for lines_of_queries where kernels are compiled: of its type and width."""
    return stats.view(-1)[:columns][None]


def statistics_first(
    operands: Operands, stats: torch.Tensor, dq_sum: torch.Tensor | None = None
) -> Launch:
    """The launch of row_statistics, to be compiled."""
    return _prepare(operands, dq_sum), _arguments(operands, stats, dq_sum)


def has_run(operands: Operands) -> bool:
    """Whether statistics of such a backward were launched."""
    return _key(operands, None) in _statistics


def statistics_again(
    operands: Operands, stats: torch.Tensor, dq_sum: torch.Tensor | None = None
) -> Launch | None:
    """The launch of row_statistics, if it has run."""
    launch = _statistics.get(_key(operands, dq_sum))
    return None if launch is None else (launch, _arguments(operands, stats, dq_sum))


def packed_strides(*tensors: torch.Tensor) -> tuple[float, ...]:
    return pack_ints([step for tensor in tensors for step in steps(tensor)])
