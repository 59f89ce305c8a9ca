"""Two consumers in place of three at heads of up to 96, and shorter steps at heads of 129 to 192,
where a tile has few steps.

Three have 192 queries: a step costs less a query, a tile's beginning and end more, and beside
blocks of 128 a tile has steps that some of its queries have no block in, in which its other
consumers are not much faster. Which is less follows from how many blocks there are, which the host
knows."""

from __future__ import annotations

from typing import NamedTuple

from attnloom.backends.gluon.configs_forward import PANEL, ROWS, UP_TO_96, place_of
from attnloom.backends.registry import AttentionCall

_STEP = 128  # keys
_Q_BLOCK = 128


class _Cost(NamedTuple):
    """Of a tile, and of each of its steps, us of a processor that runs one program."""

    consumers: int
    tile: float
    step: float

    def of(self, q_len: int, steps: float) -> float:
        return -(-q_len // (ROWS * self.consumers)) * (self.tile + self.step * steps)


# Of three and of two, by place in the tables. H200: docs/log.md. Up to 64 causal, S=1024 and 8,192,
# of forms whose products wait for each other; a step of three takes 0.95 of that since theirs
# overlap. From S=4096 to 16,384 those fit 7.4 and 1.30, and 5.8 since consumers pass over steps
# (forward_passed.py). That says too much of S=1024, 14% more than three took there before either,
# so that it is not used for rows as short as the choice is about. 65 to 96 have three without a
# mask alone; steps of S=8192, tiles by their bytes.
_COSTS = {
    PANEL: (_Cost(3, 3.48, 0.95 * 1.54), _Cost(2, 1.79, 1.15)),
    UP_TO_96: (_Cost(3, 5.2, 2.07), _Cost(2, 2.6, 1.49)),
}
# A tile of three spans two rows of blocks: one more step if both ends of a row move, as those of
# windows do, half of one, on average, if only the last moves.
_MORE_STEPS = 0.5
# Keys of a query, on average, up to which steps of 64 are taken under a mask at heads of 129 to
# 192. H200, causal, ms of 64 keys and of 96: S=512 0.275 and 0.309, S=1024 0.4135 and 0.428, S=2048
# 0.695 and 0.690. Without a mask 96 gain 1.4% at S=1024.
_FEW_KEYS = 768
# Runs differ by 5%, and two have to be less by more than that.
_SURE = 0.92


def has_few_steps(call: AttentionCall) -> bool:
    """Whether two consumers are sure to be faster; of calls without a score_mod, whose masks, if
    any, go by positions alone: the others are not timed, or have forms of their own."""
    dims = call.query.size(3), call.value.size(3)
    if call.score is not None or (call.mask is not None and call.mask.tensors):
        return False
    q_len, blocks = call.query.size(2), call.blocks
    place = place_of(*dims)
    if place not in _COSTS or (place != PANEL and blocks is not None):
        return False
    if blocks is None:
        steps: float = -(-call.key.size(2) // _STEP)
        more = 0.0
    elif blocks.q_block != _Q_BLOCK or not blocks.entries.numel():
        return False
    else:
        rows = blocks.row_offsets.numel() - 1
        steps = blocks.entries.numel() / rows * blocks.kv_block / _STEP
        more = _MORE_STEPS
    three, two = _COSTS[place]
    return two.of(q_len, steps) < _SURE * three.of(q_len, steps + more)


def wants_short_steps(call: AttentionCall) -> bool:
    """Whether the shortest of a problem's steps are the fastest; of calls as above."""
    blocks, place = call.blocks, place_of(call.query.size(3), call.value.size(3))
    if call.score is not None or (call.mask is not None and call.mask.tensors):
        return False
    if blocks is None or place != 3 * PANEL:
        return False
    rows = blocks.row_offsets.numel() - 1
    return blocks.entries.numel() * blocks.kv_block <= _FEW_KEYS * rows
