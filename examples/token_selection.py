"""Look closely where a low-resolution attention map says so, and from afar everywhere else.

A photograph is cut into patches, thousands of tokens. Pooled over 4 x 4 patches there are 16 times
fewer, whose attention is cheap and shows where to look. Each block of queries then attends to the
patches of the blocks that score highest there, and to the pooled token of every other block, which
stands for its 16 patches (log 16 is added to its score). Both are keys of one call: a mask_mod says
which resolution a block of queries sees of each block, a score_mod adds the logarithm.

Reported are the error and the time beside dense attention, for three ways to choose: by the pooled
query's score with a block's best patch, with its mean, and by chance. The mean does worse than
chance where few blocks are chosen: it loves blocks that are alike all over, which need no closer
look. No model is trained: queries and keys are the patches themselves.

    python examples/token_selection.py            64 x 64 patches, 4,096 tokens
    python examples/token_selection.py --short    32 x 32 patches

Needs scikit-image for the photograph. Choosing blocks by pooled keys: Lu et al. 2025 (MoBA),
arXiv:2502.13189; the coarse rest beside it: Yuan et al. 2025 (NSA), arXiv:2502.11089.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from skimage import data
from torch import Tensor

from attnloom import BlockMask, create_block_mask, flex_attention
from attnloom.mods import tiled_order

PATCH, POOL, SHARPNESS = 4, 4, 24.0
BLOCK = POOL * POOL


@dataclass(frozen=True)
class Selection:
    """One way to choose blocks. keys: share of the patches that a query sees. error: of the output,
    root mean square, over the spread of dense attention's output."""

    name: str
    keys: float
    error: float
    seconds: float


def patch_tokens(side: int) -> tuple[Tensor, Tensor]:
    """Features and colours of side x side patches: [1, 1, tokens, D] each, D 48 and 3, in an order
    in which each POOL x POOL group lies side by side."""
    picture = torch.from_numpy(data.astronaut()).float() / 255
    size = side * PATCH
    left = min(100, 512 - 2 * size)
    image = picture[: 2 * size : 2, left : left + 2 * size : 2].permute(2, 0, 1)[None]
    features = torch.nn.functional.unfold(image, PATCH, stride=PATCH)[0].T
    colours = features.view(side * side, 3, -1).mean(-1)
    features = torch.nn.functional.normalize(features - features.mean(0), dim=-1)
    order = tiled_order((side, side), POOL)
    return order.permute(features)[None, None], order.permute(colours)[None, None]


def pool(x: Tensor) -> Tensor:
    """[1, 1, tokens, D] -> [1, 1, blocks, D]: the mean of each block."""
    return x.unflatten(2, (-1, BLOCK)).mean(3)


def two_resolutions(close: Tensor) -> BlockMask:
    """Keys are patches, then one pooled token for each block.

    close: [blocks, blocks] bool: which blocks of keys a block of queries sees patch by patch.
    """
    blocks = close.shape[0]
    tokens = blocks * BLOCK

    def mask_mod(b, h, q_idx, kv_idx):
        row = q_idx // BLOCK
        patch = close[row, (kv_idx // BLOCK).clamp(max=blocks - 1)]
        pooled = close[row, (kv_idx - tokens).clamp(min=0)]
        return torch.where(kv_idx < tokens, patch, ~pooled)

    return create_block_mask(mask_mod, None, None, tokens, tokens + blocks, BLOCK_SIZE=BLOCK)


def attend(features: Tensor, colours: Tensor, block_mask: BlockMask) -> Tensor:
    """Attention to patches and pooled tokens at once."""
    tokens = features.shape[2]
    keys = torch.cat([features, pool(features)], 2)
    values = torch.cat([colours, pool(colours)], 2)

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx < tokens, score, score + math.log(BLOCK))

    return flex_attention(
        features, keys, values, score_mod, block_mask=block_mask, scale=SHARPNESS
    )  # fmt: skip


def best_blocks(scores: Tensor, k: int) -> Tensor:
    """[blocks, blocks] bool: the k highest of each row."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(k).indices, True)


@torch.no_grad()
def main(argv: list[str] | None = None) -> list[Selection]:
    """Print a table of selections."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="fewer patches")
    args = parser.parse_args(argv)
    side = 32 if args.short else 64
    features, colours = patch_tokens(side)
    by_patch = pool(features)[0, 0] @ features[0, 0].T  # [blocks, patches]
    by_block = by_patch.unflatten(1, (-1, BLOCK))
    blocks = by_block.shape[0]
    ways = {
        "best patch": by_block.amax(-1),
        "mean": by_block.mean(-1),
        "chance": torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)),
    }
    dense_seconds, dense = _timed(
        lambda: flex_attention(features, features, colours, scale=SHARPNESS)
    )
    spread = (dense - dense.mean(2, keepdim=True)).norm()
    print(f"{side} x {side} patches; dense attention takes {dense_seconds * 1e3:.1f} ms")
    print(f"{'blocks chosen by':<18} {'keys':>6} {'error':>8} {'ms':>7}")
    found = []
    for k in (blocks // 32, blocks // 16, blocks // 8, blocks // 4):
        for name, scores in ways.items():
            block_mask = two_resolutions(best_blocks(scores, k))
            seconds, out = _timed(lambda mask=block_mask: attend(features, colours, mask))
            error = float((out - dense).norm() / spread)
            found.append(Selection(name, k / blocks, error, seconds))
            print(f"{name:<18} {k / blocks:>6.1%} {error:>8.2%} {seconds * 1e3:>7.1f}")
    return found


def _timed(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    run()  # compiles
    start = time.perf_counter()
    out = run()
    return time.perf_counter() - start, out


if __name__ == "__main__":
    main()
