"""What the Gluon forward is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from attnloom.backends.gluon.configs_forward import Form, width_of
from attnloom.backends.gluon.emit import column_values
from attnloom.backends.gluon.fragments import bias_fragment, mask_fragment, score_fragment
from attnloom.backends.gluon.score_form import ScoreForm, constant, score_form
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.device_math import LOG2_E
from attnloom.backends.triton.fields import target_of, triton_type
from attnloom.ir.node import Axes, BoundProgram, DType

_COLUMN_TYPES = {
    DType.BOOL: gl.int8,
    DType.I32: gl.int32,
    DType.I64: gl.int64,
    DType.F32: gl.float32,
}
_MAX_COLUMNS = 2


@dataclass(frozen=True, repr=False)
class ForwardSm90Config(KernelConfig):
    """Everything that forward_kernel is compiled for; glossaries: forward_sm90.py and
    forward_shared.py.

    D, DV: head dimensions as tiles cover them. SUB: steps in a block of keys of the mask.
    APART: consumers of a tile may have different live blocks.
    HAS_SCORE, HAS_BIAS: the score_mod has an inner part, and a linear bias (score_form.py).
    HAS_TAIL: the last step reaches past KV_LEN. MAY_MASK: any of HAS_MASK, HAS_TAIL, APART.
    NEEDS_KEYS: consumers ask which keys a step has. MAY_BE_EMPTY: a tile may have no step.
    NUM_COLUMNS, COLUMN0, COLUMN1: values of keys that a warp of its own computes for the mask.
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
    APART: bool
    HAS_SCORE: bool
    HAS_BIAS: bool
    HAS_MASK: bool
    HAS_TAIL: bool
    MAY_MASK: bool
    NEEDS_KEYS: bool
    MAY_BE_EMPTY: bool
    NUM_COLUMNS: int
    COLUMN0: gl.dtype
    COLUMN1: gl.dtype
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
    apart = blocks is not None and form.is_apart(blocks.q_block)
    may_mask = call.mask is not None or has_tail or apart
    has_score = score is not None and score.inner is not None
    has_bias = score is not None and score.bias is not None
    columns = looked_up(call.mask)
    load = form.column_registers if columns else (form.registers, form.load_registers)
    return ForwardSm90Config(
        CONSUMERS=form.consumers,
        TILE_N=form.tile_n,
        STAGES=form.stages,
        LOG_STAGES=form.stages.bit_length() - 1,
        Q_STAGES=form.q_stages,
        OVERLAP=form.overlap,
        OUT_IN_Q=form.out_in_q,
        REGISTERS=load[0],
        LOAD_REGISTERS=load[1],
        D=width_of(query.size(3)),
        DV=width_of(value.size(3)),
        OPERAND=triton_type(query.dtype),
        SUB=1 if blocks is None else blocks.kv_block // form.tile_n,
        HAS_LISTS=blocks is not None,
        APART=apart,
        HAS_SCORE=has_score,
        HAS_BIAS=has_bias,
        HAS_MASK=call.mask is not None,
        HAS_TAIL=has_tail,
        MAY_MASK=may_mask,
        NEEDS_KEYS=may_mask or has_score or has_bias,
        MAY_BE_EMPTY=blocks is not None,
        NUM_COLUMNS=len(columns),
        COLUMN0=columns[0] if columns else gl.int32,
        COLUMN1=columns[1] if len(columns) > 1 else gl.int32,
        WANT_MAX=want_max_scores,
        UNSCALED=scales.unscaled,
        BAKED=scales.baked,
        FACTOR=scales.factor if scales.baked else 0.0,
        BASE=scales.base if scales.baked else 0.0,
        **_fragments(call, score),
    )


def looked_up(mask: BoundProgram | None) -> tuple[gl.dtype, ...]:
    """Types of the values of keys that a mask looks up, as a warp of its own leaves them for the
    consumers; none if it looks up nothing by key alone, or more values than there is room for."""
    if mask is None:
        return ()
    program = mask.program
    columns = [program.nodes[i] for i in column_values(program)]
    loads = any(
        node.op == "load" and axes & Axes.KV and not axes & Axes.Q
        for node, axes in zip(program.nodes, program.axes, strict=True)
    )
    types = tuple(_COLUMN_TYPES.get(node.dtype) for node in columns)
    if not loads or len(types) > _MAX_COLUMNS or None in types:
        return ()
    return types  # type: ignore[return-value]


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
