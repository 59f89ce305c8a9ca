"""Rows of MODS that mask, alone or together with a score_mod."""

from __future__ import annotations

import torch

from tests.harness.table import mask_row, pair_row


@mask_row()
def causal(c, s):
    return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


@mask_row()
def causal_lower_right(c, s):
    offset = s.KV_LEN - s.Q_LEN
    return lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx


@mask_row()
def sliding_window(c, s):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 20)


@mask_row()
def window_with_sinks(c, s):
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((q_idx - kv_idx <= 20) | (kv_idx < 4))

    return mask_mod


@mask_row()
def prefix_or(c, s):
    """Prefix-LM as tutorials write it, with Python's `or`."""
    return lambda b, h, q_idx, kv_idx: kv_idx < 17 or q_idx >= kv_idx


@mask_row(lambda s, d: {"ids": d.documents(s.reach, 5)})
def document(c, s):
    return lambda b, h, q_idx, kv_idx: c["ids"][q_idx] == c["ids"][kv_idx]


@mask_row(lambda s, d: {"ids": d.integers(0, 4, s.B, s.reach)}, axes="b")
def document_unsorted_per_batch(c, s):
    def mask_mod(b, h, q_idx, kv_idx):
        return (c["ids"][b, q_idx] == c["ids"][b, kv_idx]) & (q_idx >= kv_idx)

    return mask_mod


@mask_row(lambda s, d: {"length": d.integers(0, s.KV_LEN + 1, s.B)}, axes="b")
def key_padding(c, s):
    return lambda b, h, q_idx, kv_idx: kv_idx < c["length"][b]


@mask_row(lambda s, d: {"start": d.integers(0, max(s.Q_LEN // 2, 1), s.B)}, axes="b")
def left_padding(c, s):
    """Hides whole query rows: those rows have no key."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (kv_idx >= c["start"][b])

    return mask_mod


@mask_row(axes="h")
def dilated_by_head(c, s):
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % (h + 1) == 0


@mask_row()
def natten_2d(c, s):
    """Neighbourhood attention on a canvas of width 8 with a 5 x 5 window held inside the canvas."""
    width, height = 8, max(s.reach // 8, 1)

    def mask_mod(b, h, q_idx, kv_idx):
        qx, qy = q_idx % width, q_idx // width
        kx, ky = kv_idx % width, kv_idx // width
        cx, cy = qx.clamp(2, width - 3), qy.clamp(min(2, height - 1), max(height - 3, 0))
        return ((cx - kx).abs() <= 2) & ((cy - ky).abs() <= 2)

    return mask_mod


@mask_row(lambda s, d: {"keep": d.flags(0.5, s.B, s.Q_LEN, s.KV_LEN)}, axes="b")
def bool_table_mask(c, s):
    return lambda b, h, q_idx, kv_idx: c["keep"][b, q_idx, kv_idx]


@mask_row()
def nothing(c, s):
    return lambda b, h, q_idx, kv_idx: q_idx < 0


@mask_row()
def every_second_row(c, s):
    return lambda b, h, q_idx, kv_idx: q_idx % 2 == 1


@mask_row()
def block_diffusion(c, s):
    """Noisy half, clean half; blocks of 8 (Arriola et al. 2025, arXiv:2503.09573)."""
    half = max(s.reach // 2, 1)

    def mask_mod(b, h, q_idx, kv_idx):
        q_clean, kv_clean = q_idx >= half, kv_idx >= half
        q_block = torch.where(q_clean, q_idx - half, q_idx) // 8
        kv_block = torch.where(kv_clean, kv_idx - half, kv_idx) // 8
        own = (q_block == kv_block) & (q_clean == kv_clean)
        offset = (q_block > kv_block) & kv_clean & ~q_clean
        return own | offset | ((q_block >= kv_block) & kv_clean & q_clean)

    return mask_mod


@pair_row(
    lambda s, d: {"bias": d.normal(s.Hq, 2 * 24 + 1), "ids": d.documents(s.reach, 3)},
    learnable=("bias",),
)
def document_relative_softcap(c, s):
    """A learned bias inside a window, which the mask keeps the index within."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return 4.0 * torch.tanh((score + c["bias"][h, q_idx - kv_idx + 24]) / 4.0)

    def mask_mod(b, h, q_idx, kv_idx):
        near = (q_idx - kv_idx).abs() <= 24
        return near & (q_idx >= kv_idx) & (c["ids"][q_idx] == c["ids"][kv_idx])

    return score_mod, mask_mod


@pair_row(lambda s, d: {"slope": d.uniform(0.01, 0.3, s.Hq)}, learnable=("slope",))
def causal_head_slope(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + c["slope"][h] * (kv_idx - q_idx)

    return score_mod, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


@pair_row(
    lambda s, d: {"p": d.uniform(0.1, 1.0, s.reach), "shared": d.integers(0, 3, s.reach)},
    learnable=("p",),
)
def same_capture_in_score_and_mask(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * c["p"][kv_idx] + c["shared"][kv_idx] * 0.125

    def mask_mod(b, h, q_idx, kv_idx):
        return c["shared"][q_idx] == c["shared"][kv_idx]

    return score_mod, mask_mod


@pair_row(lambda s, d: {"slope": d.uniform(0.5, 2.0, s.Hq)}, learnable=("slope",))
def singular_where_masked(c, s):
    """log(q - kv) has no value, and no derivative, where the mask is false."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - c["slope"][h] * torch.log((q_idx - kv_idx).to(c["slope"].dtype))

    return score_mod, lambda b, h, q_idx, kv_idx: q_idx > kv_idx
