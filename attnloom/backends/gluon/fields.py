"""What the Gluon kernels of both phases are compiled for: operands, rings, and a call's mods."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from attnloom.backends.gluon.emit import comes_in_pieces
from attnloom.backends.gluon.fragments import bias_fragment, mask_fragment, score_fragment
from attnloom.backends.gluon.score_form import ScoreForm, score_form
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.emit import Target
from attnloom.backends.triton.fields import target_of, triton_type
from attnloom.backends.triton.layouts import elements_only, mask_layouts, score_layouts
from attnloom.ir.node import Axes


@dataclass(frozen=True, repr=False, kw_only=True)
class Sm90Config(KernelConfig):
    """The fields that both phases have.

    STAGES: slots of a ring. REGISTERS: a thread, of consumers after the first; LOAD_REGISTERS: of
        the producer.
    D, DV: head dimensions as tiles cover them. SUB: steps in a block of the mask.
    HAS_SCORE, HAS_BIAS: the score_mod has an inner part, and a linear bias (score_form.py).
    HAS_TAIL: the last keys of a tile are past KV_LEN. MAY_MASK: some tiles are masked.
    MASK_JOINS: the mask may be several conditions.
    UNSCALED: x is the raw product.
    PREFETCH: what single scores look up, in pieces, is loaded a step ahead.
    """

    STAGES: int
    LOG_STAGES: int
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
    UNSCALED: bool
    PREFETCH: bool
    SCORE_HEAD: JITFunction | None = None
    SCORE_ROW: JITFunction | None = None
    SCORE_COLUMN: JITFunction | None = None
    SCORE_PIECES: JITFunction | None = None
    SCORE_BODY: JITFunction | None = None
    BIAS_HEAD: JITFunction | None = None
    BIAS_SLOPE: JITFunction | None = None
    BIAS_AT: JITFunction | None = None
    MASK_HEAD: JITFunction | None = None
    MASK_ROW: JITFunction | None = None
    MASK_COLUMN: JITFunction | None = None
    MASK_EDGES: JITFunction | None = None
    MASK_BODY: JITFunction | None = None
    MASK_JOINS: bool = False

    __hash__ = KernelConfig.__hash__


def mask_target(call: AttentionCall, narrow: bool) -> Target:
    """What the mask's fragment may use. narrow: 64-bit integers that fit are held in 32 bits.
    Without edges (emit_mask.py) beside a score_mod that has distances of its own: registers hold
    positions then (sandwich, D=128: 116 bytes spilled for 60)."""
    target = target_of(call)
    if _computes_positions(call):
        target = replace(target, near=False)
    return target.reading(elements_only(mask_layouts(call))) if narrow else target


def _computes_positions(call: AttentionCall) -> bool:
    """Whether the score_mod computes integers for each score, but for a linear bias."""
    if call.score is None:
        return False
    inner = score_form(call.score.program, call.options.exact_math).inner
    both = Axes.Q | Axes.KV
    return inner is not None and any(
        node.dtype.is_int and node.op != "load" and axes & both == both
        for node, axes in zip(inner.nodes, inner.axes, strict=True)
    )


class HasPieces(Protocol):
    """What the forms of both phases say of captured elements of single scores, see pieces.py."""

    @property
    def pieces(self) -> bool: ...
    @property
    def lines(self) -> bool: ...


def score_target(call: AttentionCall, form: HasPieces, rows: int, streamed: bool = False) -> Target:
    """What the score's fragments may use, for tiles of so many rows of queries."""
    target = replace(target_of(call), lines=form.lines, streamed=streamed)
    return target.reading(score_layouts(call, rows)) if form.pieces else target


def shared_fields(
    call: AttentionCall,
    score: ScoreForm | None,
    widths: tuple[int, int],
    *,
    stages: int,
    narrow: bool,
    target: Target,
    prefetch: bool,
    along: Axes,
) -> dict[str, Any]:
    """Those that both phases find alike. score: the parts of the call's score_mod. widths: D, DV.
    narrow: see mask_target. target: see score_target. prefetch: pieces, if there are any.
    along: the position of columns, see emit_mask.py."""
    inner = None if score is None else score.inner
    bias = None if score is None else score.bias
    fragments: dict[str, Any] = {}
    if inner is not None:
        fragments |= score_fragment(inner, target).fields("SCORE")
    if bias is not None:
        fragments |= bias_fragment(bias, target).fields()
    if call.mask is not None:
        reading = mask_target(call, narrow)
        fragments |= mask_fragment(call.mask.program, reading, along).fields("MASK")
    return {
        "STAGES": stages,
        "LOG_STAGES": stages.bit_length() - 1,
        "D": widths[0],
        "DV": widths[1],
        "OPERAND": triton_type(call.query.dtype),
        "HAS_LISTS": call.blocks is not None,
        "HAS_SCORE": inner is not None,
        "HAS_BIAS": bias is not None,
        "HAS_MASK": call.mask is not None,
        "PREFETCH": prefetch and inner is not None and comes_in_pieces(inner, target),
        **fragments,
    }
