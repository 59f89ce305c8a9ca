"""Calls of a phase: prepared once for all calls like the first, launched each time, started again.

Forward, decode and caches differ in their kernels and arguments; what is remembered of a call, and
when, is here. A phase has a memory of launches but for their addresses, by key.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnloom.backends.registry import AttentionCall, ForwardResult
from attnloom.backends.triton import configs
from attnloom.backends.triton.again import ForwardAgain, Starter, with_aliases
from attnloom.backends.triton.choice import R, choose, keep
from attnloom.backends.triton.fields import Tensors, launch_key, num_tries

Key = tuple[object, ...]


def run(
    call: AttentionCall,
    want_max_scores: bool,
    memory: dict[Key, R],
    tiles: Callable[[AttentionCall], tuple[configs.Tile, ...]],
    prepare: Callable[[AttentionCall, Tensors, configs.Tile], R],
    launch: Callable[[R, AttentionCall, Tensors], None],
    key_of: Callable[[AttentionCall, Tensors], Key] = launch_key,
) -> ForwardResult:
    """Launch with what was prepared for such a call, or is now. No tensor is empty.

    Args:
        tiles: to try, best first. prepare: makes a launch of a tile.
        launch: starts one, any number of times with the same outcome.
        key_of: equal for calls that one launch serves.
    """
    tensors = Tensors.of(call, want_max_scores)
    key = key_of(call, tensors)
    ready = memory.get(key)
    if ready is not None:
        launch(ready, call, tensors)
        return tensors.result()
    chosen = choose(
        tiles(call),
        lambda tile: prepare(call, tensors, tile),
        lambda ready: launch(ready, call, tensors),
        configs.FEW_SPILLS,
        num_tries(call),
    )
    keep(memory, key, chosen)
    return tensors.result()


def again(
    call: AttentionCall,
    want_max_scores: bool,
    memory: dict[Key, R],
    restart: Callable[[R, AttentionCall, Tensors, list[torch.Tensor]], Starter | None],
) -> ForwardAgain | None:
    """See `registry.Backend`; None for calls that did not run here and inputs that kernels are
    given copies of.

    Args:
        restart: what starts a launch again, given what `with_aliases` makes of the call; None
            where launches are Triton's.
    """
    tensors = Tensors.of(call, want_max_scores)
    ready = memory.get(launch_key(call, tensors))
    found = with_aliases(call, tensors)
    if ready is None or found is None:
        return None
    start = restart(ready, *found)
    return None if start is None else ForwardAgain(call, tensors, start)
