"""What the Gluon forward is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from attnloom.backends.gluon.configs_forward import Form
from attnloom.backends.gluon.emit_mask import values_by_key
from attnloom.backends.gluon.fields import Sm90Config, mask_target, score_target, shared_fields
from attnloom.backends.gluon.score_form import ScoreForm, constant, score_form
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.configs import per_block
from attnloom.backends.triton.device_math import LOG2_E
from attnloom.backends.triton.emit import Target
from attnloom.backends.triton.fields import may_be_huge
from attnloom.backends.triton.layouts import is_narrow
from attnloom.ir.node import Axes, BoundProgram, DType, Program

_COLUMN_TYPES = {
    DType.BOOL: gl.int8,
    DType.I32: gl.int32,
    DType.I64: gl.int64,
    DType.F32: gl.float32,
}
_MAX_COLUMNS = 2


@dataclass(frozen=True, repr=False, kw_only=True)
class ForwardSm90Config(Sm90Config):
    """Everything that forward_kernel is compiled for; glossaries: forward_sm90.py and
    forward_shared.py.

    SUB: of a block of keys. MAY_MASK: any of HAS_MASK, HAS_TAIL, APART.
    APART: consumers of a tile may have different live blocks.
    NEEDS_KEYS: consumers ask which keys a step has. MAY_BE_EMPTY: a consumer may take part in no
        step of a tile.
    NUM_COLUMNS, COLUMN0, COLUMN1: values of keys that a warp of its own computes for the mask.
    HUGE: scores may be so large (backends/triton/fields.py).
    FLOOR: maxima begin at the least finite number.
    BAKED: FACTOR and BASE are literals. OUT_IN_Q: results leave from where the queries were.
    PANELS: as many tiles of D or DV columns cover a head dimension.
    PARTS: accumulators of the output, of PART columns each. WIDE: see forward_wide.py.
    KEY_PANELS: of keys in shared memory, see rings.py.
    SKIPS, SKIPS_ENDS: see forward_passed.py. JOINED: see forward_joined.py.
    STRIPS: see forward_strips.py. BOX: keys that are copied at once. DEPTH: columns that q . k^T
        takes then. OUT_RING: results leave by way of two spaces.
    REST: columns past the first PANEL that q . k^T takes; 0: all. NAMED, BY_WARP: see
        rings.py.
    """

    CONSUMERS: int
    WARPS: int
    ROWS: int
    TILE_N: int
    Q_STAGES: int
    PANELS: int
    Q_KEPT: int
    LATE: bool
    AHEAD: bool
    LAZY: bool
    BY_LANE: bool
    OVERLAP: bool
    NAMED: bool
    BY_WARP: bool
    PACKED: bool
    TURNS: bool
    SKIPS: bool
    SKIPS_ENDS: bool
    JOINED: bool
    WIDE: bool
    PARTS: int
    KEY_PANELS: int
    PART: int
    REST: int
    STRIPS: bool
    OUT_RING: bool
    BOX: int
    DEPTH: int
    OUT_IN_Q: bool
    APART: bool
    NEEDS_KEYS: bool
    MAY_BE_EMPTY: bool
    NUM_COLUMNS: int
    COLUMN0: gl.dtype
    COLUMN1: gl.dtype
    WANT_MAX: bool
    HUGE: bool
    FLOOR: bool
    BAKED: bool
    FACTOR: float
    BASE: float

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
    # a list's last step may have less than it has room for
    filled_up = form.strips and blocks is not None
    may_mask = call.mask is not None or has_tail or apart or filled_up
    columns = looked_up(call.mask, mask_target(call, narrow=True))
    load = form.column_registers if columns else (form.registers, form.load_registers)
    widths = form.columns(query.size(3)), form.columns(value.size(3))
    target = score_target(call, form, form.tile_m)
    shared = shared_fields(
        call, score, widths, stages=form.stages, narrow=True, target=target,
        prefetch=form.prefetch, along=Axes.KV,
    )  # fmt: skip
    may_be_empty = may_mask or shared["HAS_SCORE"]  # a row, for some steps
    return ForwardSm90Config(
        **shared,
        CONSUMERS=form.consumers,
        WARPS=form.warps,
        ROWS=form.rows,
        TILE_N=form.tile_n,
        Q_STAGES=form.q_stages,
        PANELS=form.panels,
        Q_KEPT=form.q_kept,
        BY_LANE=form.by_lane,
        LATE=form.late,
        AHEAD=form.ahead,
        LAZY=form.lazy,
        OVERLAP=form.overlap,
        NAMED=form.named,
        BY_WARP=form.by_warp,
        PACKED=form.packed,
        TURNS=form.turns,
        JOINED=form.joined,
        SKIPS=form.skips,
        SKIPS_ENDS=form.skips and blocks is not None and apart and blocks.kv_block == form.tile_n,
        WIDE=form.wide,
        PARTS=form.parts,
        KEY_PANELS=form.key_panels or form.stages * form.panels,
        PART=form.part(value.size(3)),
        REST=form.rest(query.size(3)),
        STRIPS=form.strips,
        OUT_RING=form.out_ring,
        BOX=form.box,
        DEPTH=-(-query.size(3) // 16) * 16,
        OUT_IN_Q=form.out_in_q,
        REGISTERS=load[0],
        LOAD_REGISTERS=load[1],
        SUB=1 if blocks is None else per_block(blocks.kv_block, form.box),
        APART=apart,
        HAS_TAIL=has_tail,
        MAY_MASK=may_mask,
        NEEDS_KEYS=may_mask or shared["HAS_SCORE"] or shared["HAS_BIAS"],
        MAY_BE_EMPTY=blocks is not None or form.skips,
        NUM_COLUMNS=len(columns),
        COLUMN0=columns[0] if columns else gl.int32,
        COLUMN1=columns[1] if len(columns) > 1 else gl.int32,
        WANT_MAX=want_max_scores,
        HUGE=score is not None and score.inner is not None and may_be_huge(score.inner),
        FLOOR=may_be_empty and _may_begin_finite(scales) and not shared["HAS_BIAS"],
        UNSCALED=scales.unscaled,
        BAKED=scales.baked,
        FACTOR=scales.factor if scales.baked else 0.0,
        BASE=scales.base if scales.baked else 0.0,
    )


def _may_begin_finite(scales: Scales) -> bool:
    """Whether maxima may begin at LEAST, see forward_math.py; a bias could be as large."""
    return scales.baked and 0 < scales.base <= 1


def looked_up(mask: BoundProgram | None, target: Target) -> tuple[gl.dtype, ...]:
    """Types of the values of keys that a mask looks up, as a warp of its own leaves them for the
    consumers; none if it looks up nothing by keys alone, or more values than there is room for.
    target: of the mask's fragment."""
    if mask is None:
        return ()
    program = mask.program
    found = values_by_key(program, target)
    loads = any(
        node.op == "load" and axes & (Axes.Q | Axes.KV) == Axes.KV
        for node, axes in zip(program.nodes, program.axes, strict=True)
    )
    types = tuple(
        gl.int32 if holds_32_bits(program, i, target) else _COLUMN_TYPES.get(program.nodes[i].dtype)
        for i in found
    )
    if not loads or len(types) > _MAX_COLUMNS or None in types:
        return ()
    return types  # type: ignore[return-value]


def holds_32_bits(program: Program, index: int, target: Target) -> bool:
    """Whether a fragment computes a 64-bit node from 32-bit values alone: positions and constants,
    unless the target is wide, and captured integers that fit."""
    if target.wide or program.nodes[index].dtype is not DType.I64 or not target.layouts:
        return False
    stack = [index]
    while stack:
        node = program.nodes[stack.pop()]
        if node.op == "load":
            slot = int(node.attr)  # type: ignore[call-overload]
            if node.dtype is DType.I64 and not is_narrow(target.layouts, slot):
                return False
        elif node.op in ("number", "cast"):
            return False  # of a type of its own
        else:
            stack.extend(node.args)
    return True
