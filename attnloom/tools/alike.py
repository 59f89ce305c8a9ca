"""Which batch entries and heads of a mask have the same live tiles, and how that is said."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from attnloom.masking.lists import BlockLists


def alike(lists: BlockLists, sizes: tuple[int, int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Batch entries and heads, in groups that have the same live tiles."""
    rows = lists.grid.num_q_blocks
    offsets, entries = lists.row_offsets.cpu().numpy(), lists.entries.cpu().numpy()
    groups: dict[bytes, list[tuple[int, int]]] = {}
    for b, h in itertools.product(*map(range, sizes)):
        # Lists that are equal over batch entries or heads are stored once.
        entry = min(b, lists.num_batches - 1) * lists.num_heads + min(h, lists.num_heads - 1)
        part = offsets[entry * rows : (entry + 1) * rows + 1]
        digest = hashlib.blake2b(np.diff(part).tobytes(), digest_size=16)
        digest.update(entries[part[0] : part[-1]].tobytes())
        groups.setdefault(digest.digest(), []).append((b, h))
    return tuple(map(tuple, groups.values()))


def pairs_text(pairs: Sequence[tuple[int, int]]) -> str:
    """Batch entries and heads in words: "batch 0, heads 0-2, 5"."""
    by_batch: dict[int, list[int]] = {}
    for b, h in pairs:
        by_batch.setdefault(b, []).append(h)
    heads_of: dict[tuple[int, ...], list[int]] = {}
    for b, heads in by_batch.items():
        heads_of.setdefault(tuple(heads), []).append(b)
    return "; ".join(
        f"batch {ranges_text(batches)}, {'head' if len(heads) == 1 else 'heads'} "
        f"{ranges_text(heads)}"
        for heads, batches in heads_of.items()
    )


def ranges_text(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs of three and more as "2-5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(texts)
