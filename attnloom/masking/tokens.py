"""Masks score by score: dense [B, H, Q_LEN, KV_LEN] tensors, made a bounded part at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram
from attnloom.masking.lists import BlockLists
from attnloom.masking.torch_layout import expand_batch
from attnloom.masking.views import MaskMod
from attnloom.trace.tracer import trace_mask

_CHUNK_LANES = 1 << 22


def evaluate(
    bound: BoundProgram,
    shape: tuple[int, int, int, int],
    device: torch.device,
    keep: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
) -> torch.Tensor:
    """A traced mod at every score, the score itself being 0.

    keep: turns the mod's value into bool.
    Returns: [B, H, Q_LEN, KV_LEN] bool.
    """
    B, H, Q_LEN, KV_LEN = shape
    out = torch.empty(shape, dtype=torch.bool, device=device)
    positions = [torch.arange(n, device=device) for n in shape]
    rows = max(1, _CHUNK_LANES // max(1, B * H * KV_LEN))
    for begin in range(0, Q_LEN, rows):
        q = positions[2][begin : begin + rows]
        inputs = {
            "b": positions[0][:, None, None, None],
            "h": positions[1][:, None, None],
            "q": q[:, None],
            "kv": positions[3],
            "score": torch.zeros((), device=device).expand(B, H, q.numel(), KV_LEN),
        }
        out[:, :, begin : begin + rows] = keep(interpret(bound, inputs)[0])
    return out


def mask_tokens(
    mask_mod: MaskMod, shape: tuple[int, int, int, int], device: torch.device
) -> torch.Tensor:
    """A mask_mod at every score: [B, H, Q_LEN, KV_LEN] bool."""
    with torch.no_grad():
        return evaluate(trace_mask(mask_mod, device), shape, device)


def within_lists(
    kept: torch.Tensor, lists: BlockLists, batch_dims: tuple[int, ...]
) -> torch.Tensor:
    """What a kernel keeps: all scores of full tiles, `kept` ones of partial tiles, no others.

    kept: [*batch_dims, Q_LEN, KV_LEN] bool. Returns the same shape.
    """
    grid = lists.grid
    code = torch.zeros(
        grid.num_rows, grid.num_kv_blocks, dtype=torch.int8, device=lists.entries.device
    )
    kinds = 2 - (lists.entries & 1).to(torch.int8)  # 1 partial, 2 full
    code[lists.entry_rows(), (lists.entries >> 1).to(torch.int64)] = kinds
    stored = (lists.num_batches, lists.num_heads, grid.num_q_blocks, grid.num_kv_blocks)
    code = expand_batch(code.view(stored), batch_dims, 2)
    rows = torch.arange(grid.q_len, device=code.device) // grid.q_block
    columns = torch.arange(grid.kv_len, device=code.device) // grid.kv_block
    code = code[..., rows, :][..., columns]
    return (code == 2) | ((code == 1) & kept)
