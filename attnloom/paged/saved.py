"""What a PagedKVCache holds, as numbers and tensors that can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attnloom.errors import DtypeError, OptionError, ShapeError, counted
from attnloom.paged.book import PageBook

if TYPE_CHECKING:
    from attnloom.paged.cache import PagedKVCache

_FIELDS = ("book", "used", "keys", "values")


def state_of(cache: PagedKVCache) -> dict[str, Any]:
    """The sequences of a cache, and the pages that they use with what these hold."""
    used = _used(cache.book)
    index = torch.tensor(used, dtype=torch.int64, device=cache.device)
    return {
        "book": cache.book.state(),
        "used": used,
        "keys": [key[index] for key in cache.keys],
        "values": [value[index] for value in cache.values],
    }


def restored(cache: PagedKVCache, state: Mapping[str, Any]) -> PageBook:
    """Write what the pages of a state hold into a cache; the book of the state.

    Raises:
        OptionError: it is no state of a cache. Nothing is written then, nor after the others.
        ShapeError: it is of other sizes.
        DtypeError: its keys or values have another dtype.
    """
    book = _book_of(state)
    num_used = len(state["used"])
    pairs = [
        *zip(cache.keys, state["keys"], strict=False),
        *zip(cache.values, state["values"], strict=False),
    ]
    same_pages = (
        book.allocator.num_pages == cache.num_pages
        and book.page_size == cache.page_size
        and len(state["keys"]) == len(state["values"]) == cache.num_layers
    )
    if not same_pages or any(new.shape != (num_used, *old.shape[1:]) for old, new in pairs):
        shapes = (list(tensor.shape[1:]) for tensor in (state["keys"][0], state["values"][0]))
        keys, values = shapes
        raise ShapeError(
            f"the state has {counted(book.allocator.num_pages, 'page')} of "
            f"{counted(book.page_size, 'token')} and {counted(len(state['keys']), 'layer')} of "
            f"keys {keys} and values {values}; this cache {cache.num_pages} of {cache.page_size} "
            f"and {cache.num_layers} of {list(cache.keys[0].shape[1:])} and "
            f"{list(cache.values[0].shape[1:])}."
        )
    other = next((new.dtype for old, new in pairs if new.dtype != old.dtype), None)
    if other is not None:
        raise DtypeError(
            f"the state holds {other}, this cache {cache.dtype}. Make it with the dtype of the one "
            "that was saved."
        )
    index = torch.tensor(state["used"], dtype=torch.int64, device=cache.device)
    for stored, saved in pairs:
        stored[index] = saved.to(stored)
    return book


def _book_of(state: Any) -> PageBook:
    """The book of a state, whose other fields are found to be of its kind.

    Raises:
        OptionError: one of them is not.
    """
    if not isinstance(state, Mapping) or any(field not in state for field in _FIELDS):
        raise OptionError(
            "state is not what state_dict of a cache gives: a dict of book, used, keys and values."
        )
    try:
        book = PageBook.from_state(state["book"])
        is_whole = list(state["used"]) == _used(book) and all(
            isinstance(tensor, torch.Tensor)
            for name in ("keys", "values")
            for tensor in (*state[name], state[name][0])
        )
    except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        raise OptionError(
            "state is not what state_dict of a cache gave: its numbers or tensors were changed, or "
            "are damaged. Nothing was loaded."
        )
    return book


def _used(book: PageBook) -> list[int]:
    """Pages that sequences have, in ascending order."""
    return sorted({page for s in book.sequences for page in book.pages(s) if page >= 0})
