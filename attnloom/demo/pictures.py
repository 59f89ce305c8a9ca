"""Pictures of a run: the block map, the scores under the mod, the loss curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import colors
from matplotlib import pyplot as plt

from attnloom.demo.model import Decoder, Layer
from attnloom.demo.train import Step

_TILE_COLOURS = ("#f2f2f2", "#8fb8de", "#1f4e79")
_TILE_NAMES = ("empty: never computed", "partial: mask evaluated", "full: no mask code")
_SMOOTHING = 0.9


def draw_block_map(block_mask, path: Path) -> None:
    """One square a tile of the first row of the batch, by kind."""
    partial = _tile_grid(block_mask.kv_num_blocks, block_mask.kv_indices)
    kinds = partial.int()
    if block_mask.full_kv_num_blocks is not None:
        kinds = kinds + 2 * _tile_grid(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    figure, axes = plt.subplots(figsize=(6, 6.4))
    palette = colors.ListedColormap(_TILE_COLOURS)
    axes.imshow(kinds.numpy(), cmap=palette, vmin=-0.5, vmax=2.5)
    axes.set_xticks(torch.arange(kinds.shape[1] + 1).numpy() - 0.5, minor=True)
    axes.set_yticks(torch.arange(kinds.shape[0] + 1).numpy() - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="key block", ylabel="query block", title="Tiles of one packed row")
    marks = [
        plt.Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="#888888", linewidth=0.5)
        for colour in _TILE_COLOURS
    ]
    axes.legend(
        marks, _TILE_NAMES, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, fontsize=8
    )
    _save(figure, path)


def _tile_grid(num_blocks: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[q_blocks, kv_blocks] bool of the first batch entry and head."""
    counts, listed = num_blocks[0, 0].cpu(), indices[0, 0].cpu().long()
    live = torch.arange(listed.shape[-1]) < counts[:, None]
    grid = torch.zeros(listed.shape, dtype=torch.bool)
    rows = torch.arange(listed.shape[0])[:, None].expand_as(listed)
    grid[rows[live], listed[live]] = True
    return grid


def draw_scores(decoder: Decoder, documents: torch.Tensor, path: Path, length: int = 320) -> None:
    """Scores of random unit queries and keys before and after the mods, and the learned biases.

    documents: [B, S]; the first `length` tokens of the first row are drawn, head 0 of layer 0.
    """
    variant = decoder.config.variant
    layer = decoder.layers[0]
    assert isinstance(layer, Layer)
    bias = layer.bias.detach()
    head_dim = decoder.config.width // decoder.config.num_heads
    length = min(length, documents.shape[1])
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, length, head_dim, generator=generator)
    raw = query @ key.T / head_dim**0.5
    position = torch.arange(length)
    index = (0, 0, position[:, None], position)
    modified = variant.score_mod(bias)(raw, *index)
    kept = variant.mask_mod(documents)(*index)
    modified = modified.masked_fill(~kept, float("nan"))
    figure, (before, after, curves) = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    for axes, scores, title in (
        (before, raw, "scores, random queries and keys"),
        (after, modified, "the same under the mask and the trained mod"),
    ):
        shown = axes.imshow(scores.numpy(), cmap="viridis")
        axes.set(title=title, xlabel="kv_idx", ylabel="q_idx")
        figure.colorbar(shown, ax=axes, shrink=0.8)
    for head, row in enumerate(bias):
        curves.plot(row.numpy(), label=f"head {head}")
    curves.set(title="learned bias, layer 0", xlabel="q_idx - kv_idx", ylabel="added to the score")
    curves.legend()
    _save(figure, path)


def draw_loss(steps: Sequence[Step], path: Path) -> None:
    """Loss by step, raw and smoothed."""
    figure, axes = plt.subplots(figsize=(8, 4.5))
    indices = [step.index for step in steps]
    axes.plot(indices, [step.loss for step in steps], color="#c5d8ea", label="each step")
    axes.plot(indices, smoothed_losses(steps), color="#1f4e79", label="smoothed")
    axes.set(xlabel="step", ylabel="nats a byte", title="Training loss")
    axes.legend()
    axes.grid(alpha=0.3)
    _save(figure, path)


def smoothed_losses(steps: Sequence[Step]) -> list[float]:
    """Exponential mean over about ten steps, without a bias towards the start."""
    total = weight = 0.0
    out = []
    for step in steps:
        total = _SMOOTHING * total + (1 - _SMOOTHING) * step.loss
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        out.append(total / weight)
    return out


def _save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
