"""attnloom.explain: what it says is what the compiler does."""

from __future__ import annotations

import math

import pytest
import torch

import attnloom
from attnloom import mods as variants
from attnloom.errors import (
    DeviceError,
    DtypeError,
    ModError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
from attnloom.ir.node import BoundProgram, DType
from attnloom.ir.passes.simplify import simplify
from attnloom.tools.alike import pairs_text
from attnloom.tools.formula import statements
from attnloom.trace.tracer import trace_score
from tests.tools import mods


def explain(score_mod=None, mask_mod=None, **sizes):
    return attnloom.explain(score_mod, mask_mod, **{"measure": False, **sizes})


def lines_of(found, kind):
    (traced,) = (m for m in found.mods if m.kind == kind)
    return {s.name: (s.when, s.text) for s in traced.statements}


def test_where_parts_are_computed():
    found = explain(mods.alibi(4), mods.documented, q_len=512, heads=4)
    assert lines_of(found, "score_mod") == {
        "h0": ("once a head", "slope[h]"),
        "return": ("every score", "score + h0 * (kv_idx - q_idx)"),
    }
    assert lines_of(found, "mask_mod") == {
        "r0": ("once a row", "documents[q_idx]"),
        "c0": ("once a column", "documents[kv_idx]"),
        "return": ("every score", "(q_idx >= kv_idx) & (r0 == c0)"),
    }
    captures = {c.name: (c.shape, c.learnable) for m in found.mods for c in m.captures}
    assert captures == {"slope": ((4,), False), "documents": ((4096,), False)}


def test_gradient_of_a_captured_tensor():
    found = explain(mods.learned, q_len=64, heads=4)
    (bias,) = found.gradient.captured
    assert (bias.name, bias.summed_over) == ("bias", "b")
    names = {s.name: s.text for s in found.gradient.statements}
    assert names[bias.index.split(", ")[1]] == "min(max(q_idx - kv_idx, 0), 32)"
    assert bias.value == names["dscore_before"]
    assert explain(mods.alibi(4), q_len=64).gradient.captured == ()
    assert explain(None, mods.documented, q_len=64).gradient is None


def test_statements_compute_what_the_program_does():
    """The printed formulas are Python: run them against the mod."""

    def mod(score, b, h, q_idx, kv_idx):
        gap = (q_idx - kv_idx) // 3
        near = (gap >= -2) & ~(gap == 4)
        scaled = -score * (1.5 - score / (kv_idx + 2)) ** 2 - (q_idx - (kv_idx - b))
        return torch.where(near, scaled, score - weights[h] * (gap % 5 - 7))

    weights = torch.tensor([0.5, 2.0])
    traced = trace_score(mod, DType.F32, torch.device("cpu"))
    bound = BoundProgram(simplify(traced.program), traced.tensors, traced.numbers)
    lines = statements(bound, ["weights"])
    scope = {
        "weights": weights, "where": torch.where, "min": torch.minimum, "max": torch.maximum,
        "pow": torch.pow,
    }  # fmt: skip
    for b, h, q, kv in ((0, 0, 5, 1), (1, 1, 2, 30), (0, 1, 40, 2), (2, 0, 13, 1)):
        given = [torch.tensor(0.75), *map(torch.tensor, (b, h, q, kv))]
        values = dict(zip(("score", "b", "h", "q_idx", "kv_idx"), given, strict=True))
        for line in lines:
            values[line.name] = eval(line.text, {**scope, **values})
        torch.testing.assert_close(values["return"], mod(*given))


def test_reductions_read_as_python():
    table = torch.ones(2, 16)

    def mod(score, b, h, q_idx, kv_idx):
        return score * (table[h] * table[h]).sum()

    lines = lines_of(explain(mod, q_len=16), "score_mod")
    assert lines["h0"] == (
        "once a head", "sum(table[h, i0] * table[h, i0] for i0 in range(table.size(1)))"
    )  # fmt: skip


def test_mask_in_numbers():
    found = explain(None, mods.window(100), q_len=1000, kv_len=1300, heads=3, batch=2)
    whole = attnloom.create_block_mask(mods.window(100), 2, 3, 1000, 1300, device="cpu")
    mask, tiles = found.mask, whole.to_dense()
    assert mask.shape == (2, 3, 1000, 1300)
    assert mask.num_tiles == tiles.numel()
    assert mask.num_full + mask.num_partial == int(tiles.sum())
    assert len(mask.alike) == 1 and len(mask.alike[0]) == 6
    assert math.isclose(mask.density, 1 - whole.sparsity() / 100)
    assert mask.full_scores + mask.partial_scores == round(mask.density * 6 * 1000 * 1300)
    # Rows of the picture are rows of tiles, two characters a column.
    assert len(mask.picture.split("\n")) == 8
    assert {len(line) for line in mask.picture.split("\n")} == {22}


def test_full_and_partial_scores_are_apart():
    def prefix(b, h, q_idx, kv_idx):
        return kv_idx < 160

    mask = explain(None, prefix, q_len=100, kv_len=300, block_size=64).mask
    assert (mask.full_scores, mask.partial_scores) == (100 * 128, 100 * 64)
    assert (mask.num_full, mask.num_partial, mask.num_tiles) == (4, 2, 10)


def test_a_picture_of_a_million_tokens_stays_small():
    picture = explain(None, mods.window(4096), q_len=1 << 20).mask.picture
    assert len(picture) < 32 * 65 + 32


def test_backend_and_kernel():
    decode = explain(mods.alibi(4), q_len=1, kv_len=512).backend
    assert decode.kernel.startswith("decode (query has 1 row;")
    forced = explain(mods.alibi(4), q_len=64, kernel_options={"backend": "tiled"}).backend
    assert (forced.backend, forced.rejected) == ("tiled", ())
    assert "chosen by kernel_options" in forced.why


def test_rejected_backends_say_why():
    deep = torch.zeros((1,) * 9)

    def mod(score, b, h, q_idx, kv_idx):
        return score + deep[b, h, q_idx, kv_idx, 0, 0, 0, 0, 0]

    with pytest.warns(UserWarning, match="backend 'cpu' cannot run this"):
        choice = explain(mod, q_len=16).backend
    assert choice.backend == "tiled"
    assert [(r.backend, r.reason) for r in choice.rejected] == [
        ("cpu", "a captured tensor has 9 dimensions, kernels take 8.")
    ]
    with pytest.raises(UnsupportedError):
        explain(mod, q_len=16, kernel_options={"backend": "cpu"})


def test_expected_speed_follows_from_the_parts():
    threads = torch.get_num_threads()
    found = explain(mods.learned, mods.window(16), q_len=256, heads=2, measure=True)
    assert torch.get_num_threads() == threads
    mask, speed = found.mask, found.speed
    parts = ((mask.full_scores, speed.full_ns), (mask.partial_scores, speed.partial_ns))
    assert math.isclose(speed.expected_ms, sum(n * ns for n, ns in parts if n) / 1e6)
    assert math.isclose(speed.dense_ms, 2 * 256 * 256 * speed.plain_ns / 1e6)
    assert math.isclose(speed.speedup, speed.dense_ms / speed.expected_ms)
    assert speed.plain_ns > 0
    assert mask.full_scores == 0
    assert math.isnan(speed.full_ns)


def test_a_mask_that_keeps_nothing():
    found = explain(None, lambda b, h, q, kv: q < 0, q_len=64, measure=True)
    assert (found.mask.density, found.speed.expected_ms) == (0, 0)
    assert found.speed.speedup == math.inf


@pytest.mark.parametrize(
    ("mask_mod", "length"),
    [
        (variants.documents_from_cu_seqlens([0, 300, 1000]), 1000),
        (variants.on_documents(variants.causal_mask, cu_seqlens=[0, 300, 1000]), 1000),
        (variants.shared_prefix(24, [0, 300, 1000]), 1024),
    ],
)
def test_packed_documents_told_of_one_query_too_many(mask_mod, length):
    """Their tables have an entry more, for queries after the last document."""
    setting = attnloom.explain(mask_mod=mask_mod, measure=False).setting
    assert (setting.q_len, setting.kv_len) == (length, length)
    assert f"cu_seqlens ends at {length}" in setting.notes[0]
    longer = attnloom.explain(mask_mod=mask_mod, measure=False, q_len=2000)
    assert longer.setting.q_len == 2000


def test_stages_are_told():
    told = []
    explain(mods.learned, mods.documented, q_len=64, progress=told.append)
    assert told == ["tracing", "building the mask of 64 x 64 tokens"]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: explain(), OptionError, "score_mod and mask_mod are both None"),
        (lambda: explain(mods.documented), ModError,
         "'documented' is a mask_mod by its number of arguments and was given as score_mod"),
        (lambda: explain(None, mods.learned), ModError, "pass it as score_mod="),
        (lambda: explain(3), ModError, "is not a function but 3"),
        (lambda: explain(mods.learned, q_len=0), ShapeError, "q_len is 0; it must be 1 or more."),
        (lambda: explain(mods.learned, heads=2.5), ShapeError, "heads is 2.5; it must be an int."),
        (lambda: explain(mods.learned, heads=3, kv_heads=2), ShapeError, "heads is 3 and kv_heads"),
        (lambda: explain(mods.learned, dtype="int8"), DtypeError, "dtype is 'int8'; attention"),
        (lambda: explain(mods.learned, dtype=3), DtypeError, "dtype is 3; attention takes"),
        (lambda: explain(mods.learned, block_size=48), OptionError, "BLOCK_SIZE is 48"),
        (lambda: explain(mods.learned, device="gpu"), DeviceError, "device is 'gpu', which torch"),
        (lambda: explain(mods.learned, kernel_options={"backend": "x"}), OptionError, "no backend"),
        (lambda: explain(None, attnloom.create_block_mask(mods.documented, 1, 1, 64, 64)),
         ModError, "mask_mod is a BlockMask; pass its function, block_mask.mask_mod."),
    ],
)  # fmt: skip
def test_errors(call, error, said):
    with pytest.raises(error) as caught:
        call()
    assert said in str(caught.value)


