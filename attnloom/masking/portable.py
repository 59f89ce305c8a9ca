"""A mask across borders: to another device, another process, and through pytrees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attnloom.masking import captures, pickling, transforms, versions
from attnloom.masking.arguments import read_device

_TENSORS = ("dq_write_order", "dq_write_order_full", "dq_kv_order")
# What besides tensors and the mask_mod makes a mask.
_STATIC = (
    "BLOCK_SIZE",
    "_seq_lengths",
    "_batch_dims",
    "_has_full_lists",
    "_has_q_blocks",
    "dq_kv_order_spt",
    "_lists_of_mod",
)


@transforms.outside_transforms
def move(mask: Any, device: torch.device | str) -> Any:
    """See BlockMask.to."""
    where = read_device(device)
    versions.check(mask)

    def to(value: Any) -> Any:
        return transforms.plain(value).to(where) if isinstance(value, torch.Tensor) else value

    out = _blank(type(mask), {name: getattr(mask, name) for name in _STATIC})
    lists = mask._lists
    if lists is not None:
        lists = replace(lists, row_offsets=to(lists.row_offsets), entries=to(lists.entries))
    out._lists = lists
    out._dense = {name: to(value) for name, value in mask._dense.items()}
    for name in _TENSORS:
        setattr(out, name, to(getattr(mask, name)))
    out.mask_mod, out._reading = versions.moved(mask, to)
    return out


def reduce_mask(mask: Any) -> tuple[Any, ...]:
    """For pickle: by the lists alone; dense tensors are computed again."""
    versions.check(mask)
    code, captured = pickling.dump_mod(mask.mask_mod)
    state = {name: getattr(mask, name) for name in (*_STATIC, *_TENSORS)}
    lists = mask.lists()
    tensors = (lists.row_offsets, lists.entries)
    return _restore, (type(mask), state, replace(lists, **_NO_TENSORS), tensors, code, captured)


def _restore(
    cls: type, state: dict[str, Any], lists: Any, tensors: Any, code: bytes, captured: Any
) -> Any:
    mask = _blank(cls, state)
    mask._lists = replace(lists, row_offsets=tensors[0], entries=tensors[1])
    mask.mask_mod = pickling.load_mod(code, captured)
    mask._reading = versions.read(mask.mask_mod)
    return mask


def _blank(cls: Any, state: dict[str, Any]) -> Any:
    mask = cls.__new__(cls)
    mask._dense = {}
    mask._lists = None
    for name, value in state.items():
        setattr(mask, name, value)
    return mask


_NO_TENSORS: dict[str, Any] = {"row_offsets": None, "entries": None}


@dataclass(frozen=True, eq=False)
class MaskStructure:
    """What a pytree keeps of a mask beside its tensors; compares by value.

    mod: the mask_mod with Holes where captured tensors were.
    """

    static: tuple[Any, ...]
    lists: Any
    present: tuple[str, ...]
    mod: Any

    @property
    def _key(self) -> Any:
        lists = self.lists
        sizes = (lists.grid, lists.q_offset, lists.kv_offset)
        return (self.static, sizes, self.present, captures.structure_key(self.mod))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskStructure) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _flatten(mask: Any) -> tuple[list[Any], MaskStructure]:
    named, structure = _flatten_with_keys(mask)
    return [leaf for _, leaf in named], structure


def _flatten_with_keys(mask: Any) -> tuple[list[tuple[Any, Any]], MaskStructure]:
    lists = mask.lists()
    captured, mod = captures.take_tensors(mask.mask_mod)
    present = tuple(name for name in _TENSORS if getattr(mask, name) is not None)
    leaves = {"row_offsets": lists.row_offsets, "entries": lists.entries}
    leaves |= {name: getattr(mask, name) for name in present}
    leaves |= {f"captured_{i}": tensor for i, tensor in enumerate(captured)}
    static = tuple(getattr(mask, name) for name in _STATIC)
    structure = MaskStructure(static, replace(lists, **_NO_TENSORS), present, mod)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in leaves.items()], structure


def register(cls: type) -> None:
    """Make masks of this class pytrees: leaves are list tensors and captured tensors."""

    def unflatten(leaves: Any, structure: MaskStructure) -> Any:
        row_offsets, entries, *rest = leaves
        mask = _blank(cls, dict.fromkeys(_TENSORS))
        for name, value in zip(_STATIC, structure.static, strict=True):
            setattr(mask, name, value)
        mask._lists = replace(structure.lists, row_offsets=row_offsets, entries=entries)
        for name, value in zip(structure.present, rest, strict=False):
            setattr(mask, name, value)
        mask.mask_mod = captures.fill_holes(structure.mod, rest[len(structure.present) :])
        return mask

    pytree.register_pytree_node(
        cls,
        _flatten,
        unflatten,
        serialized_type_name="attnloom.BlockMask",
        flatten_with_keys_fn=_flatten_with_keys,
    )
