"""Which form the Gluon backward runs in. Measurements: docs/log.md.

Registers a thread: 64 x 512 of a processor are divided among its warps. A kernel that spills more
than FEW_SPILLS of them gives way to the portable kernels: a heavy score_mod needs their smaller
tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Registers a thread that a kernel may keep in memory (H200, D=128: soft-capping spills 26 and takes
# 0.70 of the portable kernels' time, documents 18 and 0.96).
FEW_SPILLS = 32
MAX_HEAD_DIM = 128
KEYS = 128  # of a program
STEP = 64  # queries of a step
LONG_STEP = 128
PANEL = 64  # columns, of heads in panels
TILE_KEYS = 96  # of a program of backward_roles.py
PANELS = 3
NATIVE = 96  # columns
SLICE = 16  # columns


@dataclass(frozen=True, slots=True)
class Form:
    """stages: of the rings. narrow: captured 64-bit integers that fit are held in 32 bits
    (layouts.py). pieces: captured elements of single scores are read, and their gradients stored,
    16 bytes a thread (pieces.py); lines, streamed: as is said there; prefetch: a step ahead.
    named, by_warp: see backward_slots.py. trims: products that sum over columns leave out whole
    slices past the heads'. step: queries of one. The others: see backward_sm90.py and
    fields_backward.py.
    """

    stages: int
    dq_apart: bool
    early: bool
    fold: bool
    registers: int
    dq_registers: int = 72
    load_registers: int = 24
    narrow: bool = False
    pieces: bool = False
    lines: bool = False
    streamed: bool = False
    prefetch: bool = False
    persistent: bool = False
    sweeps: bool = False
    rows_apart: bool = False
    mask_first: bool = False
    leaves_late: bool = False
    named: int = 0
    by_warp: bool = False
    trims: bool = False
    dk_shared: bool = False
    dv_early: bool = False
    step: int = STEP
    native: bool = False

    def __post_init__(self) -> None:
        assert self.pieces or not (self.lines or self.streamed or self.prefetch)
        assert self.persistent or not self.sweeps
        assert not (self.dq_apart and (self.named > 2 or self.dk_shared))
        assert self.step == STEP or not (self.dq_apart or self.sweeps or self.dk_shared)
        assert self.trims or not self.native
        assert not (self.native and (self.sweeps or self.dk_shared))
        assert not (self.named and self.by_warp)

    def columns(self, head_dim: int) -> int:
        """How many of a tile's columns those products sum over."""
        width = width_of(head_dim)
        return -(-head_dim // SLICE) * SLICE if self.trims and width > PANEL else width


_NARROW = Form(
    2, dq_apart=True, early=False, fold=False, registers=208,
    pieces=True, lines=True, streamed=True, prefetch=True,
)  # fmt: skip
_NARROW_DRAWN = Form(2, dq_apart=True, early=False, fold=False, registers=208, persistent=True)
_NARROW_FOLD_DRAWN = Form(4, dq_apart=True, early=True, fold=True, registers=208, persistent=True)
_WIDE = Form(2, dq_apart=False, early=False, fold=False, registers=240)
_WIDE_FOLD = Form(2, dq_apart=False, early=False, fold=True, registers=240)
_WIDE_DRAWN = replace(_WIDE, narrow=True, persistent=True)
_WIDE_FOLD_DRAWN = replace(_WIDE_FOLD, narrow=True, persistent=True, trims=True)
_NARROW_SWEPT = replace(_NARROW_FOLD_DRAWN, sweeps=True)
_WIDE_FEW = replace(_WIDE_FOLD_DRAWN, rows_apart=True, leaves_late=True)
_WIDE_SWEPT = replace(_WIDE_FEW, sweeps=True, mask_first=True, trims=False)
# H200, B=4, S=8192, ms of all passes: causal D=64 2.58 -> 2.57, D=128 without a mask 8.41 -> 8.29;
# causal D=128 loses by it, and so do programs that draw tiles of D=64 without a mask. By warp
# S=32,768 gains 1%, causal D=128 nothing to 0.6%; D=64 without a mask loses 2% on a chip that rests
# between calls, D=128 without one 4%, and in a window 1%.
_WIDE_LONG = replace(_WIDE_FOLD_DRAWN, by_warp=True)
_NARROW_NAMED = replace(_NARROW_FOLD_DRAWN, named=2)
_WIDE_NAMED = replace(_WIDE_FOLD, named=3, trims=True)
# The same at D=96: causal 4.27 -> 4.01 (4.13 by `trims` alone), without a mask 7.94 -> 7.47. What
# does not trim spills more with it.
_WIDE_TRIMMED = replace(_WIDE_FOLD_DRAWN, named=3, dk_shared=True)
# H200, the same sizes, chip resting between calls; dv before dP is waited for: D=128, window of
# 1,024 1.395 -> 1.387. Without a mask it changes nothing at D=128, whose named form stays.
_WIDE_SOME = replace(_WIDE_FOLD_DRAWN, named=3, dv_early=True)
# Steps of 128 queries: causal D=64 2.551 -> 2.341, and 2.457 where products start from -lse.
_NARROW_LONG = replace(
    _NARROW_NAMED, step=LONG_STEP, dq_apart=False, early=False, stages=2, registers=240, named=3,
    dv_early=True, fold=False,
)  # fmt: skip
# D=96: causal 3.992 -> 3.669 (3.760 from -lse), without a mask 7.483 -> 6.791 (7.694 from 0). One
# tile a program under a mask: 3.640 for 3.686 in a lab, 3.967 for 3.723 in the suite.
_NATIVE_DRAWN = replace(_WIDE_TRIMMED, dk_shared=False, native=True, dv_early=True, fold=False)
_NATIVE_NAMED = replace(_WIDE_NAMED, native=True, dv_early=True)
# What a form that spills more registers than these gives way to, before portable kernels. It was
# timed with 4, and spills up to 15 under masks of more arithmetic, where the other has 4. The forms
# for D=96 and windows spill no more than what they stand for under any mask that was compiled.
_INSTEAD = {_NARROW_LONG: (8, _NARROW_NAMED)}


def width_of(head_dim: int) -> int:
    """Columns that tiles of a head dimension have."""
    return 64 if head_dim <= 64 else 128


def form_for(
    head_dim: int,
    value_dim: int,
    may_mask: bool,
    may_fold: bool,
    learns: bool = False,
    sweeps: bool = False,
    sees_few: bool = False,
    sees_some: bool = False,
    sees_many: bool = False,
    long_steps: bool = False,
) -> Form:
    """The form of a problem.

    Args:
        may_mask: some tiles are masked.
        may_fold: scores are what the products give, times a positive scale.
        learns: captured tensors get gradients.
        sweeps: programs may sweep over heads, of scores that fold, with a mask.
        sees_few: of such a mask too, tiles of keys have few steps (few_keys.py).
        sees_some, sees_many: they have more, or many, and the mask looks up nothing (few_keys.py).
        long_steps: the mask's blocks are whole steps of LONG_STEP queries, of all heads alike.
    """
    narrow = max(width_of(head_dim), width_of(value_dim)) == 64
    if sweeps and may_mask and may_fold:
        return _NARROW_SWEPT if narrow else _WIDE_SWEPT
    if sees_few and may_mask and may_fold and not narrow:
        return _WIDE_FEW
    if narrow:
        if not may_fold:
            return _NARROW
        if may_mask and sees_many and long_steps:
            return _NARROW_LONG
        return _NARROW_NAMED if may_mask else _NARROW_DRAWN
    columns = [_WIDE_TRIMMED.columns(dim) for dim in (head_dim, value_dim)]
    native = columns == [NATIVE, NATIVE]
    if may_mask and not learns:
        if not may_fold:
            return _WIDE_DRAWN
        if native:
            return _NATIVE_DRAWN
        if max(columns) < width_of(MAX_HEAD_DIM):
            return _WIDE_TRIMMED
        if sees_many:
            return _WIDE_LONG
        return _WIDE_SOME if sees_some else _WIDE_FOLD_DRAWN
    if not may_fold:
        return _WIDE
    return _NATIVE_NAMED if native else _WIDE_NAMED


def followed(form: Form) -> tuple[int, Form] | None:
    """The registers that a form may spill, and what is tried where it spills more."""
    return _INSTEAD.get(form)


_ROLES = replace(_WIDE, by_warp=True)


def form_of_roles() -> Form:
    """The form of a problem of wider heads without a score_mod (backward_roles.py)."""
    return _ROLES


def form_in_panels(may_fold: bool) -> Form:
    """The form of any other problem of wider heads (backward_wide.py). may_fold: see form_for."""
    return _WIDE_FOLD if may_fold else _WIDE
