"""Where programs of a launch draw the numbers of tiles from."""

from __future__ import annotations

import torch

_counters: dict[tuple[int, int], torch.Tensor] = {}


def counter_of(device: torch.device, stream: int | None = None) -> torch.Tensor:
    """One int32, zero between launches, for the launches of a stream: the current one, whose handle
    need not be asked for again."""
    if torch.cuda.is_current_stream_capturing():
        # replays may run beside each other
        return torch.zeros(1, dtype=torch.int32, device=device)
    index = device.index or 0
    if stream is None:
        stream = torch._C._cuda_getCurrentRawStream(index)
    key = index, stream
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return found
