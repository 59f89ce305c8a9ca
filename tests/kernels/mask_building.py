"""Masks for the mask kernels, one or more for each rule of interval_math.py, and their check."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnloom.backends.triton import mask_lists
from attnloom.masking.captures import map_captures
from attnloom.masking.classify import classify
from attnloom.masking.lists import BlockLists, TileGrid
from attnloom.trace.tracer import trace_mask
from tests.masks.mods import MaskMod, Sizes, drawn

CPU = torch.device("cpu")


def check_lists(
    mod: MaskMod, grid: TileGrid, device: torch.device, separate_full: bool = True
) -> BlockLists:
    """The kernels' lists are those of `classify` on the CPU, bit for bit; returns them."""
    expected = classify(trace_mask(mod, CPU), grid, CPU, separate_full)
    there = map_captures(mod, torch.Tensor, lambda t: t.to(device), with_globals=True)
    with torch.no_grad():
        found = mask_lists.build(trace_mask(there, device), grid, device, separate_full)
    assert found is not None
    assert found.grid == expected.grid
    assert found.row_offsets.dtype is torch.int64
    assert found.entries.dtype is torch.int32
    assert found.entries.device == found.row_offsets.device
    assert torch.equal(found.row_offsets.cpu(), expected.row_offsets)
    assert torch.equal(found.entries.cpu(), expected.entries)
    return found


def grid_of(s: Sizes, block: int | tuple[int, int]) -> TileGrid:
    pair = block if isinstance(block, tuple) else (block, block)
    return TileGrid(s.B, s.H, s.Q, s.KV, *pair)


def _ids(count: int, dtype: torch.dtype, seed: int, low: int = 0) -> torch.Tensor:
    """128 integers, constant over runs of 32, so that tiles differ in kind."""
    runs = torch.randint(low, low + count, (4,), generator=drawn(seed))
    return runs.repeat_interleave(32).to(dtype)


BYTES = _ids(256, torch.uint8, 1)
SHORTS = _ids(40000, torch.int16, 2, -20000)
WORDS = _ids(2**32 - 1, torch.int32, 3, -(2**31))
HUGE = torch.tensor([2**62, -(2**62), 2**63 - 1, 5]).repeat_interleave(32)
STEPS = torch.arange(128) // 24
REALS = torch.linspace(-2, 3, 128)
DOUBLES = REALS.double() * 1.7
HALVES = torch.linspace(-2, 2, 128).half()
HOLES = torch.where(torch.arange(128) % 50 == 7, torch.nan, REALS)
ENDLESS = torch.tensor([torch.inf, 1.0, -torch.inf, -4.0]).repeat_interleave(32)
FLAGS = torch.tensor([True, False, False, True]).repeat_interleave(32)
TABLE = torch.rand(8, 8, generator=drawn(4)) < 0.5
LEVELS = torch.randint(-3, 4, (8, 8), generator=drawn(5), dtype=torch.int8)
WEIGHTS = torch.randn(8, 8, generator=drawn(6))
WEIGHTS[2, 1] = torch.nan
DIVISORS = torch.tensor([0, 3, -4, 7])
STARTS = torch.tensor([0, 30, 61])
NOTHING = torch.zeros(0, dtype=torch.int64)

