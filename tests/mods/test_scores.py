"""Score_mods against dense formulas in float64, gradients of what they capture included."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from attnloom import AuxRequest, flex_attention, mods
from tests.harness.agree import close, normal
from tests.mods.dense import BOTH, Sizes, check_score, grid

BIG = Sizes(B=2, H=3, Q=21, KV=26)
CAUSAL = (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, lambda b, h, q, k: k <= q)


def learned(*shape: int, seed: int = 5) -> torch.Tensor:
    return normal(*shape, seed=seed).requires_grad_()


SLOPES = {  # of the authors' code, written out
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    5: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    8: [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8],
    12: [2**-n for n in (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5)],
}  # fmt: skip


@pytest.mark.parametrize("heads", SLOPES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_alibi(heads: int, symmetric: bool) -> None:
    sizes = Sizes(H=heads, Q=17, KV=17)
    _, _, q, k = grid(sizes)
    slope = torch.tensor(SLOPES[heads], dtype=torch.float64)[:, None, None]

    def on_scores(scores):
        return scores + slope * (-(q - k).abs() if symmetric else k - q)

    mask = None if symmetric else CAUSAL
    check_score(mods.alibi(heads, symmetric=symmetric), on_scores, sizes, mask=mask)


def t5_bucket(relative: int, bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    """By the definition: the number of boundaries, of exact and of geometric spacing, passed."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket += num_buckets * (relative > 0)
        relative = abs(relative)
    else:
        relative = max(-relative, 0)
    exact = num_buckets // 2
    if relative < exact:
        return bucket + relative
    step = (max_distance / exact) ** (1 / (num_buckets - exact))
    passed = sum(relative >= exact * step**n - 1e-9 for n in range(1, num_buckets - exact))
    return bucket + exact + passed


def t5_buckets(sizes: Sizes, *rule: Any) -> torch.Tensor:
    return torch.tensor(
        [[t5_bucket(k - q, *rule) for k in range(sizes.KV)] for q in range(sizes.Q)]
    )


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 20), (8, 17)])
def test_t5_bias(bidirectional: bool, num_buckets: int, max_distance: int) -> None:
    table = learned(num_buckets, 2)
    sizes = Sizes(H=2, Q=150, KV=160) if max_distance == 128 else Sizes(H=2, Q=30, KV=35)
    bucket = t5_buckets(sizes, bidirectional, num_buckets, max_distance)
    check_score(
        mods.t5_bias(table, bidirectional=bidirectional, max_distance=max_distance),
        lambda scores: scores + table.double()[bucket].permute(2, 0, 1),
        sizes,
        captures=[table],
    )


# of BIG: columns of a table of distances -4 to 4
COLUMNS = torch.tensor([[min(max(q - k, -4), 4) + 4 for k in range(BIG.KV)] for q in range(BIG.Q)])


def test_relative_bias() -> None:
    table = learned(3, 2 * 4 + 1)
    check_score(
        mods.relative_bias(table),
        lambda scores: scores + table.double()[:, COLUMNS],
        BIG,
        captures=[table],
    )
    alone = learned(3, 1)  # one distance: every key alike
    check_score(
        mods.relative_bias(alone),
        lambda scores: scores + alone.double()[:, :, None],
        BIG,
        captures=[alone],
    )


@pytest.mark.parametrize(
    "shape", [(21, 26), (3, 21, 26), (1, 21, 26), (2, 3, 21, 26), (2, 1, 21, 26), (1, 3, 21, 26)]
)
def test_additive_bias(shape: tuple[int, ...]) -> None:
    bias = learned(*shape)
    check_score(mods.additive_bias(bias), lambda s: s + bias.double(), BIG, captures=[bias])


def test_pair_bias() -> None:
    pair, factor, batched = learned(21, 26), learned(3, seed=6), learned(2, 21, 26)
    check_score(mods.pair_bias(pair), lambda s: s + pair.double(), BIG, captures=[pair])
    check_score(
        mods.pair_bias(batched, factor),
        lambda s: s + factor.double()[:, None, None] * batched.double()[:, None],
        BIG,
        captures=[batched, factor],
    )


def test_head_bias_shows_in_lse_alone() -> None:
    bias = learned(3)
    q, k, v = (normal(2, 3, n, 8, seed=n) for n in (21, 26, 26))
    for backend in BOTH:
        options = {"backend": backend}
        out, aux = flex_attention(
            q, k, v, mods.head_bias(bias), return_aux=AuxRequest(lse=True), kernel_options=options
        )
        scores = q.double() @ k.double().mT / math.sqrt(8)
        close(out, torch.softmax(scores, -1) @ v.double())
        close(aux.lse, torch.logsumexp(scores, -1) + bias.double()[:, None])
        if backend == "cpu":
            continue
        (gradient,) = torch.autograd.grad(aux.lse.sum(), bias)
        close(gradient, torch.full((3,), 2.0 * 21))


