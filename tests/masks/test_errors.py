"""Users' mistakes in create_block_mask and its relatives; texts are pinned."""

from __future__ import annotations

import pytest
import torch

from attnloom import mods
from attnloom.api.masks import and_masks, create_block_mask, create_mask, or_masks
from attnloom.errors import ModError, OptionError, ShapeError, TraceError


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def soft(score, b, h, q_idx, kv_idx):
    return score


def build(mod=causal, B=1, H=1, Q=64, KV=64, **options):
    return create_block_mask(mod, B, H, Q, KV, **options)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: build(soft), ModError, "'soft' takes 5 arguments, which makes it a score_mod"),
        (lambda: build(lambda b, h: b), ModError, "takes 2 arguments; a mask_mod takes 4"),
        (lambda: build("causal"), ModError, "'causal' is not callable"),
        (
            lambda: build(mods.causal),
            ModError,
            "module 'attnloom.mods.causal' is not callable; a mask_mod is a function of (b, h, "
            "q_idx, kv_idx). It holds 'causal_mask'",
        ),
        (lambda: build(Q=-3), ShapeError, "Q_LEN is -3; sizes are 0 or more."),
        (lambda: build(KV=2.5), ShapeError, "KV_LEN is 2.5; it must be an int."),
        (lambda: build(B=-1), ShapeError, "B is -1"),
        (lambda: build(B=True), OptionError, "B is True, which is a flag; it must be an int."),
        (lambda: build(BLOCK_SIZE=100), OptionError, "BLOCK_SIZE is 100, and 100 is not a power"),
        (lambda: build(BLOCK_SIZE=(128, 8)), OptionError, "BLOCK_SIZE is (128, 8), and 8 is not"),
        (lambda: build(BLOCK_SIZE=(1, 2, 3)), OptionError, "one int or a pair (query, key)"),
        (lambda: build(BLOCK_SIZE=None), OptionError, "BLOCK_SIZE is None"),
        (lambda: build(dq_kv_order=torch.ones(1)), OptionError, "dq_kv_order is a tensor"),
        (lambda: create_mask(lambda q: q, 1, 1, 4, 4), ModError, "takes 1 argument; a mask_mod"),
        (lambda: and_masks(causal, None), ModError, "argument 1 is None"),
        (lambda: or_masks([causal]), ModError, "not a list of them"),
        (lambda: build(lambda b, h, q, k: torch.sort(q)), TraceError, "torch.sort"),
    ],
)
def test_errors_name_the_values(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def test_errors_derive_from_what_torchs_users_catch():
    with pytest.raises(ValueError, match="BLOCK_SIZE"):
        build(BLOCK_SIZE=0)


def test_device_follows_the_captured_tensors():
    ids = torch.zeros(64, dtype=torch.int64)
    with torch.device("meta"):
        assert build(lambda b, h, q, k: ids[q] == ids[k]).device.type == "cpu"
    assert build(device="cpu").device == torch.device("cpu")


def test_compile_flag_is_accepted():
    assert build(_compile=True).shape == (1, 1, 64, 64)
