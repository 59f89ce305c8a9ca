"""A call over a cache that is checked and planned once, for many layers and many steps."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attnloom.api import broadcast, cached, validate
from attnloom.api.attention import ScoreMod
from attnloom.api.masks import noop_mask
from attnloom.api.options import read_options
from attnloom.api.planning import plan_launch
from attnloom.backends.registry import Again
from attnloom.block_mask import BlockMask
from attnloom.masking import short_captures
from attnloom.paged import PagedKV
from attnloom.plan.problem import compute_type
from attnloom.trace.tracer import trace_mask, trace_score


class PreparedAttention:
    """flex_attention(query, kv, ...) for queries of one form over caches of one form and one table,
    in inference: what such calls share is decided here, and they give keys and values alone.

    What kernels read may change in place: the table, and tensors that mods capture.
    """

    def __init__(
        self,
        query: Tensor,
        kv: PagedKV,
        score_mod: ScoreMod | None,
        block_mask: BlockMask,
        scale: float,
    ) -> None:
        """Check and plan the first of the calls, as flex_attention does with enable_gqa.

        Raises:
            as flex_attention.
        """
        validate.check_inputs(query, kv.key, kv.value, True, True)
        factor = validate.read_scale(scale, query.size(3))
        cached.check(query, kv.key, kv.table, block_mask)
        score = mask = None
        if score_mod is not None:
            validate.check_score_mod(score_mod)
            validate.check_extent(score_mod, query, kv.key, True)
            real = compute_type(query.dtype, kv.key.dtype, kv.value.dtype)
            score = trace_score(score_mod, real, query.device)
            reach = validate.reach(query, kv.key, kv.table)
            short_captures.warn("score_mod", score_mod, score, reach)
        if block_mask.mask_mod is not noop_mask:
            mask = trace_mask(block_mask.mask_mod, query.device)
            broadcast.check(block_mask, mask, query)
        options = read_options(None)
        launch, self._tensors = plan_launch(
            (query, kv.key, kv.value), score, mask, block_mask.lists(), factor, options, kv.table
        )
        # On the CPU; on a device a graph is captured, and eager calls over pages start as they are.
        again = Again() if query.device.type == "cpu" else None
        self._launch = replace(launch, again=again)

    def __call__(self, query: Tensor, kv: PagedKV) -> Tensor:
        """[B, Hq, Q_LEN, Dv] of inputs like the first ones."""
        launch, tensors = self._launch, self._tensors
        return cached.attention(launch, query, kv.key, kv.value, tensors, False)[0]