@pytest.mark.parametrize("cap", [0.5, 20.0])
def test_softcap(cap: float) -> None:
    check_score(mods.softcap(cap), lambda s: cap * torch.tanh(s / cap), BIG)


@pytest.mark.parametrize(("heads", "dim"), [(3, 128), (2, 16)])
def test_sandwich(heads: int, dim: int) -> None:
    """The sum of the definition: the inner product of two sinusoidal embeddings."""
    sizes = Sizes(H=heads, Q=20, KV=20)
    frequency = 10000.0 ** (-2 * torch.arange(1, dim // 2 + 1, dtype=torch.float64) / dim)
    angle = torch.arange(20)[:, None] * frequency
    embedded = torch.cat([angle.sin(), angle.cos()], -1)
    inner = embedded @ embedded.T - dim / 2
    ratio = torch.arange(1, heads + 1, dtype=torch.float64)[:, None, None] * 8 / heads
    mod = mods.sandwich(heads, 19, dim)
    check_score(mod, lambda s: s + inner / ratio, sizes)


def test_sandwich_shares_what_lies_beyond() -> None:
    mod, far = mods.sandwich(2, 19), mods.sandwich(2, 5)
    at = [torch.tensor(x) for x in (0.0, 0, 1)]
    assert far(*at, torch.tensor(19), torch.tensor(2)) == mod(*at, torch.tensor(5), torch.tensor(0))


def test_distance_decay() -> None:
    sizes = Sizes(H=4, Q=20, KV=20)
    _, _, q, k = grid(sizes)
    gamma = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(4)], dtype=torch.float64)
    decay = gamma[:, None, None] ** (q - k).abs()
    check_score(mods.distance_decay(4), lambda s: torch.log(decay * s.exp()), sizes)


def test_graphormer_spatial() -> None:
    table = learned(6, 3)
    lengths = torch.randint(0, 6, (2, 21, 21), generator=torch.Generator().manual_seed(0))
    sizes = Sizes(B=2, H=3, Q=21, KV=21)
    check_score(
        mods.graphormer_spatial(lengths, table),
        lambda s: s + table.double()[lengths].permute(0, 3, 1, 2),
        sizes,
        captures=[table],
    )
    check_score(
        mods.graphormer_spatial(lengths[0].to(torch.uint8), table),
        lambda s: s + table.double()[lengths[0]].permute(2, 0, 1),
        sizes,
        captures=[table],
    )


@pytest.mark.parametrize("batched", [True, False])
def test_graphormer_edge(batched: bool) -> None:
    N, L, E, heads, d = 12, 3, 7, 2, 4
    generator = torch.Generator().manual_seed(0)
    paths = torch.randint(0, E, (2, N, N, L), generator=generator)
    cut = torch.randint(0, L + 1, (2, N, N, 1), generator=generator)  # 0: no edge at all
    paths = paths.masked_fill(torch.arange(L) >= cut, -1)
    features, weight = learned(2, E, d), learned(L, heads, d, seed=6)
    if not batched:
        paths, features = paths[0], learned(E, d)

    def on_scores(scores):
        """One pair and one edge at a time."""
        rows = []
        for b in range(2):
            path = (paths[b] if batched else paths).tolist()
            vectors = (features[b] if batched else features).double()
            for q in range(N):
                for k in range(N):
                    steps = [e for e in path[q][k] if e >= 0]
                    total = torch.zeros(heads, dtype=torch.float64)
                    for m, edge in enumerate(steps):
                        total = total + weight[m].double() @ vectors[edge] / len(steps)
                    rows.append(total)
        return scores + torch.stack(rows).view(2, N, N, heads).permute(0, 3, 1, 2)

    check_score(
        mods.graphormer_edge(paths, features, weight),
        on_scores,
        Sizes(B=2, H=heads, Q=N, KV=N),
        *(BOTH if batched else ()),
        captures=[features, weight],
    )


def test_temperatures() -> None:
    heat = (1 + normal(3, seed=5).abs()).requires_grad_()
    check_score(
        mods.head_temperature(heat),
        lambda s: s / heat.double()[:, None, None],
        BIG,
        captures=[heat],
    )
    scale = learned(21)
    check_score(
        mods.position_temperature(scale),
        lambda s: s * scale.double()[:, None],
        BIG,
        captures=[scale],
    )
    both = learned(3, 21)
    check_score(
        mods.position_temperature(both), lambda s: s * both.double()[:, :, None], BIG,
        captures=[both],
    )  # fmt: skip


