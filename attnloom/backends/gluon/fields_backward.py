"""What the Gluon backward is compiled for."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
from triton.runtime.jit import JITFunction

from attnloom.backends.gluon.configs_backward import (
    KEYS,
    PANEL,
    PANELS,
    STEP,
    TILE_KEYS,
    Form,
    width_of,
)
from attnloom.backends.gluon.emit_grad import gradient_fragment
from attnloom.backends.gluon.fields import (
    Sm90Config,
    mask_target,
    score_target,
    shared_fields,
)
from attnloom.backends.gluon.fields_forward import form_of, scales_of
from attnloom.backends.gluon.fragments import mask_fragment
from attnloom.backends.gluon.score_form import ScoreForm
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.arguments import is_aligned
from attnloom.backends.triton.captured import sinks_form
from attnloom.backends.triton.config import KernelConfig, value_of
from attnloom.backends.triton.configs import per_block
from attnloom.backends.triton.emit_grad import Sinks, gradient_of, index_axes, is_tame
from attnloom.backends.triton.operands import Operands
from attnloom.ir.node import Axes, BoundProgram, Program


@dataclass(frozen=True, repr=False, kw_only=True)
class BackwardSm90Config(Sm90Config):
    """Everything that backward_kernel and wide_kernel are compiled for; glossaries:
    backward_sm90.py and backward_shared.py.

    D, DV: columns of a panel, of which PANELS and VALUE_PANELS cover D and Dv, and of which S and
        dP sum over the first COLUMNS and VALUE_COLUMNS.
    SUB: of a block of queries. HAS_SCORE, HAS_BIAS, UNSCALED: without parts if HAS_SINKS.
    TILES_PER_BLOCK: programs in a block of keys. SAME_LISTS: all units have the same live blocks.
    KV_STAGES: slots for the keys and values of a tile.
    BY_HEAD: fragments tell heads apart, or captured gradients are summed by head.
    STEPS_PAST_END: a block of queries may reach past the lines of its head by whole steps, whose
        statistics would be another's.
    NEEDS_QUERIES: consumers ask which queries a step has.
    HAS_SINKS: captured gradients. SLOPE_FIRST: there are none, and the derivative by the score is
        computed with the score. FINITE_SLOPE: it is finite where scores are.
    DQ_REGISTERS: a thread, of the warpgroup of dq. OVERLAPS: see backward_around.py.
    SWEEPS: see backward_sweep.py. DQ_COLUMNS: D of dq. DQ_RAGGED: blocks of dq may not be whole.
    """

    TILE_M: int
    PANELS: int
    VALUE_PANELS: int
    COLUMNS: int
    VALUE_COLUMNS: int
    TILES_PER_BLOCK: int
    SAME_LISTS: bool
    PERSISTENT: bool
    KV_STAGES: int
    STEPS_PAST_END: bool
    NEEDS_QUERIES: bool
    BY_HEAD: bool
    HAS_SINKS: bool
    SLOPE_FIRST: bool
    FINITE_SLOPE: bool
    DQ_APART: bool
    EARLY: bool
    FOLD: bool
    DV_EARLY: bool
    DK_SHARED: bool
    NATIVE: bool
    DQ_REGISTERS: int
    ROWS_APART: bool
    MASK_FIRST: bool
    LEAVES_LATE: bool
    SWEEPS: bool
    NAMED: int
    BY_WARP: bool
    OVERLAPS: bool
    DQ_COLUMNS: int
    DQ_RAGGED: bool
    DQ_STORE: str
    GRAD_HEAD: JITFunction | None = None
    GRAD_ROW: JITFunction | None = None
    GRAD_COLUMN: JITFunction | None = None
    GRAD_PIECES: JITFunction | None = None
    GRAD_BEGIN: JITFunction | None = None
    GRAD_BODY: JITFunction | None = None
    GRAD_FLUSH: JITFunction | None = None

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, repr=False)
class AroundConfig(KernelConfig):
    """What prepare_kernel and finish_kernel are compiled for. CHUNK: columns of Dv that are loaded
    at a time. WIDTH: columns of dq's memory, of which USED are and a program puts COLUMNS in order.
    SWEEPS: dq has no such memory; PER_BLOCK: tiles in a block of queries. OVERLAPS: see
    backward_around.py."""

    TILE_M: int
    CHUNK: int
    WIDTH: int
    USED: int
    COLUMNS: int
    D: int
    DV: int
    HAS_DLSE: bool
    SWEEPS: bool
    PER_BLOCK: int
    OVERLAPS: bool
    USE_TMA: bool
    ALIGNED: bool

    __hash__ = KernelConfig.__hash__


def around_config(
    operands: Operands,
    width: int,
    sweeps: bool = False,
    overlaps: bool = False,
    used: int | None = None,
) -> AroundConfig:
    used = width if used is None else used
    value_dim, blocks = operands.value.size(3), operands.call.blocks
    return AroundConfig(
        TILE_M=STEP,
        CHUNK=min(64, max(16, triton.next_power_of_2(value_dim))),
        WIDTH=width,
        USED=used,
        COLUMNS=finished_columns(used),
        D=operands.query.size(3),
        DV=value_dim,
        HAS_DLSE=operands.dlse is not None,
        SWEEPS=sweeps,
        PER_BLOCK=1 if blocks is None else per_block(blocks.q_block, STEP),
        OVERLAPS=overlaps,
        USE_TMA=False,
        ALIGNED=is_aligned(operands.out) and is_aligned(operands.dout),
    )


def finished_columns(used: int) -> int:
    """Of dq, by a program of finish_kernel."""
    return PANEL if used % PANEL == 0 else PANEL // 2


@dataclass(frozen=True, slots=True)
class Mods:
    """How a call's mods enter the kernel.

    score: the score_mod in parts, whole where captured tensors get gradients; None without one.
    sinks: how those leave. scales: factor and base of score_form.py, and what dk and dq are scaled
    by. unscaled: factor is 1.
    """

    score: ScoreForm | None
    sinks: Sinks | None
    scales: tuple[float, float, float]
    unscaled: bool

    @staticmethod
    def of(call: AttentionCall, fixed: bool) -> Mods:
        """fixed: with the numbers of the score_mod written into it."""
        if call.score is None:
            score, sinks = None, None
        else:
            gradient = gradient_of(call.score.program, call.options.exact_math)
            sinks = sinks_form(call, gradient) if gradient.contributions else None
            whole = ScoreForm(1.0, 1.0, call.score.program, None)
            score = form_of(call, fixed) if sinks is None else whole
        found = scales_of(call, score)
        before, outer = (1.0, 1.0) if score is None else (score.before, score.outer)
        scales = (found.factor, found.base, call.scale * before * outer)
        return Mods(score, sinks, scales, found.unscaled)

    @property
    def inner(self) -> Program | None:
        return None if self.score is None else self.score.inner


def _store_of_pairs(dtype: torch.dtype) -> str:
    """Eight float32 ($8 to $15), pairs of two rows and of two groups of columns, to halves at $16
    and $24 bytes behind it, where $32 and $34 are not 0: a lane of an odd number has the second
    group of its own and its neighbour's, others the first."""
    pair = "cvt.rn.bf16x2.f32" if dtype == torch.bfloat16 else "cvt.rn.f16x2.f32"
    rows = "".join(
        f"{pair} a, ${first + 1}, ${first}; {pair} b, ${first + 5}, ${first + 4};"
        "selp.b32 given, a, b, odd; selp.b32 kept, b, a, odd;"
        "shfl.sync.bfly.b32 taken, given, 1, 31, -1;"
        "selp.b32 a, taken, kept, odd; selp.b32 b, kept, taken, odd;"
        f"setp.ne.s32 inside, ${32 + first - 8}, 0; @inside st.global.v2.b32 [there], {{a, b}};"
        "add.s64 there, there, $24;"
        for first in (8, 10)
    )
    zeros = "".join(f"mov.u32 ${i}, 0;" for i in range(8))
    return (
        "{ .reg .b32 a, b, given, kept, taken, lane; .reg .b64 there; .reg .pred odd, inside;"
        "mov.u32 lane, %laneid; and.b32 lane, lane, 1; setp.ne.s32 odd, lane, 0;"
        f"mov.b64 there, $16; {rows} {zeros} }}"
    )


