"""Which tiles the Gluon forward runs with, by head dimensions. Measurements: docs/log.md."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

ROWS = 64  # queries of four warps of a consumer
FEW_SPILLS = 16  # registers a thread may keep in memory; with more, the next form is tried
_RING = 4  # barriers of a ring have places for as many slots (rings.py)
PANEL = 64
BOX = 32  # keys that are copied at once where a step has 96
_WIDTHS = (64, 128, 256)
_PANELLED = range(2 * PANEL + 1, 3 * PANEL + 1)
_LEAST_STRIPS = 160  # columns: with more, D and Dv use the last panel to a half and more
_CUT = range(PANEL + 1, PANEL + PANEL // 2 + 1)


@dataclass(frozen=True, slots=True)
class Form:
    """One way to run the kernel; see forward_shared.py and forward_sm90.py.

    registers, load_registers: a thread, of consumers after the first and of the producer; the first
        consumer has what is left. column_registers: the same where a warp looks up keys.
    panels: three, of PANEL columns each, for D and Dv of 129 to 192; 1: one tile of a power of two.
    pieces: captured elements of single scores are read 16 bytes a thread (pieces.py); lines: as is
        said there; prefetch: a step ahead, into registers.
    q_kept: panels of the queries that stay in registers, all or none; all of them: the next tile's
        are loaded at once, also over a single tile of queries.
    lazy: warps multiply no output whose rows have not grown; the same bits.
    late: the output is multiplied under the next step's product q . k^T.
    ahead: a step waits for the next one's keys between its exponentials and its product p . v.
    by_lane: sums of weights stay apart in the four lanes of a row until a tile's end.
    packed: a step hands on its weights as pairs in a register, made once its product p . v is done.
    cut: the product q . k^T takes 64 columns of a tile of 128, and of the others those that D uses.
    named: slots of keys and values are given back by named barriers (rings.py).
    by_warp: they and queries by a lane of each warp, and all threads wait (addresses.py).
    turns: consumers issue the products of a step one after the other (rings.py).
    skips: a consumer passes over steps at a tile's ends in which it has no block, and over all of
        them past the last query (forward_passed.py).
    joined: a tile begins under the end of the one before (forward_joined.py); without a BlockMask.
    wide: p . v is one product of three parts of the output (forward_wide.py): of its panels, or of
        32 columns each where D and Dv are 65 to 96.
    key_panels: that keys have room for, fewer than `stages` tiles have; 0: as many.
    strips: steps of 96 keys (forward_strips.py).
    out_ring: two panels of a consumer's results at a time leave from memory of their own, and
        queries are free once the last scores are there.
    programs: on a processor, which then divide its registers and its shared memory.
    warps: of a consumer.
    hasty: compiled so (backends/triton/hasty.py).
    """

    consumers: int
    tile_n: int
    stages: int
    q_stages: int
    overlap: bool
    out_in_q: bool
    registers: int
    load_registers: int
    column_registers: tuple[int, int]
    panels: int = 1
    pieces: bool = False
    lines: bool = False
    prefetch: bool = False
    q_kept: int = 0
    lazy: bool = False
    late: bool = False
    ahead: bool = False
    by_lane: bool = False
    packed: bool = False
    cut: bool = False
    named: bool = False
    by_warp: bool = False
    turns: bool = False
    skips: bool = False
    joined: bool = False
    wide: bool = False
    key_panels: int = 0
    strips: bool = False
    out_ring: bool = False
    programs: int = 1
    warps: int = 4
    hasty: bool = False

    def __post_init__(self) -> None:
        assert self.panels in (1, 3) and self.q_kept in (0, self.panels)
        # q_kept: ptxas 12.8 gives registers that products of a step read to what follows them
        assert self.overlap or not (self.late or self.ahead or self.packed or self.q_kept)
        assert not self.cut or self.panels == 1
        assert self.pieces or not (self.lines or self.prefetch)
        assert not self.wide or self.panels == 3 or self.cut
        assert not self.wide or self.strips or self.warps == 4
        assert not self.key_panels or self._is_short_ring()
        assert not (self.named or self.by_warp) or self.stages <= _RING
        assert not (self.named and self.by_warp)
        assert not self.joined or (self.overlap and self.panels == 1 and not self.wide)
        assert not (self.joined and (self.q_kept or self.out_in_q or self.prefetch))
        assert not (self.joined and (self.skips or self.turns or self.named))
        assert not self.skips or (self.consumers == 3 and not self.prefetch)
        assert not self.turns or (self.by_warp and self.overlap and self.consumers > 1)
        assert not self.strips or self._is_of_strips()
        assert not self.out_ring or (self.strips and self.overlap and not self.out_in_q)

    def _is_short_ring(self) -> bool:
        """Room for a step and two panels of the next, whose third waits for the step to be over."""
        shape = self.panels, self.stages, self.key_panels
        return shape == (3, 2, 5)

    def _is_of_strips(self) -> bool:
        kept = self.wide and self.by_warp and self.lazy and self.by_lane
        shape = self.tile_n, self.stages, self.panels, self.q_stages, self.q_kept, self.key_panels
        return kept and self.packed == self.overlap and shape == (3 * BOX, 2, 3, 1, 0, 0)

    @property
    def rows(self) -> int:
        """Queries of a consumer."""
        return ROWS // 4 * self.warps

    @property
    def tile_m(self) -> int:
        return self.consumers * self.rows

    def is_apart(self, q_block: int) -> bool:
        """Whether rows of a tile may lie in several blocks of a mask."""
        return q_block % self.tile_m != 0

    def rest(self, head_dim: int) -> int:
        """Columns past the first panel that q . k^T takes if it is cut, 16 at a time; else 0."""
        return -(-(head_dim - PANEL) // 16) * 16 if self.cut else 0

    @property
    def box(self) -> int:
        """Keys that are copied at once; a block of a mask has a multiple of them."""
        return BOX if self.strips else self.tile_n

    @property
    def parts(self) -> int:
        """Accumulators of the output."""
        return 3 if self.wide else self.panels

    def part(self, value_dim: int) -> int:
        """Columns of an accumulator of the output."""
        return PANEL // 2 if self.wide and self.panels == 1 else self.columns(value_dim)

    def columns(self, head_dim: int) -> int:
        """Of a tile in shared memory that holds a head dimension, or a panel of it."""
        return width_of(head_dim) if self.panels == 1 else PANEL


def width_of(head_dim: int) -> int:
    """A head dimension as a tile of its own covers it: TMA fills what is not there with zeros."""
    return next(w for w in _WIDTHS if head_dim <= w)


def covered(head_dim: int, other_dim: int) -> int:
    """Columns that tiles have for one of D and Dv beside the other: both lie in panels or none."""
    both = head_dim in _PANELLED and other_dim in _PANELLED
    return 3 * PANEL if both else width_of(head_dim)


# The larger of D and Dv as covered -> forms, best first. Named, H200, causal: soft cap at D=128
# 1.010 of the speed before, ALiBi 1.031. Masks of much arithmetic spill then that do not otherwise
# (fixed_sparse 508 bytes for 0, D=128), so the same form without names follows.
_FORMS: dict[int, tuple[Form, ...]] = {
    64: (
        Form(3, 128, 2, 2, False, False, 160, 32, (152, 56), skips=True),
        Form(2, 128, 2, 2, True, False, 240, 24, (232, 40)),
    ),
    128: (
        Form(2, 128, 2, 2, True, False, 240, 24, (232, 40), named=True),
        Form(2, 128, 2, 2, True, False, 240, 24, (232, 40)),
        Form(2, 128, 2, 1, True, True, 240, 24, (232, 40)),
    ),
    192: (
        Form(2, 64, 2, 2, True, True, 240, 24, (232, 40), panels=3, named=True),
        Form(2, 64, 2, 2, True, True, 240, 24, (232, 40), panels=3),
    ),
    256: (
        Form(2, 64, 2, 1, True, True, 240, 24, (232, 40), named=True),
        Form(2, 64, 2, 1, True, True, 240, 24, (232, 40)),
        Form(2, 64, 2, 1, True, False, 240, 24, (232, 40)),
    ),
}
# p . v of 96 and of 192 columns at once. H200, causal and full, in one run with what was in use
# (1.000): D=96 two consumers 1.043 and 1.047, named 1.048 and 1.043, three whose products wait for
# each other 1.031 and 1.110; D=192 64 keys a step 1.044 and 1.067, 128 of them 1.090 and 0.775.
# Masks of much arithmetic may spill in the first form and not in one that follows.
UP_TO_96 = 96  # D and Dv of 65 to 96
_WIDE_96 = Form(
    2, 128, 2, 1, True, False, 240, 24, (232, 40), q_kept=1, lazy=True, ahead=True, by_lane=True,
    packed=True, cut=True, wide=True,
)  # fmt: skip
_WIDE_192 = Form(
    2, 64, 2, 1, True, False, 240, 24, (232, 40), panels=3, q_kept=3, lazy=True, late=True,
    ahead=True, by_lane=True, named=True, wide=True,
)  # fmt: skip
# Steps of 96 keys for D and Dv of 161 to 192, three boxes of 32 that need not lie in one block of a
# mask, and queries that are free before results leave. H200, S=8192, ms: causal 2.296 -> 2.244, in
# turns 2.249; full 4.448 -> 4.255 in turns. Of FA4's speed 0.987 and 0.974. 56 registers for the
# producer, which keeps six in memory, all but within steps, with 40 under a mask.
_STRIPS_192 = Form(
    2, 3 * BOX, 2, 1, True, False, 224, 56, (224, 56), panels=3, lazy=True, late=True, ahead=True,
    by_lane=True, packed=True, by_warp=True, wide=True, strips=True, out_ring=True,
)  # fmt: skip
# The same, tried before those, where there is no score_mod and the mask looks up nothing. H200,
# causal and full, of FA4's speed: D=64 0.901 -> 0.949 and 0.928 -> 0.979, with named barriers 0.824
# and 0.847, four stages for two 1.012 without a mask and 1.002 under one; D=128 full 1.021; of
# cuDNN's D=256 full 1.132.
# By warp, of the speed before, without a mask: D=64 1.012, D=128 1.019 on a chip that is busy all
# along, 1.004 and 1.000 on one that rests between calls; under masks 0.94 to 0.97 there.
_PLAIN: dict[int, tuple[Form, ...]] = {
    64: (
        Form(
            3, 128, 4, 2, True, False, 160, 32, (152, 56), lazy=True, ahead=True, by_lane=True,
            packed=True, by_warp=True, joined=True,
        ),
    ),
    UP_TO_96: (
        Form(
            3, 128, 2, 1, False, True, 160, 32, (152, 56), lazy=True, by_lane=True, cut=True,
            wide=True, named=True, skips=True,
        ),
        _WIDE_96,
        replace(_WIDE_96, wide=False),
    ),
    128: (
        Form(2, 128, 2, 1, True, False, 240, 24, (232, 40), q_kept=1, by_lane=True, by_warp=True),
    ),
    192: (
        replace(_STRIPS_192, turns=True, registers=232, load_registers=40),
        _WIDE_192,
        replace(_WIDE_192, wide=False),
    ),
    256: (
        Form(
            2, 64, 2, 1, True, True, 240, 24, (232, 40), lazy=True, late=True, by_lane=True,
            named=True,
        ),
    ),
}  # fmt: skip
# In place of those where a mask has blocks: at D=128 and 256 keys waited for ahead, which loses
# without one; at D=64, for masks of edges alone (emit_mask.py), one consumer's products after the
# other's, by warp, and the output multiplied late: of what is in use for other masks 0.993, 1.019
# and 1.027. H200, causal: D=128 0.970 -> 1.016 of FA4's speed, D=256 1.120 of cuDNN's.
_PLAIN_MASKED: dict[int, tuple[Form, ...]] = {
    64: (
        replace(_PLAIN[64][0], joined=False, skips=True, late=True, turns=True),
        replace(_PLAIN[64][0], joined=False, skips=True, by_warp=False),
    ),
    128: (replace(_PLAIN[128][0], by_warp=False, named=True, ahead=True),),
    256: (replace(_PLAIN[256][0], ahead=True),),
    UP_TO_96: (replace(_WIDE_96, named=True), *_PLAIN[UP_TO_96][1:]),
    192: (
        _STRIPS_192,
        replace(_WIDE_192, tile_n=128, q_kept=0, out_in_q=True, key_panels=5),
        *_PLAIN[192][1:],
    ),
}
# The same for blocks of short_rows.py. H200, 12 documents, S=2048 and 8,192, ms: D=64 0.222 ->
# 0.112 and 0.315 -> 0.199, D=128 0.204 -> 0.158 and 0.333 -> 0.268;
# named 1.014 of that, with waits cut as in docs/log.md.
_OF_SHORT_ROWS: dict[int, tuple[Form, ...]] = {
    64: (Form(1, 64, 2, 1, True, False, 240, 24, (216, 24), q_kept=1, programs=2),),
    128: (
        Form(
            1, 64, 2, 1, True, False, 240, 24, (216, 24), q_kept=1, by_lane=True, named=True,
            programs=2,
        ),
        Form(1, 64, 2, 1, True, False, 240, 24, (216, 24), q_kept=1, by_lane=True, programs=2),
    ),
}  # fmt: skip
# The same where a score_mod looks up elements of single scores.
_IN_PIECES: dict[int, tuple[Form, ...]] = {
    64: (Form(2, 128, 2, 2, True, False, 240, 24, (232, 40), pieces=True),),
    128: (
        Form(
            2, 128, 2, 1, True, True, 240, 24, (232, 40), pieces=True, lines=True, prefetch=True,
            named=True,
        ),
        Form(2, 128, 2, 1, True, True, 240, 24, (232, 40), pieces=True, lines=True, prefetch=True),
    ),
}  # fmt: skip


@functools.lru_cache(maxsize=256)
def forms(
    head_dim: int,
    value_dim: int,
    kv_block: int | None,
    pieces: bool = False,
    plain: bool = False,
) -> tuple[Form, ...]:
    """Forms to try, best first. kv_block: of the mask; a step lies in one block of keys. pieces:
    those that read captured elements so, if there are any. plain: also those for calls without a
    score_mod whose mask looks up nothing."""
    width, value_width = covered(head_dim, value_dim), covered(value_dim, head_dim)
    widest = widest_of(head_dim, value_dim)
    found = (_IN_PIECES if pieces else _FORMS).get(widest, ())
    if plain:
        own = _PLAIN if kv_block is None else _PLAIN | _PLAIN_MASKED
        found = (*own.get(place_of(head_dim, value_dim), ()), *found)
    return tuple(
        form
        for form in found
        if (kv_block is None or kv_block % max(form.box, PANEL) == 0)
        and (value_width <= width or not form.out_in_q)
        and (not form.strips or (head_dim > _LEAST_STRIPS and value_dim > _LEAST_STRIPS))
    )


def forms_of_short_rows(head_dim: int, value_dim: int) -> tuple[Form, ...]:
    """The same for masks of blocks as short_rows.py has them."""
    return _OF_SHORT_ROWS.get(widest_of(head_dim, value_dim), ())


def quick(form: Form) -> Form | None:
    """The same for a first call: tiles of 128 queries, in one consumer of eight warps, one product
    after the other. Triton copies what it made of a consumer for each, and products that overlap
    have a first step of their own, so that this takes a third to a half of the time to compile. It
    gives the same bits: a panel of the output at a time adds up the same keys in the same order as
    all of them at once. None where a tile has one consumer of four warps, and for pieces, which are
    divided among four."""
    if form.consumers == 1 or form.pieces:
        return None
    return replace(
        form, consumers=1, warps=8, named=False, by_warp=True, wide=form.strips, overlap=False,
        late=False, ahead=False, packed=False, q_kept=0, registers=240,
        load_registers=56 if form.strips else 24,
        column_registers=(232, 40), turns=False, skips=False, joined=False, out_ring=False,
        out_in_q=form.out_in_q or form.strips, hasty=True,
    )  # fmt: skip


def place_of(head_dim: int, value_dim: int) -> int:
    """In the tables of calls without a score_mod."""
    cut = head_dim in _CUT and value_dim in _CUT
    return UP_TO_96 if cut else widest_of(head_dim, value_dim)


def widest_of(head_dim: int, value_dim: int) -> int:
    """The larger of D and Dv as covered."""
    return max(covered(head_dim, value_dim), covered(value_dim, head_dim))
