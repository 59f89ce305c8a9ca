"""What the Gluon backward is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from attnloom.backends.gluon.configs_backward import KEYS, STEP, Form, width_of
from attnloom.backends.gluon.emit_grad import gradient_fragment
from attnloom.backends.gluon.fragments import mask_fragment, score_fragment
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.arguments import is_aligned
from attnloom.backends.triton.captured import sinks_form
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.emit_grad import gradient_of, is_tame
from attnloom.backends.triton.fields import target_of, triton_type
from attnloom.backends.triton.operands import Operands
from attnloom.ir.node import BoundProgram


@dataclass(frozen=True, repr=False)
class BackwardSm90Config(KernelConfig):
    """Everything that backward_kernel is compiled for; glossaries: backward_sm90.py and
    backward_shared.py.

    D, DV: head dimensions as tiles cover them. SUB: steps in a block of queries of the mask.
    TILES_PER_BLOCK: programs in a block of keys. SAME_LISTS: all units have the same live blocks.
    BY_HEAD: fragments tell heads apart, or captured gradients are summed by head.
    HAS_TAIL: the last program's keys reach past KV_LEN. MAY_MASK: HAS_MASK or HAS_TAIL.
    HAS_SINKS: captured gradients. SLOPE_FIRST, SLOPE: the derivative is computed with the score and
        kept in this type. FINITE_SLOPE: and is known to be finite.
    REGISTERS, DQ_REGISTERS, LOAD_REGISTERS: a thread, of consumers after the first, of the
        warpgroup of dq, of the producer.
    """

    TILE_M: int
    STAGES: int
    LOG_STAGES: int
    D: int
    DV: int
    OPERAND: gl.dtype
    SUB: int
    TILES_PER_BLOCK: int
    SAME_LISTS: bool
    HAS_LISTS: bool
    HAS_SCORE: bool
    HAS_MASK: bool
    HAS_TAIL: bool
    MAY_MASK: bool
    BY_HEAD: bool
    HAS_SINKS: bool
    SLOPE_FIRST: bool
    SLOPE: gl.dtype
    FINITE_SLOPE: bool
    DQ_APART: bool
    EARLY: bool
    LATE: bool
    FOLD: bool
    REGISTERS: int
    DQ_REGISTERS: int
    LOAD_REGISTERS: int
    SCORE_HEAD: JITFunction | None = None
    SCORE_ROW: JITFunction | None = None
    SCORE_COLUMN: JITFunction | None = None
    SCORE_BODY: JITFunction | None = None
    MASK_HEAD: JITFunction | None = None
    MASK_ROW: JITFunction | None = None
    MASK_COLUMN: JITFunction | None = None
    MASK_BODY: JITFunction | None = None
    GRAD_HEAD: JITFunction | None = None
    GRAD_ROW: JITFunction | None = None
    GRAD_COLUMN: JITFunction | None = None
    GRAD_BEGIN: JITFunction | None = None
    GRAD_BODY: JITFunction | None = None
    GRAD_FLUSH: JITFunction | None = None

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, repr=False)
class AroundConfig(KernelConfig):
    """What prepare_kernel and finish_kernel are compiled for. CHUNK: columns of Dv that are loaded
    at a time. WIDTH: columns of dq's memory."""

    TILE_M: int
    CHUNK: int
    WIDTH: int
    D: int
    DV: int
    HAS_DLSE: bool
    USE_TMA: bool
    ALIGNED: bool

    __hash__ = KernelConfig.__hash__


def around_config(operands: Operands, width: int) -> AroundConfig:
    value_dim = operands.value.size(3)
    return AroundConfig(
        TILE_M=STEP,
        CHUNK=min(64, max(16, triton.next_power_of_2(value_dim))),
        WIDTH=width,
        D=operands.query.size(3),
        DV=value_dim,
        HAS_DLSE=operands.dlse is not None,
        USE_TMA=False,
        ALIGNED=is_aligned(operands.out) and is_aligned(operands.dout),
    )


def main_config(operands: Operands, form: Form) -> BackwardSm90Config:
    """The configuration of the main kernel in one form."""
    call, blocks = operands.call, operands.call.blocks
    query, key, value = operands.query, operands.key, operands.value
    operand = triton_type(query.dtype)
    units = query.size(0) // key.size(0) * (query.size(1) // key.size(1))
    has_tail = key.size(2) % KEYS != 0
    fragments, sinks = _fragments(call)
    return BackwardSm90Config(
        TILE_M=STEP,
        STAGES=form.stages,
        LOG_STAGES=form.stages.bit_length() - 1,
        D=width_of(query.size(3)),
        DV=width_of(value.size(3)),
        OPERAND=operand,
        SUB=1 if blocks is None else blocks.q_block // STEP,
        TILES_PER_BLOCK=1 if blocks is None else blocks.kv_block // KEYS,
        SAME_LISTS=blocks is None or blocks.num_batches * blocks.num_heads == 1,
        HAS_LISTS=blocks is not None,
        HAS_SCORE=call.score is not None,
        HAS_MASK=call.mask is not None,
        HAS_TAIL=has_tail,
        MAY_MASK=call.mask is not None or has_tail,
        BY_HEAD=units > 1 and (sinks or _tells_heads_apart(call)),
        HAS_SINKS=sinks,
        SLOPE_FIRST=call.score is not None and not sinks,
        # with bfloat16 operands dscore is rounded as coarsely anyway
        SLOPE=operand if query.dtype == torch.bfloat16 else gl.float32,
        FINITE_SLOPE=call.score is None or _is_tame(call.score, call.options.exact_math),
        DQ_APART=form.dq_apart,
        EARLY=form.early,
        LATE=form.late,
        FOLD=form.fold,
        REGISTERS=form.registers,
        DQ_REGISTERS=form.dq_registers,
        LOAD_REGISTERS=form.load_registers,
        **fragments,
    )


def _fragments(call: AttentionCall) -> tuple[dict[str, Any], bool]:
    """Fields for the fragments of a call, and whether captured tensors get gradients."""
    target = target_of(call)
    found: dict[str, Any] = {}
    sinks = None
    if call.mask is not None:
        found |= mask_fragment(call.mask.program, target).fields("MASK")
    if call.score is not None:
        program, exact = call.score.program, call.options.exact_math
        gradient = gradient_of(program, exact)
        sinks = sinks_form(call, gradient) if gradient.contributions else None
        found |= score_fragment(program, target).fields("SCORE")
        found |= gradient_fragment(program, target, exact, sinks)
    return found, sinks is not None


def _is_tame(score: BoundProgram, exact: bool) -> bool:
    return is_tame(gradient_of(score.program, exact).program)


def _tells_heads_apart(call: AttentionCall) -> bool:
    """Whether a mod depends on b or h but for the score itself."""
    for bound in (call.score, call.mask):
        if bound is not None and any(
            node.op == "input" and node.attr in ("b", "h") for node in bound.program.nodes
        ):
            return True
    return False
