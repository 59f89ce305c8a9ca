"""What the Gluon forward is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from attnloom.backends.gluon.configs_forward import Form, width_of
from attnloom.backends.gluon.fragments import mask_fragment, score_fragment
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.device_math import LOG2_E
from attnloom.backends.triton.fields import target_of, triton_type


@dataclass(frozen=True, repr=False)
class ForwardSm90Config(KernelConfig):
    """Everything that forward_kernel is compiled for; glossaries: forward_sm90.py and
    forward_shared.py.

    D, DV: head dimensions as tiles cover them. SUB: steps in a block of keys of the mask.
    HAS_TAIL: the last step reaches past KV_LEN. MAY_MASK: HAS_MASK or HAS_TAIL. NEEDS_KEYS:
        consumers ask which keys a step has. MAY_BE_EMPTY: a tile may have no step.
    UNSCALED: x is the raw product. BAKED: FACTOR and BASE are literals.
    OUT_IN_Q: results leave from where the queries were.
    """

    CONSUMERS: int
    TILE_N: int
    STAGES: int
    LOG_STAGES: int
    Q_STAGES: int
    OVERLAP: bool
    OUT_IN_Q: bool
    REGISTERS: int
    LOAD_REGISTERS: int
    D: int
    DV: int
    OPERAND: gl.dtype
    SUB: int
    HAS_LISTS: bool
    HAS_SCORE: bool
    HAS_MASK: bool
    HAS_TAIL: bool
    MAY_MASK: bool
    NEEDS_KEYS: bool
    MAY_BE_EMPTY: bool
    WANT_MAX: bool
    UNSCALED: bool
    BAKED: bool
    FACTOR: float
    BASE: float
    SCORE_HEAD: JITFunction | None = None
    SCORE_ROW: JITFunction | None = None
    SCORE_COLUMN: JITFunction | None = None
    SCORE_BODY: JITFunction | None = None
    MASK_HEAD: JITFunction | None = None
    MASK_ROW: JITFunction | None = None
    MASK_COLUMN: JITFunction | None = None
    MASK_BODY: JITFunction | None = None

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, slots=True)
class Scales:
    """x = factor * (q . k) goes into the score_mod, and 2**(base * result) is a weight.

    unscaled: factor is 1. baked: they are those of nearly all calls, and compiled in.
    """

    factor: float
    base: float
    unscaled: bool
    baked: bool


def scales_of(call: AttentionCall) -> Scales:
    log2_e = float(LOG2_E.value)
    baked = call.scale == call.query.size(3) ** -0.5
    if call.score is None and call.scale > 0:
        return Scales(1.0, call.scale * log2_e, True, baked)
    return Scales(call.scale, log2_e, False, baked)


def config_of(call: AttentionCall, form: Form, want_max_scores: bool) -> ForwardSm90Config:
    query, key, value, blocks = call.query, call.key, call.value, call.blocks
    target, scales = target_of(call), scales_of(call)
    fragments = {}
    if call.score is not None:
        fragments |= score_fragment(call.score.program, target).fields("SCORE")
    if call.mask is not None:
        fragments |= mask_fragment(call.mask.program, target).fields("MASK")
    has_tail = key.size(2) % (form.tile_n if blocks is None else blocks.kv_block) != 0
    may_mask = call.mask is not None or has_tail
    return ForwardSm90Config(
        CONSUMERS=form.consumers,
        TILE_N=form.tile_n,
        STAGES=form.stages,
        LOG_STAGES=form.stages.bit_length() - 1,
        Q_STAGES=form.q_stages,
        OVERLAP=form.overlap,
        OUT_IN_Q=form.out_in_q,
        REGISTERS=form.registers,
        LOAD_REGISTERS=form.load_registers,
        D=width_of(query.size(3)),
        DV=width_of(value.size(3)),
        OPERAND=triton_type(query.dtype),
        SUB=1 if blocks is None else blocks.kv_block // form.tile_n,
        HAS_LISTS=blocks is not None,
        HAS_SCORE=call.score is not None,
        HAS_MASK=call.mask is not None,
        HAS_TAIL=has_tail,
        MAY_MASK=may_mask,
        NEEDS_KEYS=may_mask or call.score is not None,
        MAY_BE_EMPTY=blocks is not None,
        WANT_MAX=want_max_scores,
        UNSCALED=scales.unscaled,
        BAKED=scales.baked,
        FACTOR=scales.factor if scales.baked else 0.0,
        BASE=scales.base if scales.baked else 0.0,
        **fragments,
    )