RULES: dict[str, MaskMod] = {
    "add": lambda b, h, q, kv: q + kv < 60,
    "sub": lambda b, h, q, kv: (q - kv > -3) & (kv - q > -20),
    "mul": lambda b, h, q, kv: (q - 20) * (kv - 30) > 50,
    "neg": lambda b, h, q, kv: -(q + kv) < -40,
    "abs": lambda b, h, q, kv: (q - kv).abs() <= 9,
    "min max": lambda b, h, q, kv: torch.minimum(q, kv) * 2 >= torch.maximum(q, kv) - h,
    "clamp": lambda b, h, q, kv: (q - kv).clamp(-5, 5) == 5,
    "floordiv": lambda b, h, q, kv: (q - kv) // 7 == 1,
    "floordiv by a negative": lambda b, h, q, kv: (q - kv) // -7 >= 2,
    "floordiv by a captured number": lambda b, h, q, kv: (q - kv) // DIVISORS[h] == 0,
    "floordiv of positions": lambda b, h, q, kv: q // (kv + 1) == 2,
    "truncdiv": lambda b, h, q, kv: torch.div(q - kv, 7, rounding_mode="trunc") == 0,
    "mod": lambda b, h, q, kv: (q - kv) % 64 < 20,
    "mod by a negative": lambda b, h, q, kv: (q - kv) % -50 < -20,
    "mod by a captured number": lambda b, h, q, kv: (q - kv) % DIVISORS[h] == 0,
    "fmod": lambda b, h, q, kv: torch.fmod(q - kv, 64) > 5,
    "sign": lambda b, h, q, kv: torch.sign(q - kv) >= 0,
    "power": lambda b, h, q, kv: (q - kv) ** 2 < 200,
    "shifts": lambda b, h, q, kv: ((q - kv) >> 4 == 1) | ((q + kv) << 3 < 90),
    "low bits": lambda b, h, q, kv: ((q - kv) & 63) < 20,
    "bits": lambda b, h, q, kv: (((q + kv) & (q + 32)) < 20) | ((q | kv) > 70) | ((q ^ kv) == 0),
    "not": lambda b, h, q, kv: ~((q >= kv) | (kv > 40)),
    "xor": lambda b, h, q, kv: (q >= kv) ^ (q + kv < 50),
    "equal truths": lambda b, h, q, kv: ((q >= kv) == (q > 20)) & ((q < kv + 9) != (kv > 99)),
    "ne": lambda b, h, q, kv: (q - kv).clamp(0, 8) != 8,
    "where": lambda b, h, q, kv: torch.where(q > kv, q + kv, q - kv) > 10,
    "where of truths": lambda b, h, q, kv: torch.where(q + kv > 50, q >= kv, kv > 20),
    "where of floats": lambda b, h, q, kv: torch.where(q > kv, REALS[q], REALS[kv] * 0.5) > 0.3,
    "cast to bool": lambda b, h, q, kv: (q - kv).clamp(0, 3).bool(),
    "cast of a bool": lambda b, h, q, kv: (q >= kv).int() + (kv > 30).long() >= 1,
    "float of integers": lambda b, h, q, kv: (q - kv).float() * 0.3 + 1.5 > -(q + kv).float(),
    "float quotient": lambda b, h, q, kv: (q - kv) / (kv + 1) > 0.51,
    "float to integer": lambda b, h, q, kv: ((q - kv) * 0.26).int() == 2,
    "floor and ceil": lambda b, h, q, kv: torch.floor((q - kv) * 0.26) + torch.ceil(q * 0.3) > 4,
    "float distance": lambda b, h, q, kv: (REALS[q] - REALS[kv]).abs() < 0.71,
    "float extremes": lambda b, h, q, kv: torch.maximum(REALS[q], -REALS[kv]) < 1.1,
    "doubles": lambda b, h, q, kv: DOUBLES[q] * DOUBLES[kv] >= 0.301,
    "halves": lambda b, h, q, kv: HALVES[q] + HALVES[kv] > 0.3,
    "function of one side": lambda b, h, q, kv: torch.exp(REALS[q]) > torch.sin(REALS[kv]) + 0.51,
    "function of both": lambda b, h, q, kv: torch.tanh((q - kv) * 0.1) > 0.43,
    "NaN": lambda b, h, q, kv: HOLES[q] >= HOLES[kv],
    "NaN is unequal": lambda b, h, q, kv: HOLES[q] != HOLES[kv],
    "NaN in a minimum": lambda b, h, q, kv: ~(torch.minimum(HOLES[q], REALS[kv]) > -9.0),
    "infinite": lambda b, h, q, kv: ENDLESS[q] - ENDLESS[kv] > 1.0,
    "infinite product": lambda b, h, q, kv: ENDLESS[q] * (kv - 40) > 1.0,
    "wrapping bytes": lambda b, h, q, kv: BYTES[q] + BYTES[kv] > 100,
    "wrapping shorts": lambda b, h, q, kv: SHORTS[q] - SHORTS[kv] > 100,
    "wrapping words": lambda b, h, q, kv: WORDS[q] + WORDS[kv] > 100,
    "wrapping long": lambda b, h, q, kv: HUGE[q] + HUGE[kv] > 100,
    "wrapping product": lambda b, h, q, kv: HUGE[q] * (kv - 3) > 100,
    "magnitude of the least": lambda b, h, q, kv: (HUGE[q] - HUGE[kv]).abs() >= 0,
    "narrowing": lambda b, h, q, kv: (q * 5 - kv).to(torch.int8) > 20,
    "flags": lambda b, h, q, kv: FLAGS[q] & FLAGS[kv] | (STEPS[q] == STEPS[kv]),
    "one side alone": lambda b, h, q, kv: FLAGS[kv] & (kv != 70),
    "head alone": lambda b, h, q, kv: (h + b) % 2 == 0,
    "table of tiles": lambda b, h, q, kv: TABLE[q // 16, kv // 16],
    "levels of tiles": lambda b, h, q, kv: LEVELS[q // 16, -1 - kv // 16] + (q >= kv) > 0,
    "weights of tiles": lambda b, h, q, kv: WEIGHTS[q // 16, kv // 16] > -0.2,
    "index out of range": lambda b, h, q, kv: TABLE[q // 4, (q - kv) // 8],
    "empty table": lambda b, h, q, kv: (q >= kv) if NOTHING.numel() else (q < kv),
    "reduction": lambda b, h, q, kv: ((q >= STARTS) & (kv >= STARTS)).any(),
    "everything": lambda b, h, q, kv: q + kv >= 0,
    "no position": lambda b, h, q, kv: torch.ones_like(b, dtype=torch.bool),
    "nothing": lambda b, h, q, kv: (q - kv) * 2 > 10**6,
}


def numbers(width: int, share: float, stretch: int) -> MaskMod:
    """A mask with Python numbers, which reach kernels as arguments."""
    return lambda b, h, q, kv: (
        ((q - kv).abs() * stretch <= width) | (q * share > kv + 0.3) | (q + kv < width)
    )


def repeated(make: Callable[[int], MaskMod], grid: TileGrid, device: torch.device) -> None:
    """One kernel for several values of a number."""
    for value in (3, 17, 40):
        check_lists(make(value), grid, device)
