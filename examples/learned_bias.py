"""Learn a bias by head and distance from examples of what attention with that bias returns.

A teacher attends with a hidden table of biases; a student starts from zeros, sees the teacher's
outputs on random inputs, and recovers the table by gradient descent. The gradient of the table
comes out of the fused backward kernel, summed over every score that read an entry. A constant added
to a head's row cancels in the softmax, so tables are compared after taking out each row's mean.

    python examples/learned_bias.py            1,024 tokens, 300 steps
    python examples/learned_bias.py --short    128 tokens, 48 steps
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from attnloom import create_block_mask, flex_attention
from attnloom.mods import relative_bias, sliding_window

HEADS, HEAD_DIM, REACH = 4, 16, 16


def hidden_table() -> torch.Tensor:
    """[HEADS, 2 * REACH + 1]: a wave, a slope, a step and one loved distance."""
    distance = torch.arange(-REACH, REACH + 1.0)
    loved = 3.0 * (distance == 5)
    return torch.stack([torch.sin(distance / 2), -distance / 8, 1.5 * (distance > 8), loved])


def centred(table: torch.Tensor) -> torch.Tensor:
    """The distances that a causal window reads, without each head's mean."""
    seen = table.detach()[:, REACH:]
    return seen - seen.mean(-1, keepdim=True)


def main(argv: list[str] | None = None) -> list[float]:
    """Print the distance from the hidden table as it shrinks; that distance at each report."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="fewer tokens and steps")
    parser.add_argument("--pictures", type=Path, help="folder for pictures (needs matplotlib)")
    args = parser.parse_args(argv)
    length, steps = (128, 48) if args.short else (1024, 300)
    mask_mod = sliding_window(window_left=REACH)
    block_mask = create_block_mask(mask_mod, None, None, length, length)
    teacher = hidden_table()
    student = torch.zeros_like(teacher, requires_grad=True)
    optimiser = torch.optim.Adam([student], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(0)
    reports = []
    for step in range(steps + 1):
        wrong = float((centred(student) - centred(teacher)).abs().max())
        if step % (steps // 6) == 0:
            reports.append(wrong)
            print(f"step {step:>4}: the farthest entry is {wrong:.4f} from the hidden table")
        if step == steps:
            break
        query, key, value = torch.randn(3, 1, HEADS, length, HEAD_DIM, generator=generator)
        with torch.no_grad():
            wanted = flex_attention(query, key, value, relative_bias(teacher), block_mask)
        out = flex_attention(query, key, value, relative_bias(student), block_mask)
        loss = (out - wanted).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    if args.pictures:
        from attnloom.plots import plot_scores

        args.pictures.mkdir(parents=True, exist_ok=True)
        for name, table in (("hidden", teacher), ("learned", student)):
            figure = plot_scores(relative_bias(table), mask_mod, q_len=48, title=f"{name} bias")
            figure.savefig(args.pictures / f"learned_bias_{name}.png", dpi=120)
            print(f"wrote {args.pictures / f'learned_bias_{name}.png'}")
    return reports


if __name__ == "__main__":
    main()
