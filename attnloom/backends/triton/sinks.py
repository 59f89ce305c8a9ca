"""How gradients of captured tensors leave a tile; generated fragments call these (emit_grad.py).

add         floating atomics: fast, and in no fixed order
add_fixed   integers of 64 bits: a sum of integers does not depend on the order of its terms
"""

import triton
import triton.language as tl


@triton.jit
def _places(ptr, offset, value):
    """Pointers in the shape of the values; an offset may be a scalar."""
    return ptr + (offset + tl.zeros(value.shape, tl.int32))


@triton.jit
def add(ptr, offset, value):
    """Lanes that add nothing, such as those that a mask discards, stay out of the memory's way."""
    tl.atomic_add(_places(ptr, offset, value), value, mask=value != 0, sem="relaxed")


@triton.jit
def add_fixed(ptr, offset, value, scales, LIMBS: tl.constexpr):
    """value * scales[0] rounded to an integer and, with a second limb, what that left *
    scales[1]."""
    scaled = value.to(tl.float64) * tl.load(scales)
    whole = tl.floor(scaled + 0.5)
    live = value != 0
    places = _places(ptr, offset * LIMBS, value)
    tl.atomic_add(places, whole.to(tl.int64), mask=live, sem="relaxed")
    if LIMBS == 2:
        rest = tl.floor((scaled - whole) * tl.load(scales + 1) + 0.5)
        tl.atomic_add(places + 1, rest.to(tl.int64), mask=live, sem="relaxed")


@triton.jit
def size_of(value):
    """|value|, and infinity for NaN, so that a maximum shows either."""
    return tl.where(value == value, tl.abs(value), float("inf"))
