"""What the Gluon forward is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from attnloom.backends.gluon.configs_forward import Form, width_of
from attnloom.backends.gluon.fragments import bias_fragment, mask_fragment, score_fragment
from attnloom.backends.gluon.score_form import ScoreForm, constant, score_form
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
    HAS_SCORE, HAS_BIAS: the score_mod has an inner part, and a linear bias (score_form.py).
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
    HAS_BIAS: bool
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
    BIAS_HEAD: JITFunction | None = None
    BIAS_SLOPE: JITFunction | None = None
    BIAS_AT: JITFunction | None = None
    MASK_HEAD: JITFunction | None = None
    MASK_ROW: JITFunction | None = None
    MASK_COLUMN: JITFunction | None = None
    MASK_BODY: JITFunction | None = None

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, slots=True)
class Scales:
    """x = factor * (q . k) goes into the inner score_mod, and 2**(base * result) is a weight.

    unscaled: factor is 1. baked: they are those of nearly all calls, and compiled in.
    """

    factor: float
    base: float
    unscaled: bool
    baked: bool


def form_of(call: AttentionCall, fixed: bool) -> ScoreForm | None:
    """The parts of the score_mod. fixed: with the call's numbers written into it."""
    if call.score is None:
        return None
    exact = call.options.exact_math
    return score_form(constant(call.score, exact) if fixed else call.score.program, exact)


def scales_of(call: AttentionCall, form: ScoreForm | None) -> Scales:
    before, outer = (1.0, 1.0) if form is None else (form.before, form.outer)
    factor, base = call.scale * before, outer * float(LOG2_E.value)
    baked = call.scale == call.query.size(3) ** -0.5
    if (form is None or (form.inner is None and form.bias is None)) and factor > 0:
        return Scales(1.0, factor * base, True, baked)
    return Scales(factor, base, False, baked)


def config_of(
    call: AttentionCall, form: Form, score: ScoreForm | None, want_max_scores: bool
) -> ForwardSm90Config:
    query, key, value, blocks = call.query, call.key, call.value, call.blocks
    scales = scales_of(call, score)
    has_tail = key.size(2) % (form.tile_n if blocks is None else blocks.kv_block) != 0
    may_mask = call.mask is not None or has_tail
    has_score = score is not None and score.inner is not None
    has_bias = score is not None and score.bias is not None
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
        HAS_SCORE=has_score,
        HAS_BIAS=has_bias,
        HAS_MASK=call.mask is not None,
        HAS_TAIL=has_tail,
        MAY_MASK=may_mask,
        NEEDS_KEYS=may_mask or has_score or has_bias,
        MAY_BE_EMPTY=blocks is not None,
        WANT_MAX=want_max_scores,
        UNSCALED=scales.unscaled,
        BAKED=scales.baked,
        FACTOR=scales.factor if scales.baked else 0.0,
        BASE=scales.base if scales.baked else 0.0,
        **_fragments(call, score),
    )


def _fragments(call: AttentionCall, score: ScoreForm | None) -> dict[str, Any]:
    target = target_of(call)
    found: dict[str, Any] = {}
    if score is not None and score.inner is not None:
        found |= score_fragment(score.inner, target).fields("SCORE")
    if score is not None and score.bias is not None:
        found |= bias_fragment(score.bias, target).fields()
    if call.mask is not None:
        found |= mask_fragment(call.mask.program, target).fields("MASK")
    return found
