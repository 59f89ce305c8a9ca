"""Counters in memory that programs of a launch share: int32, zero before and after every launch."""

from __future__ import annotations

import torch

_LEAST = 1024  # counters of a stream

_kept: dict[tuple[int, int], torch.Tensor] = {}


def counters(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` zeros for a launch on the current stream.

    Launches of a stream follow each other, whichever threads make them, and share their counters.
    A launch that is captured gets its own, zeroed by the graph: replays may run beside each other,
    and beside what the stream runs by then.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index or 0
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    found = _kept.get(key)
    if found is None or found.numel() < count:
        size = max(_LEAST, 1 << (count - 1).bit_length())
        found = _kept[key] = torch.zeros(size, dtype=torch.int32, device=device)
    return found
