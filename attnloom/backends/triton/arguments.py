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
    return bound is not None and any(
        _reach(tuple(t.shape), t.stride()) > _INT32 for t in bound.tensors
    )


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


def descriptors(
    tensor: torch.Tensor, rows: int, chunks: tuple[int, int, int]
) -> tuple[object, object, object]:
    """TMA descriptors of [1, 1, rows, chunk] boxes, one for each chunk of the head dimension."""
    blank = _blank_descriptors(tensor, tuple(tensor.shape), tensor.stride(), rows, chunks)
    return tuple(b and _with_base(b, tensor) for b in blank)  # type: ignore[return-value]


_blanks: dict[tuple[object, ...], tuple[Any, ...]] = {}
_BLANK_LIMIT = 4096


def _blank_descriptors(tensor: torch.Tensor, *key: Any) -> tuple[Any, ...]:
    """Descriptors without an address, checked once: the checks take longer than the rest."""
    found = _blanks.get(key)
    if found is None:
        if len(_blanks) >= _BLANK_LIMIT:
            _blanks.clear()
        found = _blanks[key] = _checked_descriptors(tensor, *key[2:])
        for descriptor in found:
            if descriptor:
                descriptor.base = None
    return found


def _with_base(blank: TensorDescriptor, tensor: torch.Tensor) -> TensorDescriptor:
    fresh = TensorDescriptor.__new__(TensorDescriptor)
    fresh.__dict__.update(blank.__dict__)
    fresh.base = tensor
    return fresh


def _checked_descriptors(
    tensor: torch.Tensor, rows: int, chunks: tuple[int, int, int]
) -> tuple[Any, ...]:
    shape = list(tensor.shape)
    # a dimension of one entry may have any stride in torch; TMA wants an aligned one
    stride = [step or 16 for step in steps(tensor)] + [1]
    return tuple(
        TensorDescriptor(tensor, shape, stride, [1, 1, rows, chunk]) if chunk else 0
        for chunk in chunks
    )
