"""Start a kernel again with arguments of which only addresses have changed.

A Restart has parameters of its own in memory, complete but for the addresses of some tensors; those
are written in one go. `direct.py` starts kernels whose numbers and lists change too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from attnloom.backends.triton.direct import (
    Direct,
    Part,
    Room,
    Start,
    laid_out,
    prepare_parts,
)

_MOST_MAPS = 256  # that a descriptor is remembered at: layers of a model, say


class _Map:
    """A TMA descriptor of the source with this index, and those that were made of it."""

    __slots__ = ("encoded", "last", "part", "source")

    def __init__(self, part: Part, source: int) -> None:
        self.part, self.source = part, source
        self.last = 0
        self.encoded: dict[int, object] = {}

    def write(self, room: Room, place: int) -> None:
        found = self.encoded.get(place)
        if found is not None:
            room.copy(found, self.part)
        else:
            if len(self.encoded) >= _MOST_MAPS:
                self.encoded.clear()
            self.encoded[place] = room.encode(self.part, place)
        self.last = place


class Restart:
    """One launch for tensors of one form."""

    __slots__ = ("_constants", "_kept", "_lock", "_maps", "_pick", "_room", "_start", "_write")

    def __init__(
        self, direct: Direct, args: tuple[Any, ...], sources: Sequence[torch.Tensor]
    ) -> None:
        """Args:
        args: as for `direct`. Each tensor and descriptor among them is of one of the sources, whose
            addresses change, or stays as it is.
        sources: different objects, perhaps at one address.
        """
        layout = laid_out(direct.loaded, args)
        self._room = Room(layout)
        prepare_parts(layout, direct.loaded, self._room, args)
        index = {id(tensor): i for i, tensor in enumerate(sources)}
        pointers = [args[i] for i in layout.plain]
        self._maps: list[_Map] = []
        for part in layout.parts:
            arg = args[part.at]
            if part.map_at >= 0:
                self._maps.append(_Map(part, index[id(arg.base)]))
                continue
            if part.is_tuple:
                part.write_numbers(*[arg[i] for i in part.numbers])
                pointers += [arg[i] for i in part.pointers]
            else:
                part.write_numbers(arg)
        kept = [p for p in pointers if id(p) not in index]
        for i, tensor in enumerate(kept):
            index.setdefault(id(tensor), len(sources) + i)
        self._kept = kept  # their memory
        self._constants = tuple(t.data_ptr() for t in kept)
        self._pick = _picker([index[id(p)] for p in pointers])
        self._write = self._room.writer("Q" * len(pointers), layout.plain_at)
        self._start = Start(direct.loaded, direct.grid, self._room)
        self._lock = threading.Lock()

    def __call__(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Start on a stream. addresses: of the sources, in their order."""
        with self._lock:  # the driver has copied the parameters when it returns
            self._write(*self._pick(addresses + self._constants))
            for described in self._maps:
                place = addresses[described.source]
                if place != described.last:
                    described.write(self._room, place)
            self._start(stream)


def _picker(places: list[int]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """The entries of a tuple at these places, as a tuple."""
    if len(places) < 2:
        return lambda given: tuple([given[place] for place in places])
    return itemgetter(*places)
