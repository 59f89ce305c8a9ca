"""score_mods of the table: rows, loops and small reductions."""

from __future__ import annotations

import torch

from tests.compiler.trace_table import KV_LEN, Q_LEN, H, draw, ints, score


@score
def numpy_scalar():
    import numpy as np

    scale, shift = np.float64(0.5), np.int64(2)
    return lambda s, b, h, q, kv: s * scale + shift * kv


@score
def unrolled_loop():
    frequencies = draw(3)

    def mod(s, b, h, q, kv):
        for i in range(3):
            s = s + torch.cos(frequencies[i] * (q - kv))
        return s

    return mod


@score
def loop_over_row():
    rows = draw(H, 3)

    def mod(s, b, h, q, kv):
        for weight in rows[h]:
            s = s * weight + kv
        return s + len(rows[h]) + rows.shape[1] + rows[h].numel()

    return mod


@score
def rbf_reduction():
    alpha, beta, centers = draw(H, 4), draw(H, 4, seed=1), torch.arange(4.0)
    return lambda s, b, h, q, kv: (
        s + torch.sum(alpha[h] * torch.exp(-(beta[h] ** 2) * ((q - kv) - centers) ** 2))
    )


@score
def dot_of_rows():
    u, v = draw(Q_LEN, 4), draw(KV_LEN, 4, seed=1)
    return lambda s, b, h, q, kv: s + u[q] @ v[kv] + torch.dot(u[q], v[kv])


@score
def bilinear_form():
    u, w, v = draw(Q_LEN, 3), draw(H, 3, 2, seed=2), draw(KV_LEN, 2, seed=1)
    return lambda s, b, h, q, kv: s + u[q] @ w[h] @ v[kv] + (w[h].T @ u[q])[1]


@score
def reductions():
    u = draw(KV_LEN, 4)
    n = ints(KV_LEN, 3, high=3)
    return lambda s, b, h, q, kv: (
        s + u[kv].mean() + u[kv].prod() + u[kv].amax() - torch.min(u[q]) + torch.max(u[q])
        + n[kv].sum() + (u[kv] > 0).sum() + u[kv].amin(dim=0, keepdim=True).squeeze()
    )  # fmt: skip


@score
def nested_reductions():
    u = draw(KV_LEN, 4)
    w = draw(H, 2, 3)
    return lambda s, b, h, q, kv: (
        s + ((u[kv] - u[kv].mean()) ** 2).mean() + w[h].sum() + w[h].sum(0).amax()
        + w[h].sum(dim=1)[0]
    )  # fmt: skip


@score
def broadcast_matrices():
    u, v = draw(Q_LEN, 3), draw(KV_LEN, 2)
    return lambda s, b, h, q, kv: s + (u[q][:, None] * v[kv].unsqueeze(0) + u[q].unsqueeze(1)).sum()


@score
def rows_of_length_one():
    u, v = draw(Q_LEN, 1), draw(KV_LEN, 3)
    return lambda s, b, h, q, kv: s + (u[q] * v[kv]).sum() + u[q].sum()


@score
def same_capture_twice():
    u = draw(KV_LEN)
    return lambda s, b, h, q, kv: s + u[q] * u[kv] - u[(q + kv) % 6]


@score
def nan_checks():
    u = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 0.0, 2.0])
    return lambda s, b, h, q, kv: (
        torch.where(torch.isnan(u[kv]) | u[kv].isinf(), s, torch.nan_to_num(u[kv], nan=1.0))
        + torch.isfinite(q)
    )


@score
def likes():
    return lambda s, b, h, q, kv: torch.where(
        q > kv, torch.zeros_like(s), torch.ones_like(s) + torch.full_like(s, 0.5)
    )


@score
def inline_constant_tensor():
    return lambda s, b, h, q, kv: s + torch.tensor([0.1, 0.2])[h]
