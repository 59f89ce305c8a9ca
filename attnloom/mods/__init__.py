"""Published variants of attention, one idea a file.

Each name is a factory that returns a score_mod or a mask_mod for flex_attention and
create_block_mask; `causal_mask` and `noop_mask` are mask_mods themselves.
"""

from attnloom.api.masks import and_masks, noop_mask, or_masks
from attnloom.mods.additive_bias import additive_bias, head_bias, pair_bias
from attnloom.mods.alibi import alibi
from attnloom.mods.bidirectional_window import bidirectional_window
from attnloom.mods.bigbird import bigbird
from attnloom.mods.block_diffusion import block_diffusion
from attnloom.mods.causal import causal_lower_right, causal_mask
from attnloom.mods.compose import compose
from attnloom.mods.dilated_window import dilated_window
from attnloom.mods.distance_decay import distance_decay
from attnloom.mods.documents import documents, documents_from_cu_seqlens
from attnloom.mods.fixed_sparse import fixed_sparse
from attnloom.mods.flamingo import flamingo
from attnloom.mods.graphormer import graphormer_edge, graphormer_spatial
from attnloom.mods.latent_rope import latent_rope
from attnloom.mods.logic import not_mask, xor_masks
from attnloom.mods.logical_to_physical import logical_to_physical
from attnloom.mods.longformer import longformer
from attnloom.mods.neighborhood import neighborhood
from attnloom.mods.offset import offset
from attnloom.mods.on_documents import on_documents
from attnloom.mods.padding import key_padding, left_padding, right_padding
from attnloom.mods.per_head import per_head
from attnloom.mods.prefix_lm import prefix_lm
from attnloom.mods.relative_bias import relative_bias
from attnloom.mods.sandwich import sandwich
from attnloom.mods.shared_prefix import shared_prefix
from attnloom.mods.sliding_tile import sliding_tile
from attnloom.mods.sliding_window import sliding_window
from attnloom.mods.softcap import softcap
from attnloom.mods.strided_sparse import strided_sparse
from attnloom.mods.swin import swin_bias, swin_window
from attnloom.mods.t5_bias import t5_bias
from attnloom.mods.temperature import head_temperature, position_temperature
from attnloom.mods.token_order import TokenOrder, morton_order, tiled_order
from attnloom.mods.token_tree import ancestor_bits, token_tree, token_tree_from_bits
from attnloom.mods.topk_blocks import selected_blocks, topk_blocks
from attnloom.mods.video_heads import spatial_head, temporal_head
from attnloom.mods.window_with_sinks import window_with_sinks

__all__ = [
    # masks: along the sequence
    "causal_mask",
    "causal_lower_right",
    "sliding_window",
    "bidirectional_window",
    "window_with_sinks",
    "dilated_window",
    "strided_sparse",
    "fixed_sparse",
    "longformer",
    "bigbird",
    "topk_blocks",
    "selected_blocks",
    # masks: several texts in one
    "prefix_lm",
    "documents",
    "documents_from_cu_seqlens",
    "shared_prefix",
    "right_padding",
    "left_padding",
    "key_padding",
    "block_diffusion",
    "token_tree",
    "token_tree_from_bits",
    "ancestor_bits",
    "flamingo",
    # masks: images and videos
    "neighborhood",
    "sliding_tile",
    "TokenOrder",
    "tiled_order",
    "morton_order",
    "swin_window",
    "spatial_head",
    "temporal_head",
    # scores
    "alibi",
    "t5_bias",
    "relative_bias",
    "additive_bias",
    "pair_bias",
    "head_bias",
    "swin_bias",
    "sandwich",
    "distance_decay",
    "graphormer_spatial",
    "graphormer_edge",
    "softcap",
    "head_temperature",
    "position_temperature",
    "latent_rope",
    # mods from mods
    "and_masks",
    "or_masks",
    "not_mask",
    "xor_masks",
    "noop_mask",
    "compose",
    "per_head",
    "offset",
    "on_documents",
    "logical_to_physical",
]
