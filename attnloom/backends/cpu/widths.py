"""Whether the mods of a call need 64-bit integer lanes, known before it runs.

Float kernels compute integers in 32-bit lanes, twice as many a vector. Interval arithmetic proves
that this is enough for the positions and numbers of a call; the answer is remembered for lengths
rounded up to a power of two, so that a growing cache of keys asks rarely.
"""

from __future__ import annotations

from attnloom.backends.registry import AttentionCall
from attnloom.ir.node import BoundProgram
from attnloom.ir.passes.bounds import fits_32_bits

# Kernels evaluate whole tiles, a little beyond the last key.
_OVERHANG = 128
_MEMORY_LIMIT = 4096
_SHORT = 1 << 16
_answers: dict[tuple[object, ...], bool] = {}


def needs_wide_ints(call: AttentionCall) -> bool:
    """True unless every integer in the mods of a call surely fits 32 bits.

    Captured integers are taken as below 2^29; kernels check them as they load.
    """
    if call.score is None and call.mask is None:
        return False
    batch, heads, q_len, _ = call.query.shape
    kv_high = call.kv_len + _OVERHANG
    q_high = q_len if call.table is None else kv_high
    needed = False
    if call.score is not None:
        needed = _is_wide(call.score, (batch, heads, 0, _rounded(q_high), 0, _rounded(kv_high)))
    if call.mask is not None and call.blocks is not None:
        q_offset, kv_offset = call.blocks.q_offset, call.blocks.kv_offset
        q_range = (min(0, q_offset), _rounded(q_high + q_offset))
        kv_range = (min(0, kv_offset), _rounded(kv_high + kv_offset))
        needed = needed or _is_wide(call.mask, (batch, heads, *q_range, *kv_range))
    return needed


def mask_needs_wide_ints(bound: BoundProgram, sizes: tuple[int, int, int, int]) -> bool:
    """As `needs_wide_ints`, of a mask alone. sizes: batch entries, heads, Q_LEN, KV_LEN."""
    batch, heads, q_len, kv_len = sizes
    return _is_wide(bound, (batch, heads, 0, _rounded(q_len), 0, _rounded(kv_len)))


def _rounded(length: int) -> int:
    return max(_SHORT, 1 << max(0, length).bit_length())


def _is_wide(bound: BoundProgram, ranges: tuple[int, int, int, int, int, int]) -> bool:
    key = (bound.program.digest, bound.numbers, ranges)
    found = _answers.get(key)
    if found is None:
        batch, heads, q_low, q_high, kv_low, kv_high = ranges
        inputs = {
            "b": (0, batch),
            "h": (0, heads),
            "q": (q_low, q_high),
            "kv": (kv_low, kv_high),
        }
        found = not fits_32_bits(bound, inputs)
        if len(_answers) >= _MEMORY_LIMIT:
            _answers.clear()
        _answers[key] = found
    return found
