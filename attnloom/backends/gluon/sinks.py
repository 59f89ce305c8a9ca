"""How gradients of captured tensors leave a tile; generated fragments call these (emit_grad.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def places(ptr, offset, value):
    """Pointers in the shape of the values; an offset may be a scalar."""
    return ptr + (offset + gl.full(value.shape, 0, gl.int32, value.type.layout))


@gluon.jit
def vector(offset, AXIS: gl.constexpr):
    """What lies along the other dimension of a tensor with one entry along AXIS."""
    return gl.max(offset, AXIS)


@gluon.jit
def add(ptr, offset, value):
    """Scores, or a vector by query or key. Not a tensor with one entry along a dimension: a thread
    holds that in a register for each of its scores there, and each would be added.

    Lanes that add nothing, such as those that a mask discards, stay out of the memory's way."""
    gl.atomic_add(places(ptr, offset, value), value, mask=value != 0, sem="relaxed")


@gluon.jit
def add_one(ptr, offset, value):
    """A scalar."""
    gl.atomic_add(ptr + offset, value, sem="relaxed")
