"""Window, global and random blocks."""

from __future__ import annotations

import torch

from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_odd, read_size
from attnloom.mods.block_table import block_table_mod


def bigbird(
    seq_len: int,
    block_size: int = 64,
    *,
    num_random: int = 3,
    num_window: int = 3,
    num_global: int = 2,
    num_heads: int = 1,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> MaskMod:
    """Each block of queries sees a window of blocks, the global blocks, and random ones.

    Args:
        seq_len: tokens, 1 or more.
        block_size: tokens of a block, 1 or more.
        num_random: random blocks for each block of queries, drawn from those not seen yet (fewer
            where fewer are left).
        num_window: blocks of the window, odd: the query's own and as many on each side.
        num_global: first blocks, which see everything and which everything sees.
        num_heads: heads that draw random blocks of their own; 1 for one pattern in all heads.
        seed: of the random blocks.
        device: of the table; default: torch's.
    Returns:
        mask_mod capturing a table of blocks [num_heads, blocks, blocks] bool.
    Raises:
        ModError: an argument is too small, or num_window is even.
    Source: Zaheer et al. 2020, arXiv:2007.14062, sec. 2; in blocks, as the authors'
        code.
    """
    name = "bigbird"
    block_size = read_size(name, "block_size", block_size, 1)
    num_blocks = -(-read_size(name, "seq_len", seq_len, 1) // block_size)
    reach = read_odd(name, "num_window", num_window) // 2
    num_global = read_size(name, "num_global", num_global)
    num_random = min(read_size(name, "num_random", num_random), num_blocks)
    heads = read_size(name, "num_heads", num_heads, 1)

    # On the CPU, where the generator is, whatever torch's default device.
    place = torch.arange(num_blocks, device="cpu")
    live = (place[:, None] - place).abs() <= reach
    live |= (place < num_global) | (place < num_global)[:, None]
    live = live.expand(heads, -1, -1).clone()
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(live.shape, generator=generator, device="cpu")
    order = draw.masked_fill(live, -1.0)
    chosen = order.topk(num_random, dim=-1)
    live.scatter_(-1, chosen.indices, live.gather(-1, chosen.indices) | (chosen.values >= 0))
    return block_table_mod(name, live.to(torch.empty(0, device=device).device), block_size)
