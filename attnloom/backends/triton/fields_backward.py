"""What the kernels of the backward are compiled for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

from attnloom.backends.triton import configs, emit, emit_grad
from attnloom.backends.triton.arguments import TMA_BOX_BYTES, is_aligned
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.fields import (
    dimension_fields,
    fragment_fields,
    operand_type,
    precision_of,
    target_of,
    triton_type,
)
from attnloom.backends.triton.fragments import load_module, mask_fragment, score_fragment
from attnloom.backends.triton.layouts import mask_layouts, score_layouts
from attnloom.backends.triton.operands import Operands
from attnloom.ir.node import Program

_SLICE = 32
_GRAD_PARTS = ("head", "row", "begin", "body", "flush")


@dataclass(frozen=True, repr=False)
class BackwardConfig(KernelConfig):
    """Everything that a key or row kernel is compiled for; see backward.py's glossary.

    EARLY: see backward.early_gradient.
    SLICE: columns of a slice of D and Dv, see backward.inner; 0: none. NATURAL: see backward.py.
    SUB: tiles of a step in a block of the mask. TILES_PER_BLOCK: tiles that are owned in one.
    """

    TILE_M: int
    TILE_N: int
    D: int
    DV: int
    D0: int
    D1: int
    D2: int
    E0: int
    E1: int
    E2: int
    SUB: int
    TILES_PER_BLOCK: int
    HAS_LISTS: bool
    HAS_SCORE: bool
    HAS_MASK: bool
    MAY_MASK: bool
    USE_TMA: bool
    STATS_BY_TMA: bool
    ALIGNED: bool
    OUT_ALIGNED: bool
    PRECISION: str
    OPERAND: tl.dtype
    ACC: tl.dtype
    SLICE: int
    NATURAL: bool
    WANT_DK: bool
    WANT_DV: bool
    EARLY: bool = False
    SCORE_HEAD: JITFunction | None = None
    SCORE_ROW: JITFunction | None = None
    SCORE_BODY: JITFunction | None = None
    MASK_HEAD: JITFunction | None = None
    MASK_ROW: JITFunction | None = None
    MASK_BODY: JITFunction | None = None
    GRAD_HEAD: JITFunction | None = None
    GRAD_ROW: JITFunction | None = None
    GRAD_BEGIN: JITFunction | None = None
    GRAD_BODY: JITFunction | None = None
    GRAD_FLUSH: JITFunction | None = None

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, repr=False)
class DeltaConfig(KernelConfig):
    """What the preprocess is compiled for. CHUNK: columns of Dv that are loaded at a time. CLEARED:
    of memory that another backend's kernel adds dq to, 0 where there is none."""

    TILE_M: int
    CHUNK: int
    DV: int
    HAS_DLSE: bool
    NATURAL: bool
    USE_TMA: bool
    ALIGNED: bool
    ACC: tl.dtype
    CLEARED: int

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, slots=True)
class Role:
    """Which kernel, and what of it. own_keys: the key kernel, whose fragments have q and kv
    exchanged. sinks: how captured gradients leave, None where they do not. peaks: of the row
    kernel.
    """

    own_keys: bool
    want_dk: bool = True
    want_dv: bool = True
    sinks: emit_grad.Sinks | None = None
    peaks: bool = False


def backward_config(operands: Operands, tile: configs.Tile, role: Role) -> BackwardConfig:
    """The configuration of a kernel for one tile size."""
    call, blocks = operands.call, operands.call.blocks
    query, key, value = operands.query, operands.key, operands.value
    dtype = operand_type(query.dtype, key.dtype, value.dtype)
    step_block = owned_block = None
    if blocks is not None:
        pair = (blocks.q_block, blocks.kv_block)
        step_block, owned_block = pair if role.own_keys else pair[::-1]
    step, owned = (tile.tile_m, tile.tile_n) if role.own_keys else (tile.tile_n, tile.tile_m)
    tail_block = tile.tile_n if blocks is None or role.own_keys else blocks.kv_block
    has_tail = key.size(2) % tail_block != 0
    return BackwardConfig(
        TILE_M=tile.tile_m,
        TILE_N=tile.tile_n,
        **dimension_fields(query, value),
        SUB=1 if step_block is None else configs.per_block(step_block, step),
        TILES_PER_BLOCK=1 if owned_block is None else configs.per_block(owned_block, owned),
        HAS_LISTS=blocks is not None,
        HAS_SCORE=call.score is not None,
        HAS_MASK=call.mask is not None,
        MAY_MASK=call.mask is not None or has_tail,
        USE_TMA=operands.uses_tma,
        STATS_BY_TMA=stats_by_tma(operands, tile),
        ALIGNED=all(is_aligned(t) for t in operands.inputs),
        OUT_ALIGNED=operands.results_aligned,
        PRECISION=precision_of(call, dtype),
        OPERAND=triton_type(dtype),
        ACC=triton_type(operands.real),
        SLICE=_SLICE if operands.by_multiply_adds else 0,
        NATURAL=operands.by_multiply_adds,
        WANT_DK=role.want_dk,
        WANT_DV=role.want_dv,
        **_fragments(operands, role),
    )


def stats_by_tma(operands: Operands, tile: configs.Tile) -> bool:
    """Whether the key kernel reads row statistics by TMA: what a step reads must fill the 128 bytes
    that TMA aligns to, or the second stage of a pipeline faults."""
    return operands.uses_tma and tile.tile_m * operands.real.itemsize >= TMA_BOX_BYTES


def _fragments(operands: Operands, role: Role) -> dict[str, Any]:
    call = operands.call
    target, exact = target_of(call), call.options.exact_math
    found: dict[str, Any] = {}
    if call.mask is not None:
        mask = call.mask.program
        turned = emit_grad.exchanged(mask) if role.own_keys else mask
        found |= fragment_fields("MASK", mask_fragment(turned, target.reading(mask_layouts(call))))
    if call.score is not None:
        score, target = call.score.program, target.reading(score_layouts(call))
        turned = emit_grad.exchanged(score) if role.own_keys else score
        found |= fragment_fields("SCORE", score_fragment(turned, target))
        found |= _gradient_fragment(score, target, exact, role)
        found["EARLY"] = role.sinks is None and emit_grad.is_tame(
            emit_grad.gradient_of(score, exact).program
        )
    return found


@functools.lru_cache(maxsize=1024)
def _gradient_fragment(
    score: Program, target: emit.Target, exact: bool, role: Role
) -> dict[str, JITFunction]:
    gradient = emit_grad.gradient_of(score, exact)
    if role.sinks is None:
        prefix, text = "plain", emit_grad.emit_plain(gradient, target, exact, role.own_keys)
    elif role.own_keys:
        prefix, text = "sinks", emit_grad.emit_sinks(gradient, target, role.sinks)
    else:
        text = emit_grad.emit_rows(gradient, target, role.sinks, role.peaks)
        prefix = "rows"
    module = load_module(text)
    return {f"GRAD_{part.upper()}": getattr(module, f"{prefix}_{part}") for part in _GRAD_PARTS}
