"""kernel_options: what is obeyed, what is accepted for torch's sake, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

from attnloom import FlexKernelOptions, create_block_mask, flex_attention
from attnloom.api.options import read_options
from attnloom.errors import OptionError, ShapeError, UnsupportedError
from attnloom.plan.problem import KernelOptions
from tests.api.mods import qkv


def test_every_key_of_torch_is_known():
    assert set(torchs.FlexKernelOptions.__annotations__) <= set(FlexKernelOptions.__annotations__)


def test_own_keys_are_read():
    options = {"backend": "tiled", "exact_math": True, "deterministic": True, "debug_bounds": True}
    assert read_options(options) == KernelOptions("tiled", True, True, True)
    assert read_options(None) == read_options({}) == KernelOptions()


def test_keys_of_torch_steer_nothing_and_are_logged(caplog):
    with caplog.at_level(logging.DEBUG, logger="attnloom"):
        options = {"BLOCK_M": 64, "fwd_num_warps": 4, "bwd_BLOCK_N1": 32, "BACKEND": "TRITON"}
        assert read_options(options) == KernelOptions()
    assert "kernel_options['bwd_BLOCK_N1'] = 32 steers torch's kernels only" in caplog.text


def test_deterministic_mode_of_torch_is_obeyed():
    torch.use_deterministic_algorithms(True)
    try:
        assert read_options(None).deterministic
        assert read_options({"deterministic": False}).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert not read_options({"deterministic": False}).deterministic


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"exact_maths": True}, "unknown key 'exact_maths'. Did you mean 'exact_math'?"),
        ({"block_m": 64}, "unknown key 'block_m'. Did you mean 'BLOCK_M'?"),
        ({"backend": "tile"}, "which is no backend of attnloom. Did you mean 'tiled'?"),
        ({"deterministic": 1}, "kernel_options['deterministic'] is 1; it must be True or False."),
        ({"BACKEND": "CUDNN"}, "kernel_options['BACKEND'] is 'CUDNN'; torch knows AUTO"),
        (
            {"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True},
            "BACKEND supersedes the other. Drop FORCE_USE_FLEX_ATTENTION.",
        ),
        ([("backend", "cpu")], "kernel_options is a list; it must be a dictionary"),
    ],
)
def test_mistakes(options, text):
    with pytest.raises(OptionError) as caught:
        read_options(options)
    assert text in str(caught.value)


def test_true_and_one_are_told_apart_after_both_were_seen():
    assert read_options({"exact_math": True}).exact_math
    with pytest.raises(OptionError):
        read_options({"exact_math": 1})


def test_a_backend_for_other_devices():
    with pytest.raises(UnsupportedError, match="backend 'gluon' cannot run this: query is on cpu"):
        flex_attention(*qkv(key_heads=4), kernel_options={"backend": "gluon"})


def test_chosen_backends_agree():
    inputs = qkv(key_heads=4)
    want = flex_attention(*inputs, kernel_options={"backend": "reference"})
    for backend in ("auto", "tiled"):
        got = flex_attention(*inputs, kernel_options={"backend": backend})
        torch.testing.assert_close(got, want)


def test_debug_bounds_names_the_tensor():
    table = torch.zeros(5)

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx + 2]

    inputs = qkv(key_heads=4)
    flex_attention(*inputs, relative)  # clamped
    with pytest.raises(ShapeError) as caught:
        flex_attention(*inputs, relative, kernel_options={"debug_bounds": True})
    assert str(caught.value).endswith(
        "relative' indexes captured tensor 'table' of shape [5] with 5 in dimension 0, at b=0, "
        "h=0, q_idx=3, kv_idx=0; the range is -5 to 4. Make the tensor larger, or clamp the index "
        "inside the mod. (Without debug_bounds such an index is clamped.)"
    )


def test_debug_bounds_accepts_a_guarded_index():
    table = torch.zeros(5)

    def guarded(score, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return torch.where(distance.abs() <= 2, score + table[distance + 2], score)

    flex_attention(*qkv(key_heads=4), guarded, kernel_options={"debug_bounds": True})


def test_debug_bounds_of_an_index_inside_a_reduction():
    """The reduced axis was taken for the keys: a mask, or a where on the score, crashed it."""
    rows, weights = torch.randn(7, 3), torch.randn(3)

    def dots(score, b, h, q_idx, kv_idx):
        return score + rows[q_idx] @ rows[kv_idx] + torch.relu(weights * score).sum()

    def too_far(score, b, h, q_idx, kv_idx):
        return score + (rows[q_idx] * rows[kv_idx + 1]).sum()

    inputs = qkv(key_heads=4)
    mask = create_block_mask(lambda b, h, i, j: i >= j - 2, None, None, 5, 7)
    options = {"debug_bounds": True}
    flex_attention(*inputs, dots, mask, kernel_options=options)
    with pytest.raises(ShapeError, match=r"'rows' of shape \[7, 3\] with 7 in dimension 0, at b=0"):
        flex_attention(*inputs, too_far, mask, kernel_options=options)


def test_fp32_precision_is_one_of_three():
    assert read_options({"fp32_precision": "tf32"}).fp32_precision == "tf32"
    assert read_options(None).fp32_precision == "ieee"
    with pytest.raises(OptionError, match=r"fp32_precision'\] is 'high'; it must be one of 'ieee'"):
        read_options({"fp32_precision": "high"})
