"""Users' mistakes in factories; texts are pinned."""

from __future__ import annotations

import pytest
import torch

from attnloom import create_block_mask, mods
from attnloom.errors import (
    DeviceError,
    DtypeError,
    ModError,
    OptionError,
    ShapeError,
)
from tests.harness.pinned import assert_says

FLOATS = torch.zeros(4, 4)
INTS = torch.zeros(4, 4, dtype=torch.int64)

ERRORS = {
    "negative": (
        lambda: mods.sliding_window(-1),
        ModError,
        "sliding_window: window_left is -1; it must be an int of 0 or more.",
    ),
    "no int": (
        lambda: mods.sliding_window(2.5),
        ModError,
        "sliding_window: window_left is 2.5; it must be an int of 0 or more.",
    ),
    "a flag": (
        lambda: mods.prefix_lm(True),
        ModError,
        "prefix_lm: prefix_length is True; it must be an int of 0 or more.",
    ),
    "no heads": (
        lambda: mods.alibi(0),
        ModError,
        "alibi: num_heads is 0; it must be an int of 1 or more.",
    ),
    "axes": (
        lambda: mods.neighborhood((6, 7), (3, 3, 3)),
        ModError,
        "neighborhood: kernel_size is (3, 3, 3), which has 3 axes; the canvas has 2. Give one int "
        "for every axis, or a single one for all.",
    ),
    "canvas": (
        lambda: mods.morton_order((2, 2, 2, 2)),
        ModError,
        "morton_order: canvas is (2, 2, 2, 2); it must have 1, 2 or 3 axes, the slowest first.",
    ),
    "one axis of a canvas": (
        lambda: mods.neighborhood((0, 7), 3),
        ModError,
        "neighborhood: canvas[0] is 0; it must be an int of 1 or more.",
    ),
    "one axis of a kernel": (
        lambda: mods.neighborhood((6, 7), (3, 1.5)),
        ModError,
        "neighborhood: kernel_size[1] is 1.5; it must be an int of 1 or more.",
    ),
    "batches of ids": (
        lambda: mods.documents(torch.zeros(2, 4).int(), torch.zeros(3, 4).int()),
        ShapeError,
        "documents: ids has 2 batch entries and kv_ids 3; they must be equal, or 1 to share.",
    ),
    "devices of ids": (
        lambda: mods.documents(INTS, INTS.to("meta")),
        DeviceError,
        "documents: ids is on cpu, kv_ids on meta; both must be on one device. Move them with "
        ".to(device).",
    ),
    "a mask_mod as a factory": (
        lambda: mods.causal_mask(),
        ModError,
        "causal_mask was called with 0 arguments; it makes no mask_mod, it is one: causal_mask(b, "
        "h, q_idx, kv_idx). Pass it as it is, as in create_block_mask(causal_mask, B, H, Q_LEN, "
        "KV_LEN).",
    ),
    "a mask_mod with one argument": (
        lambda: mods.noop_mask(8),
        ModError,
        "noop_mask was called with 1 argument; it makes no mask_mod, it is one: noop_mask(b, h, "
        "q_idx, kv_idx). Pass it as it is, as in create_block_mask(noop_mask, B, H, Q_LEN, "
        "KV_LEN).",
    ),
    "kernel": (
        lambda: mods.neighborhood((6, 7), 4, dilation=2),
        ModError,
        "neighborhood: a kernel of 4 with dilation 2 does not fit an axis of 6; kernel_size * "
        "dilation must not exceed the canvas (6, 7).",
    ),
    "causal axes": (
        lambda: mods.neighborhood((6, 7), 3, is_causal=[True]),
        ModError,
        "neighborhood: is_causal is [True]; the canvas has 2 axes. Give one flag for every axis, "
        "or a single one for all.",
    ),
    "order": (
        lambda: mods.neighborhood((6, 7), 3, order=mods.morton_order((7, 6))),
        ModError,
        "neighborhood: order is of a canvas (7, 6), the mask of (6, 7); make both of the same.",
    ),
    "even": (
        lambda: mods.bigbird(64, num_window=2),
        ModError,
        "bigbird: num_window is 2; it must be odd, so that it has a middle.",
    ),
    "even window of tiles": (
        lambda: mods.sliding_tile((6, 6), 2, (3, 2)),
        ModError,
        "sliding_tile: window[1] is 2; it must be odd, so that it has a middle.",
    ),
    "odd features": (
        lambda: mods.sandwich(2, 8, 7),
        ModError,
        "sandwich: dim is 7; it must be even, a sine and a cosine a frequency.",
    ),
    "flags": (
        lambda: mods.longformer(2, FLOATS),
        ModError,
        "longformer: is_global is torch.float32 of shape [4, 4]; it must be a bool tensor [S] or "
        "[B, S], one flag a token.",
    ),
    "floats": (
        lambda: mods.relative_bias(INTS),
        ModError,
        "relative_bias: table is torch.int64; it must be a floating-point tensor.",
    ),
    "no tensor": (
        lambda: mods.additive_bias(None),
        ModError,
        "additive_bias: bias is None; it must be a floating-point tensor.",
    ),
    "dimensions": (
        lambda: mods.additive_bias(torch.zeros(4)),
        ShapeError,
        "additive_bias: bias has shape [4]; it must have 2, 3 or 4 dimensions.",
    ),
    "columns": (
        lambda: mods.relative_bias(FLOATS),
        ShapeError,
        "relative_bias: table has 4 columns; it must have 2 * M + 1, for the distances -M to M.",
    ),
    "swin rows": (
        lambda: mods.swin_bias((8, 8), 4, FLOATS),
        ShapeError,
        "swin_bias: table has shape [4, 4]; a window of 4 x 4 needs 49 rows, (2 * 4 - 1) * "
        "(2 * 4 - 1).",
    ),
    "buckets": (
        lambda: mods.t5_bias(torch.zeros(2, 4)),
        ModError,
        "t5_bias: table has 2 buckets and max_distance is 128; a side needs at least 2 buckets, "
        "and max_distance must exceed half of them.",
    ),
    "edges": (
        lambda: mods.graphormer_edge(INTS[:, :, None], torch.zeros(3, 5), torch.zeros(1, 2, 4)),
        ShapeError,
        "graphormer_edge: weight has shape [1, 2, 4]; paths of 1 edge and features of size 5 need "
        "[1, Hq, 5].",
    ),
    "rope": (
        lambda: mods.latent_rope(torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 5), 1.0),
        ShapeError,
        "latent_rope: q_rope has shape [1, 2, 3, 4], k_rope [1, 3, 5]; their last dimensions are "
        "multiplied, so they must be equal.",
    ),
    "cap": (
        lambda: mods.softcap(0),
        ModError,
        "softcap: cap is 0; it must be a finite number above 0.",
    ),
    "summary": (
        lambda: mods.fixed_sparse(8, 9),
        ModError,
        "fixed_sparse: num_summary is 9, more than the 8 tokens of a block; it must be 0 to "
        "stride.",
    ),
    "no documents": (
        lambda: mods.shared_prefix(4, [0]),
        ModError,
        "shared_prefix: cu_seqlens has 1 element; it must hold 0 and the end of each document. "
        "Without documents, use causal_mask.",
    ),
    "parents": (
        lambda: mods.token_tree([-1, 1]),
        ModError,
        "token_tree: parents[1] is 1; a parent comes before its child, and is -1 for a child of "
        "the prefix.",
    ),
    "kinds": (
        lambda: mods.compose(mods.causal_mask),
        ModError,
        "compose: argument 0 is 'causal_mask', a mask_mod; every argument must be a score_mod.",
    ),
    "no mods": (
        lambda: mods.per_head(),
        ModError,
        "per_head: there are no mods; give one or more.",
    ),
    "which mod": (
        lambda: mods.per_head(mods.causal_mask, mods.causal_mask, heads=[0, 2]),
        ModError,
        "per_head: heads names mod 2 of 2 mods; valid are 0 to 1.",
    ),
    "documents twice": (
        lambda: mods.on_documents(mods.causal_mask, ids=[0], cu_seqlens=[0, 1]),
        OptionError,
        "on_documents: both are given; exactly one of cu_seqlens and ids must be.",
    ),
    "neither": (
        lambda: mods.on_documents(mods.causal_mask),
        OptionError,
        "on_documents: neither is given; exactly one of cu_seqlens and ids must be.",
    ),
    "a list of mods": (
        lambda: mods.per_head([mods.causal_mask, mods.causal_mask]),
        ModError,
        "per_head: argument 0 is a list; every argument must be a mod. Pass the functions "
        "themselves, not a list of them or a BlockMask.",
    ),
    "a BlockMask": (
        lambda: mods.xor_masks(create_block_mask(mods.causal_mask, None, None, 16, 16)),
        ModError,
        "xor_masks: argument 0 is a BlockMask; every argument must be a mask_mod. Pass the "
        "functions themselves, not a list of them or a BlockMask.",
    ),
    "no beginning": (
        lambda: mods.documents_from_cu_seqlens([1, 3]),
        OptionError,
        "documents_from_cu_seqlens: cu_seqlens starts with [1, 3]; cumulative lengths start at 0 "
        "and never decrease. For lengths use torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).",
    ),
    "an empty list": (
        lambda: mods.token_tree([]),
        ShapeError,
        "token_tree: parents is empty; it must hold at least one integer.",
    ),
    "a negative length": (
        lambda: mods.right_padding([3, -1]),
        ModError,
        "right_padding: lengths[1] is -1; a length is 0 or more.",
    ),
    "a negative prefix": (
        lambda: mods.prefix_lm([-1, 2]),
        ModError,
        "prefix_lm: prefix_length[0] is -1; a length is 0 or more.",
    ),
    "no flag": (
        lambda: mods.longformer(2, torch.tensor([0, 2])),
        ModError,
        "longformer: is_global[1] is 2; a flag is 0 or 1.",
    ),
    "no image": (
        lambda: mods.swin_window((4, 4, 4), 2),
        ModError,
        "swin_window: canvas is (4, 4, 4); an image has 2 axes. Give (height, width), or one int "
        "for a square.",
    ),
    "no scale": (
        lambda: mods.latent_rope(torch.zeros(1, 1, 4, 2), torch.zeros(1, 4, 2), None),
        ModError,
        "latent_rope: scale is None; it must be a finite number.",
    ),
    "many features": (
        lambda: mods.latent_rope(torch.zeros(1, 1, 4, 300), torch.zeros(1, 4, 300), 1.0),
        ShapeError,
        "latent_rope: q_rope has 300 features; a mod reduces up to 256 for a score. Append them to "
        "query and key as further features instead.",
    ),
}

# Checks shared with the constructors of BlockMask, pinned there.
SHARED = {
    "ids": (lambda: mods.documents(FLOATS), DtypeError, "documents: ids is torch.float32"),
    "cu_seqlens": (
        lambda: mods.documents_from_cu_seqlens([0, 5, 3]),
        OptionError,
        "cumulative lengths start at 0 and never decrease",
    ),
    "lengths": (
        lambda: mods.right_padding(INTS),
        ShapeError,
        "right_padding: lengths has shape [4, 4]; it must have 1 dimension.",
    ),
    "a factory": (
        lambda: mods.compose(mods.softcap),
        ModError,
        "If it is a factory that makes a mod, call it",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_texts(name: str) -> None:
    assert_says(ERRORS[name])


@pytest.mark.parametrize("name", SHARED)
def test_shared_texts(name: str) -> None:
    call, error, text = SHARED[name]
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
