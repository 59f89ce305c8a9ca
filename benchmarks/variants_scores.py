"""Examples of score_mods, and of mods made of mods."""

from __future__ import annotations

from benchmarks.variant import Variant

SCORES_AND_COMBINATORS: tuple[Variant, ...] = (
    Variant(
        ("alibi",),
        "score",
        "Penalises distance linearly, one slope a head.",
        """\
mask_mod = mods.causal_mask
score_mod = mods.alibi(num_heads=H)
""",
    ),
    Variant(
        ("t5_bias",),
        "score",
        "A learned bias for each bucket of distance.",
        """\
table = torch.randn(32, H).requires_grad_()
score_mod = mods.t5_bias(table)
""",
    ),
    Variant(
        ("relative_bias",),
        "score",
        "A learned bias for each distance.",
        """\
mask_mod = mods.causal_mask

table = torch.randn(H, 2 * 32 + 1).requires_grad_()
score_mod = mods.relative_bias(table)
""",
    ),
    Variant(
        ("additive_bias",),
        "score",
        "A full bias, one number a score.",
        """\
bias = torch.randn(H, S, S)
score_mod = mods.additive_bias(bias)
""",
    ),
    Variant(
        ("pair_bias",),
        "score",
        "One number a pair of tokens, weighted by head.",
        """\
bias = torch.randn(S, S)
score_mod = mods.pair_bias(bias, factor=torch.linspace(0.5, 2.0, H))
""",
    ),
    Variant(
        ("head_bias",),
        "score",
        "One number a head, which shows in lse.",
        """\
mask_mod = mods.causal_mask
score_mod = mods.head_bias(torch.linspace(-1.0, 1.0, H))
""",
    ),
    Variant(
        ("swin_bias",),
        "score",
        "A bias by the distance on both axes, in windows.",
        """\
side, M = math.isqrt(S), math.isqrt(S) // 2
table = torch.randn((2 * M - 1) ** 2, H)
score_mod = mods.swin_bias((side, side), M, table)
mask_mod = mods.swin_window((side, side), M)
""",
    ),
    Variant(
        ("sandwich",),
        "score",
        "The inner product of sinusoidal embeddings.",
        """\
mask_mod = mods.causal_mask
score_mod = mods.sandwich(num_heads=H, max_distance=S - 1)
""",
    ),
    Variant(
        ("distance_decay",),
        "score",
        "Weights fall by a factor a token.",
        """\
mask_mod = mods.causal_mask
score_mod = mods.distance_decay(num_heads=H)
""",
    ),
    Variant(
        ("graphormer_spatial",),
        "score",
        "A learned bias by the distance in a graph (here a ring).",
        """\
place = torch.arange(S)
around = (place[:, None] - place).abs()
distances = torch.minimum(around, S - around).clamp(max=15)
table = torch.randn(16, H).requires_grad_()
score_mod = mods.graphormer_spatial(distances, table)
""",
    ),
    Variant(
        ("graphormer_edge",),
        "score",
        "Features of the edges on the path between two nodes (here a ring).",
        """\
place, step = torch.arange(S), torch.arange(3)
ahead = (place - place[:, None]) % S
paths = torch.where(step < ahead[..., None], (place[:, None, None] + step) % S, -1)
features, weight = torch.randn(S, 4), torch.randn(3, H, 4)
score_mod = mods.graphormer_edge(paths, features, weight)
""",
    ),
    Variant(
        ("softcap",),
        "score",
        "Keeps scores within bounds, smoothly.",
        """\
mask_mod = mods.causal_mask
score_mod = mods.softcap(cap=20.0)
""",
    ),
    Variant(
        ("head_temperature",),
        "score",
        "One temperature a head.",
        """\
mask_mod = mods.causal_mask
score_mod = mods.head_temperature(torch.linspace(0.5, 2.0, H))
""",
    ),
    Variant(
        ("position_temperature",),
        "score",
        "Sharper with the number of keys in sight.",
        """\
mask_mod = mods.causal_mask
score_mod = mods.position_temperature(0.4 * torch.arange(2, S + 2).log())
""",
    ),
    Variant(
        ("latent_rope",),
        "score",
        "The rotary part of latent attention, its key shared by all heads.",
        """\
mask_mod = mods.causal_mask

q_rope, k_rope = torch.randn(B, H, S, 8), torch.randn(B, S, 8)
score_mod = mods.latent_rope(q_rope, k_rope, scale=0.1)
""",
    ),
    Variant(
        ("not_mask",),
        "combinator",
        "What a mask drops.",
        "mask_mod = mods.not_mask(mods.bidirectional_window(S // 8))",
    ),
    Variant(
        ("xor_masks",),
        "combinator",
        "What one of two masks keeps, and not both.",
        "mask_mod = mods.xor_masks(mods.causal_mask, mods.bidirectional_window(S // 4))",
    ),
    Variant(
        ("and_masks",),
        "combinator",
        "What both masks keep.",
        "mask_mod = mods.and_masks(mods.causal_mask, mods.spatial_head(S // 8, 1))",
    ),
    Variant(
        ("or_masks",),
        "combinator",
        "What one of two masks keeps.",
        "mask_mod = mods.or_masks(mods.sliding_window(S // 8), mods.fixed_sparse(S // 8, 2))",
    ),
    Variant(
        ("compose",),
        "combinator",
        "One score_mod after the other.",
        """\
mask_mod = mods.causal_mask
score_mod = mods.compose(mods.alibi(H), mods.softcap(20.0))
""",
    ),
    Variant(
        ("per_head",),
        "combinator",
        "A mask of its own for each head.",
        """\
kinds = [mods.sliding_window(S // 16), mods.window_with_sinks(S // 8, 4), mods.causal_mask]
mask_mod = mods.per_head(*kinds, heads=[h % 3 for h in range(H)])
""",
        mask_axes="h",
    ),
    Variant(
        ("offset",),
        "combinator",
        "A mask of the whole sequence for its last part.",
        """\
window = mods.sliding_window(S // 2)
mask_mod = mods.offset(window, q_offset=S // 2)
""",
        q_len="S // 2",
    ),
    Variant(
        ("on_documents",),
        "combinator",
        "A mask inside each document: here each has its own prefix.",
        """\
cu_seqlens = torch.tensor([0, S // 4, S // 2, S])
mask_mod = mods.on_documents(mods.prefix_lm([S // 8, 0, S // 4]), cu_seqlens=cu_seqlens)
""",
    ),
    Variant(
        ("logical_to_physical",),
        "combinator",
        "A mask of positions, for keys in the slots of a paged cache.",
        """\
pages = torch.randperm(8)
positions = (pages[:, None] * (S // 8) + torch.arange(S // 8)).flatten()
mask_mod = mods.logical_to_physical(mods.sliding_window(S // 4), torch.arange(S), positions)
""",
    ),
)