def main_config(
    operands: Operands, form: Form, mods: Mods, overlaps: bool = False
) -> BackwardSm90Config:
    """The configuration of the main kernel in one form."""
    call, blocks = operands.call, operands.call.blocks
    query, key, value = operands.query, operands.key, operands.value
    units = query.size(0) // key.size(0) * (query.size(1) // key.size(1))
    same_lists = blocks is None or blocks.num_batches * blocks.num_heads == 1
    has_tail = key.size(2) % KEYS != 0
    may_mask = call.mask is not None or has_tail
    exact = call.options.exact_math
    widths = width_of(query.size(3)), width_of(value.size(3))
    target = score_target(call, form, form.step, form.streamed)
    # Masks without edges: what a step may need of them is computed in all steps here, transposed
    # (causal, D = 128, S = 8192 and 32,768: 1.22 and 1.37 of the time, H200).
    shared = shared_fields(
        call, mods.score, widths, stages=form.stages, narrow=form.narrow, target=target,
        prefetch=form.prefetch, along=Axes.NONE,
    )  # fmt: skip
    has_score = shared["HAS_SCORE"]
    by_head = units > 1 and (mods.sinks is not None or tells_heads_apart(call))
    if mods.inner is not None:
        shared |= gradient_fragment(mods.inner, target, exact, mods.sinks)
    return BackwardSm90Config(
        **shared,
        TILE_M=form.step,
        PANELS=1,
        VALUE_PANELS=1,
        COLUMNS=form.columns(query.size(3)),
        VALUE_COLUMNS=form.columns(value.size(3)),
        SUB=1 if blocks is None else per_block(blocks.q_block, form.step),
        TILES_PER_BLOCK=1 if blocks is None else per_block(blocks.kv_block, KEYS),
        SAME_LISTS=same_lists,
        PERSISTENT=form.persistent,
        KV_STAGES=2 if form.persistent else 1,
        STEPS_PAST_END=True,
        UNSCALED=mods.unscaled,
        HAS_TAIL=has_tail,
        MAY_MASK=may_mask,
        NEEDS_QUERIES=may_mask or has_score or shared["HAS_BIAS"],
        BY_HEAD=by_head,
        HAS_SINKS=mods.sinks is not None,
        SLOPE_FIRST=has_score and mods.sinks is None,
        FINITE_SLOPE=mods.inner is None or is_tame(gradient_of(mods.inner, exact).program),
        DQ_APART=form.dq_apart,
        EARLY=form.early,
        FOLD=form.fold,
        DV_EARLY=form.dv_early,
        DK_SHARED=form.dk_shared,
        NATIVE=form.native,
        REGISTERS=form.registers,
        DQ_REGISTERS=form.dq_registers,
        ROWS_APART=form.rows_apart and _looks_up_queries(call.mask),
        MASK_FIRST=may_mask and form.fold and form.mask_first,
        LEAVES_LATE=form.leaves_late,
        SWEEPS=form.sweeps,
        NAMED=form.named,
        BY_WARP=form.by_warp,
        OVERLAPS=overlaps,
        DQ_COLUMNS=query.size(3),
        DQ_STORE=_store_of_pairs(query.dtype),
        DQ_RAGGED=form.sweeps and (query.size(2) % STEP != 0 or query.size(3) != widths[0]),
        LOAD_REGISTERS=form.load_registers,
    )


