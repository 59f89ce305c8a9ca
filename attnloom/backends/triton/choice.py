"""The first call of a variant: which of several tiles its launches keep, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from triton.runtime.errors import OutOfResources

from attnloom.backends.triton.configs import Tile
from attnloom.backends.triton.launcher import Launcher
from attnloom.errors import UnsupportedError

_KEPT = 4096  # launches; so many variants at once are rare, and making one again costs little


class _Ready(Protocol):
    @property
    def launch(self) -> Launcher: ...


R = TypeVar("R", bound=_Ready)


def choose(
    tiles: Iterable[Tile],
    prepare: Callable[[Tile], R],
    start: Callable[[R], None],
    few_spills: int,
    num_tries: int,
) -> R:
    """Launch with the first tile that the device takes and that keeps nearly all values in
    registers; of the first few, with the one that comes closest.

    Args:
        start: launches a kernel, any number of times with the same outcome.
        few_spills: registers a thread may keep in memory; num_tries: tiles to compile at most.
    Raises:
        UnsupportedError: the device has too little memory for every tile.
    """
    best: R | None = None
    refused: OutOfResources | None = None
    num_tried = 0
    for tile in tiles:
        ready = prepare(tile)
        try:
            start(ready)
        except OutOfResources as error:
            refused = error
            continue
        num_tried += 1
        if best is None or ready.launch.spills < best.launch.spills:
            best = ready
        if best.launch.spills <= few_spills or num_tried == num_tries:
            break
    if best is None:
        assert refused is not None, "no tiles"
        raise UnsupportedError(
            f"backend 'triton' has no kernel for this head dimension and dtype that fits the "
            f"device: the smallest needs {refused.required} bytes of {refused.name}, there are "
            f"{refused.limit}. Use kernel_options={{'backend': 'tiled'}}, or halves instead of "
            "float32."
        ) from refused
    return best


def keep(memory: dict[tuple[Any, ...], Any], key: tuple[Any, ...], ready: object) -> None:
    """Remember what was prepared for calls of a key; a full memory begins anew."""
    if len(memory) >= _KEPT:
        memory.clear()
    memory[key] = ready
