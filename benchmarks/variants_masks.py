"""Examples of masks."""

from __future__ import annotations

from benchmarks.variant import Variant

MASKS: tuple[Variant, ...] = (
    Variant(
        ("causal_mask",),
        "mask",
        "Each token sees itself and what comes before it.",
        "mask_mod = mods.causal_mask",
    ),
    Variant(
        ("causal_lower_right",),
        "mask",
        "The last queries of a sequence, whose keys are cached: the last query sees the last key.",
        "mask_mod = mods.causal_lower_right(q_len=S, kv_len=S + S // 2)",
        kv_len="S + S // 2",
    ),
    Variant(
        ("sliding_window",),
        "mask",
        "Causal, a number of tokens back.",
        "mask_mod = mods.sliding_window(window_left=S // 8)",
    ),
    Variant(
        ("bidirectional_window",),
        "mask",
        "A number of tokens on each side.",
        "mask_mod = mods.bidirectional_window(window_left=S // 8)",
    ),
    Variant(
        ("window_with_sinks",),
        "mask",
        "A window, and the first tokens for ever.",
        "mask_mod = mods.window_with_sinks(window_left=S // 8, num_sinks=4)",
    ),
    Variant(
        ("dilated_window",),
        "mask",
        "Every second token of a window twice as long.",
        "mask_mod = mods.dilated_window(window_left=S // 8, dilation=2)",
    ),
    Variant(
        ("strided_sparse",),
        "mask",
        "The last tokens, and every n-th one before.",
        "mask_mod = mods.strided_sparse(stride=math.isqrt(S))",
    ),
    Variant(
        ("fixed_sparse",),
        "mask",
        "The own block, and the last tokens of every block before.",
        "mask_mod = mods.fixed_sparse(stride=math.isqrt(S), num_summary=2)",
    ),
    Variant(
        ("longformer",),
        "mask",
        "A window, and tokens that see everything and that everything sees.",
        """\
is_global = torch.zeros(S, dtype=torch.bool)
is_global[[0, S // 2]] = True
mask_mod = mods.longformer(window_left=S // 16, is_global=is_global)
""",
    ),
    Variant(
        ("bigbird",),
        "mask",
        "Window, global and random blocks.",
        "mask_mod = mods.bigbird(S, block_size=S // 16, num_global=1, num_random=2)",
    ),
    Variant(
        ("topk_blocks",),
        "mask",
        "Blocks of keys that each block of queries chooses by a score.",
        """\
size = min(128, S // 4)                                # tokens of a block
n = S // size
scores = torch.randn(B, H, n, n)
scores += torch.full((n, n), -torch.inf).triu(1)        # no block of the future
scores.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)      # always the own block
mask_mod = mods.and_masks(mods.causal_mask, mods.topk_blocks(scores, k=2, block_size=size))
""",
        mask_axes="bh",
    ),
    Variant(
        ("selected_blocks",),
        "mask",
        "Blocks of keys that each block of queries is given.",
        """\
size = min(128, S // 4)
own = torch.arange(S // size)
indices = torch.stack([own, (own - 2).clamp(min=0), own // 2], dim=1)
mask_mod = mods.selected_blocks(indices, kv_len=S, block_size=size)
""",
    ),
    Variant(
        ("prefix_lm",),
        "mask",
        "A prefix that sees itself in both directions, then causal text.",
        "mask_mod = mods.prefix_lm(prefix_length=S // 4)",
    ),
    Variant(
        ("documents",),
        "mask",
        "Documents by the id of each token.",
        """\
ids = torch.arange(S) // (S // 5)
mask_mod = mods.documents(ids)
""",
    ),
    Variant(
        ("documents_from_cu_seqlens",),
        "mask",
        "Documents packed into one row, here causal inside each.",
        """\
cu_seqlens = torch.tensor([0, S // 8, S // 2, S // 2 + 1, S])
packed = mods.documents_from_cu_seqlens(cu_seqlens)
mask_mod = mods.and_masks(mods.causal_mask, packed)
""",
    ),
    Variant(
        ("shared_prefix",),
        "mask",
        "One prefix for many documents that continue it.",
        """\
ends = torch.tensor([0, S // 4, S // 2, S - S // 4])
mask_mod = mods.shared_prefix(prefix_length=S // 4, cu_seqlens=ends)
""",
    ),
    Variant(
        ("right_padding",),
        "mask",
        "Keys at the end of short batch entries are hidden.",
        """\
lengths = torch.tensor([S - S // 4 - b for b in range(B)])
mask_mod = mods.right_padding(lengths)
""",
        mask_axes="b",
    ),
    Variant(
        ("left_padding",),
        "mask",
        "Keys before the start of a prompt are hidden.",
        """\
num_padding = torch.tensor([S // 4 + b for b in range(B)])
mask_mod = mods.and_masks(mods.causal_mask, mods.left_padding(num_padding))
""",
        mask_axes="b",
    ),
    Variant(
        ("key_padding",),
        "mask",
        "Keys that a table marks are hidden.",
        """\
place = torch.arange(S)
attention_mask = torch.stack([(place + b * S // 8) % (S // 2) < S // 4 for b in range(B)])
mask_mod = mods.key_padding(attention_mask)
""",
        mask_axes="b",
    ),
    Variant(
        ("block_diffusion",),
        "mask",
        "Noisy blocks first, then the clean text that they continue.",
        "mask_mod = mods.block_diffusion(seq_len=S // 2, block_size=S // 16)",
    ),
    Variant(
        ("token_tree",),
        "mask",
        "Drafted tokens see the prefix, their ancestors and themselves.",
        """\
parents = [(n - 1) // 3 for n in range(S // 2)]         # a tree of three children a node
parents[0] = -1
mask_mod = mods.token_tree(parents, prefix_length=S // 2)
""",
        q_len="S // 2",
    ),
    Variant(
        ("token_tree_from_bits",),
        "mask",
        "The same from one bit for each pair of drafted tokens.",
        """\
parents = [max(n - 1 - n % 3, 0) if n else -1 for n in range(S // 2)]
bits = mods.ancestor_bits(parents)
mask_mod = mods.token_tree_from_bits(bits, prefix_length=S // 2)
""",
        q_len="S // 2",
    ),
    Variant(
        ("flamingo",),
        "mask",
        "Text sees the last image before it.",
        """\
media_locations = torch.arange(S) % (S // 4) == 3       # four images in the text
mask_mod = mods.flamingo(media_locations, tokens_per_image=S // 4)
""",
    ),
    Variant(
        ("neighborhood",),
        "mask",
        "Each token of an image sees a kernel around it, moved inside at borders.",
        """\
side = math.isqrt(S)
mask_mod = mods.neighborhood((side, side), kernel_size=side // 4 + 1)
""",
    ),
    Variant(
        ("neighborhood", "tiled_order"),
        "mask",
        "The same with tokens in tiles, so that neighbours share blocks.",
        """\
canvas = (math.isqrt(S), math.isqrt(S))
order = mods.tiled_order(canvas, tile=4)
mask_mod = mods.neighborhood(canvas, canvas[0] // 4 + 1, order=order)
""",
    ),
    Variant(
        ("neighborhood", "morton_order"),
        "mask",
        "The same along the Morton curve.",
        """\
canvas = (math.isqrt(S), math.isqrt(S))
order = mods.morton_order(canvas)
mask_mod = mods.neighborhood(canvas, canvas[0] // 4 + 1, order=order)
""",
    ),
    Variant(
        ("neighborhood", "dilation"),
        "mask",
        "With gaps along one axis, and causal along the other.",
        """\
side = math.isqrt(S)
mask_mod = mods.neighborhood(
    (side, side), kernel_size=(side // 4, side // 4), dilation=(1, 2), is_causal=(True, False)
)
""",
    ),
    Variant(
        ("sliding_tile",),
        "mask",
        "A window of whole tiles of a video.",
        """\
side = round(S ** (1 / 3))
mask_mod = mods.sliding_tile((side, side, side), tile=side // 4, window=3)
""",
        cubic=True,
    ),
    Variant(
        ("swin_window",),
        "mask",
        "Windows of an image, shifted by half of one.",
        """\
side = math.isqrt(S)
mask_mod = mods.swin_window((side, side), window=side // 2, shift=side // 4)
""",
    ),
    Variant(
        ("spatial_head",),
        "mask",
        "A token of a video sees its own frame and the frames beside it.",
        "mask_mod = mods.spatial_head(frame_size=S // 8, window_frames=1)",
    ),
    Variant(
        ("temporal_head",),
        "mask",
        "A token of a video sees its place in every frame.",
        "mask_mod = mods.temporal_head(frame_size=S // 8, window_tokens=1)",
    ),
)
