"""Denoise a photograph by attention: a pixel looks at its neighbourhood for patches like its own.

This is non-local means written as attention. A query is the 5 x 5 patch around a pixel, a key the
patch around another, a value that pixel; the weight exp(-|p_i - p_j|^2 / h^2) is a softmax of
(2 p_i . p_j - |p_j|^2) / h^2, so the second part is a score_mod that reads one number a key. The
mask is neighbourhood attention. What changes from run to run is only the order in which pixels lie
in the sequence: row by row, in tiles, or along the Morton curve. The result is the same; the number
of tiles that have to be computed is not.

    python examples/neighborhood_image.py            128 x 128 pixels, kernel 13
    python examples/neighborhood_image.py --short    64 x 64 pixels, kernel 9

Needs scikit-image for the photograph. Method: Buades et al. 2005 (non-local means); orders:
arXiv:2412.05496, appendix A.1.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from skimage import data

from attnloom import create_block_mask, explain, flex_attention
from attnloom.mods import TokenOrder, morton_order, neighborhood, tiled_order

PATCH = 5
NOISE = 0.1
STRENGTH = 0.75  # h^2 over the expected |p_i - p_j|^2 of two noisy copies of one patch
BLOCK = 64


@dataclass(frozen=True)
class Run:
    """One order of the pixels. image: denoised, in row-major order again."""

    order: str
    full: int
    partial: int
    tiles: int
    seconds: float
    image: torch.Tensor


def photograph(side: int) -> torch.Tensor:
    """[side, side] float32 in 0 .. 1: the face of the photographer's picture."""
    picture = torch.from_numpy(data.camera()).float() / 255
    return picture[60 : 60 + side, 180 : 180 + side].contiguous()


def patches(image: torch.Tensor) -> torch.Tensor:
    """[pixels, PATCH * PATCH]: the patch around each pixel, mirrored at the borders."""
    edge = PATCH // 2
    padded = torch.nn.functional.pad(image[None, None], (edge,) * 4, mode="reflect")
    return torch.nn.functional.unfold(padded, PATCH)[0].T.contiguous()


def denoise(noisy: torch.Tensor, kernel: int, order: TokenOrder | None, name: str) -> Run:
    """Non-local means within a kernel around each pixel."""
    size = noisy.shape[0]
    features, pixels = patches(noisy), noisy.flatten()[:, None]
    if order is not None:
        features, pixels = order.permute(features), order.permute(pixels)
    strength = STRENGTH * 2 * NOISE**2 * PATCH**2
    energy = (features**2).sum(-1) / strength

    def without_energy(score, b, h, q_idx, kv_idx):
        return score - energy[kv_idx]

    mask_mod = neighborhood((size, size), kernel, order=order)
    tokens = size * size
    block_mask = create_block_mask(mask_mod, None, None, tokens, tokens, BLOCK_SIZE=BLOCK)
    query, value = features[None, None], pixels[None, None]

    def attend() -> torch.Tensor:
        return flex_attention(
            query, query, value, without_energy, block_mask=block_mask, scale=2 / strength
        )

    attend()  # compiles
    start = time.perf_counter()
    out = attend()[0, 0]
    seconds = time.perf_counter() - start
    if order is not None:
        out = order.restore(out)
    found = explain(mask_mod=mask_mod, q_len=tokens, block_size=BLOCK, measure=False).mask
    assert found is not None, "a mask_mod was given"
    image = out.view(size, size)
    return Run(name, found.num_full, found.num_partial, found.num_tiles, seconds, image)


def psnr(image: torch.Tensor, truth: torch.Tensor) -> float:
    """Peak signal to noise ratio in dB."""
    return float(-10 * torch.log10((image - truth).square().mean()))


def main(argv: list[str] | None = None) -> tuple[list[Run], float, float]:
    """Print a table of orders; the runs, and the PSNR before and after."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a smaller picture")
    parser.add_argument("--pictures", type=Path, help="folder for pictures (needs matplotlib)")
    args = parser.parse_args(argv)
    side, kernel = (64, 9) if args.short else (128, 13)
    truth = photograph(side)
    noisy = truth + NOISE * torch.randn(truth.shape, generator=torch.Generator().manual_seed(0))
    tile = math.isqrt(BLOCK)
    orders: dict[str, TokenOrder | None] = {
        "row by row": None,
        f"tiles of {tile} x {tile}": tiled_order((side, side), tile),
        "Morton curve": morton_order((side, side)),
    }
    runs = [denoise(noisy, kernel, order, name) for name, order in orders.items()]
    print(f"{side} x {side} pixels, kernel {kernel} x {kernel}, blocks of {BLOCK}")
    print(f"{'order':<18} {'full':>6} {'partial':>8} {'of tiles':>9} {'live':>7} {'seconds':>8}")
    for run in runs:
        live = (run.full + run.partial) / run.tiles
        print(
            f"{run.order:<18} {run.full:>6} {run.partial:>8} {run.tiles:>9} {live:>7.2%} "
            f"{run.seconds:>8.3f}"
        )
    before, after = psnr(noisy, truth), psnr(runs[0].image, truth)
    print(f"PSNR {before:.1f} dB with noise, {after:.1f} dB denoised")
    if args.pictures:
        _draw(args.pictures, [truth, noisy, runs[0].image])
    return runs, before, after


def _draw(folder: Path, images: list[torch.Tensor]) -> None:
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9, 3.3), layout="constrained")
    titles = ("photograph", "with noise", "denoised")
    for axes, image, title in zip(figure.subplots(1, 3), images, titles, strict=True):
        axes.imshow(image.numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set(title=title, xticks=[], yticks=[])
    figure.savefig(folder / "neighborhood_image.png", dpi=120)
    print(f"wrote {folder / 'neighborhood_image.png'}")


if __name__ == "__main__":
    main()
