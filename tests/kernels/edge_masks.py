"""Masks with edges (ir/passes/edges.py), named and random; what they capture reaches as far as
integers do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

LENGTH = 2048
FAR = 2**31 - 1
BATCHES = torch.tensor([130, 500], dtype=torch.int32)
PREFIX = BATCHES.long()
HUGE = torch.tensor([2**62, -(2**62)])  # sums with it wrap
LIMITS = torch.tensor([-(2**63), 2**63 - 1])
WORDS = torch.tensor([-(2**31), FAR], dtype=torch.int32)
BYTES = torch.tensor([200, 7], dtype=torch.uint8)
ENDS = (torch.arange(LENGTH) // 100 + 1) * 100  # of the documents of queries
FAR_ENDS = torch.where(ENDS % 200 == 0, ENDS, 2**40)
DOCUMENTS = (torch.arange(LENGTH) // 100).to(torch.int32)
GLOBAL = torch.arange(LENGTH) % 37 == 0
Mask = Callable[..., Any]

NAMED: dict[str, Mask] = {
    "causal": lambda b, h, q, kv: q >= kv,
    "strictly": lambda b, h, q, kv: kv < q,
    "not later": lambda b, h, q, kv: ~(kv > q),
    "neither": lambda b, h, q, kv: ~((kv < 20) | (kv < q - 9)),
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 70),
    "both sides": lambda b, h, q, kv: (q - kv <= 30) & (kv - q <= 20),
    "diagonal": lambda b, h, q, kv: q == kv,
    "no diagonal": lambda b, h, q, kv: (q != kv) & (kv + 3 != q),
    "sinks": lambda b, h, q, kv: (q >= kv) & ((q - kv < 40) | (kv < 4)),
    "prefix": lambda b, h, q, kv: (kv < PREFIX[b]) | (q >= kv),
    "prefix, 32 bits": lambda b, h, q, kv: (kv < BATCHES[b]) | (q >= kv),
    "bytes": lambda b, h, q, kv: (kv < BYTES[b]) | (q >= kv),
    "lengths": lambda b, h, q, kv: kv < PREFIX[b],
    "lengths of both": lambda b, h, q, kv: (kv < PREFIX[b]) & (q < PREFIX[b]),
    "ends of queries": lambda b, h, q, kv: (kv < ENDS[q]) & (kv >= ENDS[q] - 100),
    "far ends": lambda b, h, q, kv: (kv < FAR_ENDS[q]) & (kv + 30 >= q),
    "documents": lambda b, h, q, kv: (DOCUMENTS[q] == DOCUMENTS[kv]) & (q >= kv),
    "documents, sinks": lambda b, h, q, kv: (DOCUMENTS[q] == DOCUMENTS[kv]) | (kv < 3),
    "global": lambda b, h, q, kv: GLOBAL[kv] | GLOBAL[q] | (abs(q - kv) < 9),
    "slanted": lambda b, h, q, kv: (2 * q - kv > 100) & (kv - 3 * q < h),
    "negative": lambda b, h, q, kv: (-kv >= -q - 5) & (kv >= -7) & (q - kv > -40),
    "dilated": lambda b, h, q, kv: (q >= kv) & ((q - kv) % 3 == 0),
    "either": lambda b, h, q, kv: (q < 50) ^ (kv <= q),
    "far": lambda b, h, q, kv: (q - kv < FAR) & (kv - q <= -FAR) | (kv < h + 9),
    "far behind": lambda b, h, q, kv: q - kv >= -FAR - 1,
    "huge": lambda b, h, q, kv: q + HUGE[b] >= kv,
    "huge, wraps": lambda b, h, q, kv: q + HUGE[b] * 2 + HUGE[b] < kv,
    "limits": lambda b, h, q, kv: (kv > LIMITS[b]) & (q >= kv),
    "limits, wraps": lambda b, h, q, kv: kv + LIMITS[b] < 0,
    "limits, negated": lambda b, h, q, kv: -kv < LIMITS[b],
    "words": lambda b, h, q, kv: (kv <= WORDS[b]) | (kv == q),
    "words, two": lambda b, h, q, kv: kv + WORDS[b] <= q + WORDS[1 - b],
    "words that wrap": lambda b, h, q, kv: kv.to(torch.int32) + WORDS[b] < q.to(torch.int32),
    "bytes that wrap": lambda b, h, q, kv: kv.to(torch.uint8) <= q.to(torch.uint8),
    "always": lambda b, h, q, kv: (kv - kv == 0) | GLOBAL[q],
}  # fmt: skip


def random_mask(seed: int) -> Mask:
    """A tree of comparisons, most of them with edges."""
    draw = random.Random(seed)

    def side(depth: int = 2) -> str:
        leaves = ["q", "kv", "kv", "h", "PREFIX[b]", "BATCHES[b]", "ENDS[q]"]
        leaves += [str(draw.choice([0, 1, 3, 64, -5, 700])), "DOCUMENTS[kv]", "ENDS[kv]"]
        leaves += ["HUGE[b]", "LIMITS[b]"] if draw.random() < 0.15 else []
        if depth == 0 or draw.random() < 0.3:
            return draw.choice(leaves)
        a, b = side(depth - 1), side(depth - 1)
        factor = draw.choice([-1, 2, 3])
        return draw.choice([f"({a} + {b})", f"({a} - {b})", f"(-{a})", f"({factor} * {a})"])

    def tree(depth: int) -> str:
        if depth == 0 or draw.random() < 0.2:
            op = draw.choice(["<", "<=", ">", ">=", "==", "!="])
            found = f"({side()} {op} {side()})"
            return found if draw.random() < 0.9 else draw.choice(["GLOBAL[q]", "GLOBAL[kv]"])
        a, b = tree(depth - 1), tree(depth - 1)
        return draw.choice(
            [f"({a} & {b})"] * 3 + [f"({a} | {b})"] * 3 + [f"({a} ^ {b})", f"(~{a})"]
        )

    text = tree(3)
    while "kv" not in text or "q" not in text.replace("kv", ""):
        text = tree(3)
    mask = eval(f"lambda b, h, q, kv: {text}", globals())
    mask.__doc__ = text
    return mask