def _looks_up_queries(mask: BoundProgram | None) -> bool:
    """Whether a mask has loads for queries, which threads share in registers: one each."""
    return mask is not None and any(
        node.op == "load" and axes & (Axes.Q | Axes.KV) == Axes.Q
        for node, axes in zip(mask.program.nodes, mask.program.axes, strict=True)
    )


def wide_config(operands: Operands, form: Form, mods: Mods) -> BackwardSm90Config:
    """The configuration of wide_kernel in one form."""
    config = main_config(operands, form, mods)
    found = {field.name: value_of(config, field.name) for field in fields(config)}
    value_panels = -(-operands.value.size(3) // PANEL)
    found |= {"D": PANEL, "DV": PANEL, "PANELS": PANELS, "VALUE_PANELS": value_panels}
    found |= {"COLUMNS": PANEL, "VALUE_COLUMNS": PANEL}
    return BackwardSm90Config(**found | {"STEPS_PAST_END": False})


@dataclass(frozen=True, repr=False, kw_only=True)
class RolesConfig(BackwardSm90Config):
    """What roles_kernel is compiled for. SHIFT: weights are 2^SHIFT times what they are, so that
    float16 has all of its digits for those of rows of many keys; halves of float16 have no room for
    dscore of such."""

    SHIFT: int

    __hash__ = KernelConfig.__hash__


def roles_config(operands: Operands, form: Form, mods: Mods, overlaps: bool) -> RolesConfig:
    """The configuration of roles_kernel."""
    call = operands.call
    config = wide_config(operands, form, mods)
    found = {field.name: value_of(config, field.name) for field in fields(config)}
    has_tail = call.key.size(2) % TILE_KEYS != 0
    # blocks of a tile may differ, also where no mask_mod does
    may_mask = has_tail or call.mask is not None or call.blocks is not None
    found |= {"HAS_TAIL": has_tail, "MAY_MASK": may_mask, "NEEDS_QUERIES": may_mask}
    found |= {"OVERLAPS": overlaps, "STEPS_PAST_END": True}
    if call.mask is not None:
        # scores are not transposed here
        fragment = mask_fragment(call.mask.program, mask_target(call, form.narrow), Axes.KV)
        found |= fragment.fields("MASK")
    return RolesConfig(**found, SHIFT=shift_of(call.query.dtype))


def shift_of(dtype: torch.dtype) -> int:
    """SHIFT of these operands."""
    return 12 if dtype == torch.bfloat16 else 0


def adds_in_each_step(call: AttentionCall) -> bool:
    """Whether gradients of captured tensors are added to in every step: by query, by score, or
    along a captured row. What is summed by head or key first, or stored, was seen faster here (a
    slope a head 1.42 times, a full bias 1.04, H200)."""
    if call.score is None or not call.learns:
        return False
    gradient = gradient_of(call.score.program, call.options.exact_math)
    sinks = sinks_form(call, gradient)
    return any(
        not stored and (item.axes or index_axes(gradient.program, item) & Axes.Q)
        for item, stored in zip(gradient.contributions, sinks.stores, strict=True)
    )


def tells_heads_apart(call: AttentionCall) -> bool:
    """Whether a mod depends on b or h but for the score itself."""
    for bound in (call.score, call.mask):
        if bound is not None and any(
            node.op == "input" and node.attr in ("b", "h") for node in bound.program.nodes
        ):
            return True
    return False
