"""How gradients of captured tensors leave a tile; generated fragments call these (emit_grad.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def places(ptr, offset, value):
    """Pointers in the shape of the values; an offset may be a scalar."""
    return ptr + (offset + gl.full(value.shape, 0, gl.int32, value.type.layout))


@gluon.jit
def add(ptr, offset, value):
    """Lanes that add nothing, such as those that a mask discards, stay out of the memory's way."""
    gl.atomic_add(places(ptr, offset, value), value, mask=value != 0, sem="relaxed")


@gluon.jit
def add_one(ptr, offset, value):
    """A scalar."""
    gl.atomic_add(ptr + offset, value, sem="relaxed")
