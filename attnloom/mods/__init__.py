"""Published variants of attention, one idea a file.

Each name is a factory that returns a score_mod or a mask_mod for flex_attention and
create_block_mask (`causal_mask` and `noop_mask` are mask_mods themselves).
"""

from attnloom.api.masks import and_masks, noop_mask, or_masks
from attnloom.mods.alibi import alibi
from attnloom.mods.causal import causal_lower_right, causal_mask
from attnloom.mods.documents import documents, documents_from_cu_seqlens
from attnloom.mods.sliding_window import sliding_window
from attnloom.mods.softcap import softcap

__all__ = [
    "alibi",
    "and_masks",
    "causal_lower_right",
    "causal_mask",
    "documents",
    "documents_from_cu_seqlens",
    "noop_mask",
    "or_masks",
    "sliding_window",
    "softcap",
]