def test_heads_that_share_a_map_are_grouped():
    """Four heads with two windows were counted as four maps, as they are stored."""
    reach = torch.tensor([100, 900, 100, 100])

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= reach[h]

    (one, other) = explain(None, window, batch=2, q_len=1500, measure=False).mask.alike
    assert one == tuple((b, h) for b in (0, 1) for h in (0, 2, 3))
    assert other == ((0, 1), (1, 1))
    assert pairs_text(one) == "batch 0, 1, heads 0, 2, 3"
    assert pairs_text(((0, 0), (0, 1), (0, 2), (1, 5))) == "batch 0, heads 0-2; batch 1, head 5"


def test_formulas_held_products_with_one():
    one = 1.0

    def mod(score, b, h, q_idx, kv_idx):
        return score * one + torch.log1p(torch.exp(h.float())) / one + (h + 3).reciprocal()

    (traced,) = explain(mod, q_len=64, measure=False).mods
    assert [s.text for s in traced.statements] == [
        "log1p(exp(h))",
        "1 / (h + 3)",
        "score + h0 + h1",
    ]
    one = 2.0  # a number, not a constant of the program
    (traced,) = explain(mod, q_len=64, measure=False).mods
    assert any("2" in s.text for s in traced.statements)


def test_a_smaller_tile_that_computes_less_is_named():
    ids = torch.arange(1024) // 40

    def documents(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    mask = explain(None, documents, measure=False).mask
    size, density = mask.finer
    assert size < 128
    again = explain(None, documents, block_size=size, measure=False).mask
    assert again.density == density < 0.8 * mask.density
    full = explain(None, lambda b, h, q, kv: q >= 0, q_len=1024, measure=False).mask
    assert full.finer is None
