"""Tensors of a call in the form that kernels take."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from attnloom.backends.triton.packed import pack_double, pack_int, pack_ints
from attnloom.ir.node import BoundProgram

Sizes = tuple[int, ...]
_INT32 = 2**31 - 1
_FAR_ROWS = 1 << 22
_TMA_BYTES = 16  # alignment of addresses and strides that a TMA descriptor asks for
TMA_BOX_BYTES = 128  # alignment in shared memory: a smaller box misaligns the next stage's


def bind(bound: BoundProgram | None) -> tuple[object, ...]:
    """`args` of a fragment: pointer, sizes and strides of every captured tensor, then the
    numbers."""
    if bound is None:
        return (0.0,)
    flat: list[object] = []
    for tensor in bound.tensors:
        if not tensor.numel():
            tensor = _one_element(tensor)
        flat.append(tensor.detach() if tensor.requires_grad else tensor)
        flat += _layout(tuple(tensor.shape), tensor.stride())
    for number, dtype in zip(bound.numbers, bound.program.numbers, strict=True):
        flat += pack_double(float(number)) if dtype.is_float else pack_int(int(number))
    return tuple(flat) or (0.0,)


def _one_element(tensor: torch.Tensor) -> torch.Tensor:
    """Something to read in place of a tensor without elements, whose indices are all out of
    range."""
    return tensor.new_zeros((1,) * tensor.dim())


@functools.lru_cache(maxsize=4096)
def _layout(shape: Sizes, stride: Sizes) -> tuple[float, ...]:
    return (*pack_ints(shape), *pack_ints(stride))


def reaches_far(bound: BoundProgram | None) -> bool:
    """Whether an offset into a captured tensor may pass 2**31."""
    if bound is None or not bound.tensors:
        return False
    return any(_reach(tuple(t.shape), t.stride()) > _INT32 for t in bound.tensors)


@functools.lru_cache(maxsize=4096)
def _reach(shape: Sizes, stride: Sizes) -> int:
    return sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if the elements of a row are neighbours, else a contiguous copy.

    Rows that are very far apart are copied too: kernels address a tile of rows in 32 bits."""
    stride = tensor.stride()
    near = stride[2] <= _FAR_ROWS
    return tensor if near and (stride[3] == 1 or tensor.size(3) == 1) else tensor.contiguous()


def steps(tensor: torch.Tensor) -> Sizes:
    """Batch, head and row strides in elements; 0 along dimensions of one entry."""
    size, stride = tensor.shape, tensor.stride()
    return tuple(0 if size[d] == 1 else stride[d] for d in range(3))


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes."""
    if tensor.data_ptr() % _TMA_BYTES:
        return False
    width = tensor.element_size()
    return all(step * width % _TMA_BYTES == 0 for step in steps(tensor))


def takes_descriptor(tensor: torch.Tensor) -> bool:
    """Whether TMA can read the tensor: aligned, at most 4 bytes an element, no expanded
    dimension."""
    return (
        tensor.element_size() <= 4
        and is_aligned(tensor)
        and all(
            step > 0 or size == 1 for step, size in zip(steps(tensor), tensor.shape, strict=False)
        )
    )


def descriptors(tensor: torch.Tensor, rows: int, chunks: tuple[int, int, int]) -> Triple:
    """TMA descriptors of [1, 1, rows, chunk] boxes, one for each chunk of the head dimension; 0 for
    a chunk that is absent."""
    key = (tuple(tensor.shape), tensor.stride(), rows, chunks)
    blank = _blanks.get(key)
    if blank is None:
        if len(_blanks) >= _BLANK_LIMIT:
            _blanks.clear()
        blank = _blanks[key] = blank_descriptors(tensor, rows, chunks)
    return addressed(blank, tensor)


Triple = tuple[Any, Any, Any]
_blanks: dict[tuple[object, ...], Triple] = {}
_BLANK_LIMIT = 4096


def blank_descriptors(tensor: torch.Tensor, rows: int, chunks: tuple[int, int, int]) -> Triple:
    """`descriptors` without an address, checked: the checks take longer than the rest."""
    shape = list(tensor.shape)
    # a dimension of one entry may have any stride in torch; TMA wants an aligned one
    stride = [step or 16 for step in steps(tensor)] + [1]
    found: list[Any] = []
    for chunk in chunks:
        blank: Any = 0
        if chunk:
            assert rows * chunk * tensor.element_size() >= TMA_BOX_BYTES
            blank = TensorDescriptor(tensor, shape, stride, [1, 1, rows, chunk])
            blank.base = None
        found.append(blank)
    return tuple(found)  # type: ignore[return-value]


def stand_ins(blank: Triple, tensor: torch.Tensor) -> Triple:
    """A tensor in place of its descriptors, for launchers that know the rest of them."""
    _, second, third = blank
    return tensor, second and tensor, third and tensor


def addressed(blank: Triple, tensor: torch.Tensor) -> Triple:
    """Fresh descriptors of a tensor: a blank may be in use by other threads."""
    first, second, third = blank
    return (
        _with_base(first, tensor),
        second and _with_base(second, tensor),
        third and _with_base(third, tensor),
    )


def _with_base(blank: TensorDescriptor, tensor: torch.Tensor) -> TensorDescriptor:
    fresh = TensorDescriptor.__new__(TensorDescriptor)
    fresh.__dict__.update(blank.__dict__)
    fresh.base = tensor
    return fresh
