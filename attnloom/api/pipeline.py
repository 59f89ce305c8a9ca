"""The whole compiler on one screen: validate, trace, run passes, plan, launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnloom.api import autograd, bounds_check, broadcast, cached, near, repeats, validate
from attnloom.api.call import Call
from attnloom.api.masks import noop_mask
from attnloom.api.options import read_options
from attnloom.api.planning import plan_launch
from attnloom.backends.reference import paged_forward, reference_forward
from attnloom.block_mask import BlockMask
from attnloom.ir.node import BoundProgram
from attnloom.masking import short_captures, versions
from attnloom.masking.decode import DecodeMask
from attnloom.paged import PageTable
from attnloom.plan.problem import KernelOptions, compute_type
from attnloom.trace.tracer import trace_mask, trace_score

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def run(call: Call, want_max_scores: bool, table: PageTable | None = None) -> Outputs:
    """out, lse and max_scores (None unless wanted) of one call of flex_attention.

    table: of keys and values in pages.
    """
    query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options = call
    place = None
    if table is None and not isinstance(block_mask, DecodeMask):
        place = repeats.key_of(call)
        known = None if place is None else repeats.find(place, call)
        if known is not None:
            bucket, launch, tensors = known
            near.note(call, bucket)
            return autograd.attention_again(launch, query, key, value, tensors, want_max_scores)
    validate.check_inputs(query, key, value, enable_gqa, table is not None)
    if isinstance(block_mask, DecodeMask):
        table, whole = cached.table_of(block_mask, table), block_mask.mask
    else:
        whole = block_mask
    factor = validate.read_scale(scale, query.size(3))
    options = read_options(kernel_options)
    lists = mask_mod = score = mask = None
    if table is not None:
        cached.check(query, key, table, whole)
    elif whole is not None:
        validate.check_mask(whole, query, key)
    if score_mod is not None:
        validate.check_score_mod(score_mod)
        validate.check_extent(score_mod, query, key, table is not None)
    if whole is not None:
        lists, mask_mod = whole.lists(), whole.mask_mod
        if mask_mod is not noop_mask:
            mask = _traced_mask(whole, query, validate.reach(query, key, table))
    if options.backend == "reference":
        if table is None:
            result = reference_forward(query, key, value, score_mod, mask_mod, lists, factor)
        else:
            result = paged_forward(query, key, value, table, score_mod, whole, factor)
        return result.out, result.lse, result.max_scores if want_max_scores else None

    device = query.device
    if score_mod is not None:
        score = trace_score(score_mod, compute_type(query.dtype, key.dtype, value.dtype), device)
        _warn_of_score(score_mod, score, options, validate.reach(query, key, table))
    launch, tensors = plan_launch((query, key, value), score, mask, lists, factor, options, table)
    if table is not None:
        cached.check_inference(query, key, value, *tensors)
    if options.debug_bounds:
        bounds_check.check(launch.call(query, key, value, tensors), score_mod, mask_mod)
    elif place is not None:
        repeats.keep(place, call, launch)
    attend = autograd.attention if table is None else cached.attention
    return attend(launch, query, key, value, tensors, want_max_scores)


def _traced_mask(whole: BlockMask, query: torch.Tensor, reach: dict[str, int]) -> BoundProgram:
    mask = trace_mask(whole.mask_mod, query.device)
    versions.check(whole, mask)
    broadcast.check(whole, mask, query)
    validate.warn_of_mask_gradients(whole.mask_mod, mask)
    if not whole._lists_of_mod:  # create_block_mask has looked at its own
        short_captures.warn("mask_mod", whole.mask_mod, mask, reach)
    return mask


def _warn_of_score(
    score_mod: Callable[..., Any],
    score: BoundProgram,
    options: KernelOptions,
    reach: dict[str, int],
) -> None:
    if not options.debug_bounds:  # which knows the lanes that matter
        short_captures.warn("score_mod", score_mod, score, reach)