def test_latent_rope() -> None:
    q_rope, k_rope = learned(2, 3, 21, 6), learned(2, 26, 6, seed=6)
    check_score(
        mods.latent_rope(q_rope, k_rope, 0.3),
        lambda s: s + 0.3 * torch.einsum("bhqr,bkr->bhqk", q_rope.double(), k_rope.double()),
        BIG,
        captures=[q_rope, k_rope],
    )


@pytest.mark.parametrize(("canvas", "window"), [((6, 8), (3, 4)), ((5, 5), (2, 2))])
def test_swin_bias(canvas: tuple[int, int], window: tuple[int, int]) -> None:
    tall, wide = window
    table = learned((2 * tall - 1) * (2 * wide - 1), 2)
    S = canvas[0] * canvas[1]

    def place(token: int) -> tuple[int, int, int, int]:
        y, x = divmod(token, canvas[1])
        return y // tall, x // wide, y % tall, x % wide

    def same(b, h, q, k):
        return place(q)[:2] == place(k)[:2]

    row = torch.zeros(S, S, dtype=torch.int64)
    for q in range(S):
        for k in range(S):
            if same(0, 0, q, k):
                (_, _, qy, qx), (_, _, ky, kx) = place(q), place(k)
                row[q, k] = (qy - ky + tall - 1) * (2 * wide - 1) + (qx - kx + wide - 1)
    check_score(
        mods.swin_bias(canvas, window, table),
        lambda s: s + table.double()[row].permute(2, 0, 1),
        Sizes(B=2, H=2, Q=S, KV=S),
        *(BOTH if canvas == (6, 8) else ()),
        captures=[table],
        mask=(mods.swin_window(canvas, window), same),
    )


def test_all_in_one_kernel() -> None:
    """One after the other, values and gradients by the kernels of the CPU."""
    B, H, Q, KV = BIG.shape
    _, _, q, k = grid(BIG)
    slope = torch.tensor(SLOPES[H], dtype=torch.float64)[:, None, None]
    decay = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(H)], dtype=torch.float64)
    lengths = torch.randint(0, 6, (B, Q, KV), generator=torch.Generator().manual_seed(0))
    buckets = t5_buckets(BIG, True, 32, 20)
    relative, t5, spatial = learned(H, 9), learned(32, H, seed=6), learned(6, H, seed=7)
    full, pairs, factor = learned(B, H, Q, KV), learned(B, Q, KV, seed=6), learned(H, seed=7)
    heat = (1 + normal(H, seed=5).abs()).requires_grad_()
    sharp, cap = learned(H, Q), torch.tensor([3.0], requires_grad=True)
    q_rope, k_rope = learned(B, H, Q, 6), learned(B, KV, 6, seed=6)
    mods_and_formulas = [
        (mods.alibi(H), lambda s: s + slope * (k - q)),
        (mods.distance_decay(H), lambda s: s + decay.log()[:, None, None] * (q - k).abs()),
        (mods.relative_bias(relative), lambda s: s + relative.double()[:, COLUMNS]),
        (
            mods.t5_bias(t5, max_distance=20),
            lambda s: s + t5.double()[buckets].permute(2, 0, 1),
        ),
        (
            mods.graphormer_spatial(lengths, spatial),
            lambda s: s + spatial.double()[lengths].permute(0, 3, 1, 2),
        ),
        (mods.additive_bias(full), lambda s: s + full.double()),
        (
            mods.pair_bias(pairs, factor),
            lambda s: s + factor.double()[:, None, None] * pairs.double()[:, None],
        ),
        (mods.head_temperature(heat), lambda s: s / heat.double()[:, None, None]),
        (mods.position_temperature(sharp), lambda s: s * sharp.double()[:, :, None]),
        (
            mods.latent_rope(q_rope, k_rope, 0.3),
            lambda s: s + 0.3 * torch.einsum("bhqr,bkr->bhqk", q_rope.double(), k_rope.double()),
        ),
        (mods.softcap(cap), lambda s: cap.double() * torch.tanh(s / cap.double())),
    ]
    check_score(
        mods.compose(*(mod for mod, _ in mods_and_formulas)),
        lambda s: functools.reduce(lambda x, step: step[1](x), mods_and_formulas, s),
        BIG,
        "cpu",
        "cpu gradients",
        captures=[
            relative, t5, spatial, full, pairs, factor, heat, sharp, cap, q_rope, k_rope,
        ],
    )  # fmt: skip
