"""Static description of an attention problem and the options that steer it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnloom.ir.node import DType


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What `kernel_options` may say to attnloom, after validation.

    backend: "auto", "cpu", "gluon" (Hopper), "triton", "tiled" (torch operators), "reference".
        An explicitly chosen backend never falls back.
    exact_math: no approximate tanh or exp beyond one unit in the last place of the type.
    deterministic: gradients are bitwise equal from run to run.
    fp32_precision: how GPU kernels multiply float32 matrices: "ieee", "tf32x3" or "tf32".
    debug_bounds: check every index into a captured tensor and name the tensor that is overrun.
    """

    backend: str = "auto"
    exact_math: bool = False
    deterministic: bool = False
    debug_bounds: bool = False
    fp32_precision: str = "ieee"


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a kernel is specialised for, and nothing else: the key of the plan cache.

    Lengths, batch, strides, numbers and captured sizes are absent: they are run-time arguments.

    device: of query; the other tensors share it.
    dtypes: of query, key and value.
    head_dim, value_dim: D and Dv.
    score, mask: digests of the traced mods, None where there is none.
    has_blocks: a BlockMask was given; without one every tile is full.
    has_table, has_pages: a PageTable was given; its keys and values lie in pages.
    """

    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    head_dim: int
    value_dim: int
    score: str | None
    mask: str | None
    has_blocks: bool
    options: KernelOptions
    has_table: bool = False
    has_pages: bool = False


def compute_type(query: torch.dtype, key: torch.dtype, value: torch.dtype) -> DType:
    """Type of scores, softmax state and accumulators: F64 if any input is float64, else F32."""
    return DType.F64 if torch.float64 in (query, key, value) else DType.F32
