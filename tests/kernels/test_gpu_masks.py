"""Building block lists on a real GPU, against the CPU's; `pytest -m gpu`."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

import attnloom
from attnloom.backends.triton import lists, transposed
from attnloom.masking.classify import classify
from attnloom.masking.lists import TileGrid
from attnloom.trace.tracer import trace_mask
from tests.harness.draw import Draw
from tests.harness.draw import Sizes as Problem
from tests.harness.mods import MODS as VARIANTS
from tests.kernels.mask_building import RULES, check_lists, grid_of, numbers, repeated
from tests.masks.mods import (
    MODS,
    MaskMod,
    Sizes,
    causal_documents_by_batch,
    windows_by_head,
)
from tests.masks.test_classify import SHAPES
from tests.masks.test_fuzz import tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
LONG = 131072


def documents(length: int, device: torch.device = GPU) -> MaskMod:
    ids = torch.arange(length, device=device) * 12 // length
    return lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])


LONG_MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 1024),
    "documents": documents,
}


def long_mask(name: str) -> MaskMod:
    return documents(LONG) if name == "documents" else LONG_MASKS[name]


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    check_lists(RULES[name], grid_of(Sizes(2, 3, 120, 110), 16), GPU)


@pytest.mark.parametrize("make", MODS, ids=lambda m: m.__name__)
def test_usual_masks(make) -> None:
    for s, block in SHAPES[2:4]:
        check_lists(make(s), grid_of(s, block), GPU)


@pytest.mark.parametrize(("s", "block"), SHAPES, ids=str)
def test_shapes(s: Sizes, block) -> None:
    """One point to large tiles; kernels are compiled once for a pair of block sizes."""
    for make in (causal_documents_by_batch, windows_by_head):
        check_lists(make(s), grid_of(s, block), GPU)


@pytest.mark.parametrize("name", [n for n, m in VARIANTS.items() if m.mask_axes or "mask" in n])
def test_variants(name: str) -> None:
    sizes = Problem(B=2, Hq=4, Hkv=4, Q_LEN=700, KV_LEN=333)
    row = VARIANTS[name]
    mod = row.build(row.draw(sizes, Draw(0, torch.float32)), sizes)[1]
    if mod is not None:
        check_lists(mod, TileGrid(2, 4, 700, 333, 64, 16), GPU)


@pytest.mark.parametrize("part", range(6))
def test_random_masks(part: int) -> None:
    for seed in range(4 * part, 4 * part + 4):
        draw = random.Random(seed)
        s = Sizes(
            draw.randint(1, 2), draw.randint(1, 3), draw.randint(1, 900), draw.randint(1, 900)
        )
        block = (draw.choice([16, 32, 128]), draw.choice([16, 64, 256]))
        check_lists(tree(draw, s, draw.randint(0, 2)), grid_of(s, block), GPU)


@pytest.mark.parametrize("part", range(3))
def test_random_programs(part: int) -> None:
    pytest.importorskip("hypothesis")
    from tests.kernels.mask_programs import check_programs

    check_programs(part, 4, GPU)


def test_numbers_are_arguments() -> None:
    grid = grid_of(Sizes(1, 1, 500, 300), 32)
    check_lists(numbers(90, 0.37, 2), grid, GPU)
    repeated(lambda width: lambda b, h, q, kv: (q - kv).abs() <= width, grid, GPU)


def test_unaligned_captures() -> None:
    ids = torch.arange(301) // 37
    for start in (0, 1, 2, 0):
        part = ids[start:]
        check_lists(lambda b, h, q, kv: part[q] == part[kv], TileGrid(1, 1, 290, 290, 16, 16), GPU)


@pytest.mark.parametrize("name", LONG_MASKS)
def test_long_masks(name: str) -> None:
    """As the torch operators have them; one wait for the device; memory in proportion to tiles."""
    mod, grid = long_mask(name), TileGrid(1, 1, LONG, LONG, 128, 128)
    expected = classify(trace_mask(mod, GPU), grid, GPU)
    found = attnloom.create_block_mask(mod, None, None, LONG, LONG, device=GPU).lists()
    assert torch.equal(found.row_offsets, expected.row_offsets)
    assert torch.equal(found.entries, expected.entries)
    del expected
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert waits(lambda: attnloom.create_block_mask(mod, None, None, LONG, LONG, device=GPU)) == 1
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20


def test_equal_heads_cost_no_further_wait() -> None:
    shift = torch.zeros(4, dtype=torch.int64, device=GPU)
    mod = lambda b, h, q, kv: q >= kv + shift[h]
    build = lambda: attnloom.create_block_mask(mod, None, 4, 4096, 4096, device=GPU)
    assert build().lists().num_heads == 1
    assert waits(build) == 1


def test_a_million_tokens() -> None:
    length = 1 << 20
    found = attnloom.create_block_mask(
        LONG_MASKS["causal"], None, None, length, length, GPU
    ).lists()
    rows = length // 128
    assert found.entries.numel() == rows * (rows + 1) // 2
    assert int((found.entries & 1).sum()) == rows
    assert torch.equal(found.row_counts, torch.arange(1, rows + 1, device=GPU))


def test_lists_of_the_kernels_do_not_wait() -> None:
    """What forward and backward derive from a mask is enqueued."""
    blocks = attnloom.create_block_mask(documents(LONG), None, None, LONG, LONG, GPU).lists()
    assert waits(lambda: lists.work_lists(blocks, 128)) == 0
    assert waits(lambda: lists.group_lists(blocks, 1)) == 0
    assert waits(lambda: transposed.transposed_lists(blocks)) == 0


def waits(action) -> int:
    """How often the host waits for the device."""
    action()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            action()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)
