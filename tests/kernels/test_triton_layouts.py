"""What sizes prove about captured tensors, and what fragments make of it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import attnloom
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.emit import Target, emit_mask, emit_score
from attnloom.backends.triton.layouts import mask_layouts, score_layouts
from attnloom.ir.node import DType
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score

CPU = torch.device("cpu")


def make_call(score_mod=None, mask_mod=None, length=256, block=128) -> AttentionCall:
    query = torch.empty(1, 2, length, 64, dtype=torch.bfloat16)
    blocks = mask = None
    if mask_mod is not None:
        mask = trace_mask(mask_mod, CPU)
        made = attnloom.create_block_mask(
            mask_mod, None, None, length, length, "cpu", BLOCK_SIZE=block
        )
        blocks = made.lists()
    score = None if score_mod is None else trace_score(score_mod, DType.F32, CPU)
    return AttentionCall(query, query, query, score, mask, blocks, 0.125, KernelOptions())


def documents(ids: torch.Tensor):
    return lambda b, h, q, kv: ids[q] == ids[kv]


def test_a_bias_of_whole_tiles_is_read_in_vectors() -> None:
    bias = torch.zeros(1, 2, 256, 256, dtype=torch.bfloat16)
    call = make_call(lambda s, b, h, q, kv: s + bias[b, h, q, kv])
    (layout,) = score_layouts(call)
    assert layout == "--v--v-iv-i1m"
    assert call.score is not None
    text = emit_score(call.score.program, Target().reading((layout,)))
    assert text.count("clamp_index") == 2  # b and h
    assert "// 8 * 8" in text


@pytest.mark.parametrize(
    ("size", "layout"), [(400, "--v--v--v--1m"), (408, "-----------1-"), (401, "-----------1-")]
)
def test_rows_of_a_bias_that_end_inside_a_tile_are_whole_vectors(size: int, layout: str) -> None:
    bias = torch.zeros(1, 2, size, size, dtype=torch.bfloat16)
    call = make_call(lambda s, b, h, q, kv: s + bias[b, h, q, kv], length=size)
    assert score_layouts(call) == (layout,)


@pytest.mark.parametrize(("length", "size"), [(200, 256), (256, 255), (200, 200)])
def test_tiles_that_overhang_a_tensor_are_clamped(length: int, size: int) -> None:
    """200 rows fill two tiles of 128, whose last lanes lie at 255."""
    table = torch.zeros(size)
    call = make_call(lambda s, b, h, q, kv: s + table[kv], length=length)
    assert score_layouts(call)[0][1] == ("i" if size == 256 else "-")


def test_tiles_of_192_rows_overhang_what_those_of_128_do_not() -> None:
    table = torch.zeros(256)
    call = make_call(lambda s, b, h, q, kv: s + table[q] + table[kv])
    assert score_layouts(call) == ("-i1-",)
    assert score_layouts(call, 192) == ("--1-",)


def test_blocks_that_overhang_a_tensor_are_clamped() -> None:
    """The second block of 256 keys has tiles past the 384 keys, and the ids."""
    ids = torch.zeros(384, dtype=torch.int64)
    assert mask_layouts(make_call(mask_mod=documents(ids), length=384))[0] == "ni1-"
    assert mask_layouts(make_call(mask_mod=documents(ids), length=384, block=256))[0] == "n-1-"


def test_other_indices_are_clamped() -> None:
    table = torch.zeros(1024)
    call = make_call(lambda s, b, h, q, kv: s + table[q] + table[kv - q])
    assert score_layouts(call)[0][1] == "-"


def test_large_ids_stay_wide_and_are_looked_at_again_when_written() -> None:
    ids = torch.arange(256)
    call = make_call(mask_mod=documents(ids))
    assert mask_layouts(call)[0][0] == "n"
    assert call.mask is not None
    narrow = emit_mask(call.mask.program, Target().reading(mask_layouts(call)))
    assert ".to(tl.int32)" in narrow
    ids[3] = 2**40
    assert mask_layouts(call)[0][0] == "-"
    wide = emit_mask(call.mask.program, Target().reading(mask_layouts(call)))
    assert ".to(tl.int64)" in wide


def test_strides_are_told_apart() -> None:
    for row, layout in ((264, "-iv--v-i1m"), (258, "-i------1-")):  # 16 bytes hold 4 elements
        table = torch.zeros(256, 2, row)[:, :, :256]
        call = make_call(lambda s, b, h, q, kv, t=table: s + t[q, h, kv])
        assert score_layouts(call)[0] == layout


def test_sizes_that_change_nothing_made_kernels_of_their_own() -> None:
    """Ids `[B, S]` of odd, even and other lengths had a layout each: their rows begin at multiples
    of 16 bytes or do not, which no clamped index profits from."""
    found: set[tuple[str, ...]] = set()
    for length in (50, 87, 124, 136, 256, 384):
        ids = torch.zeros(2, length, dtype=torch.int64)
        mod = lambda b, h, q, kv, ids=ids: ids[b, q] == ids[b, kv]
        found.add(mask_layouts(make_call(mask_mod=mod, length=length)))
    assert found == {("n---" + "-1-",), ("n-v-" + "i1m",)}


def test_a_tensor_without_elements_is_not_read_by_position() -> None:
    """Kernels are given one element in its place."""
    table = torch.zeros(256, 0)
    assert score_layouts(make_call(lambda s, b, h, q, kv: s + table[q, kv])) == ("-------",)


def test_nothing_to_prove() -> None:
    slopes = torch.zeros(2)
    assert score_layouts(make_call(lambda s, b, h, q, kv: s + slopes[h] * (q - kv))) == ()
