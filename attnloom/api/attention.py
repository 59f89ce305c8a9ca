"""flex_attention: the one function that most callers need."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from attnloom.api import autocast, cached, jagged, near, pipeline, quantized, sharded, validate
from attnloom.api.call import Call
from attnloom.api.options import FlexKernelOptions
from attnloom.block_mask import BlockMask
from attnloom.errors import OptionError
from attnloom.masking.decode import DecodeMask
from attnloom.paged import PagedKV, PagedKVCache
from attnloom.trace.dtensor import is_dtensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_shown: set[str] = set()


class AuxRequest(NamedTuple):
    """Which auxiliary outputs flex_attention computes beside the attention output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """Auxiliary outputs of flex_attention; None where not requested.

    lse: [B, Hq, Q_LEN] natural logarithm of the sum of exponentials of a row's scores; -inf for a
        row without keys. Differentiable.
    max_scores: [B, Hq, Q_LEN] greatest score of a row after score_mod; -inf for a row without
        keys. Not differentiable.
    Both are float32, or float64 for float64 inputs.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


@overload
def flex_attention(
    query: Tensor,
    key: Tensor | PagedKV | PagedKVCache,
    value: Tensor | None = None,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | DecodeMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: FlexKernelOptions | None = ...,
    *,
    return_aux: None = ...,
    q_descale: float | Tensor | None = ...,
    k_descale: float | Tensor | None = ...,
    v_descale: float | Tensor | None = ...,
) -> Tensor: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor | PagedKV | PagedKVCache,
    value: Tensor | None = None,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | DecodeMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[True] = ...,
    kernel_options: FlexKernelOptions | None = ...,
    *,
    return_aux: None = ...,
    q_descale: float | Tensor | None = ...,
    k_descale: float | Tensor | None = ...,
    v_descale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor | PagedKV | PagedKVCache,
    value: Tensor | None = None,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | DecodeMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: bool = ...,
    kernel_options: FlexKernelOptions | None = ...,
    *,
    return_aux: AuxRequest,
    q_descale: float | Tensor | None = ...,
    k_descale: float | Tensor | None = ...,
    v_descale: float | Tensor | None = ...,
) -> tuple[Tensor, AuxOutput]: ...


def flex_attention(
    query: Tensor,
    key: Tensor | PagedKV | PagedKVCache,
    value: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | DecodeMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
    q_descale: float | Tensor | None = None,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Scaled dot-product attention with a traced score_mod and a block-sparse mask, fused.

        score = score_mod(scale * query @ key^T, b, h, q_idx, kv_idx), -inf where masked
        out = softmax(score) @ value

    A drop-in for torch.nn.attention.flex_attention.flex_attention. A plain eager call is already
    fused, in both directions; no path allocates Q_LEN x KV_LEN elements. Under torch.compile the
    call runs beside the compiled graph.

    Args:
        query: [B, Hq, Q_LEN, D]; float64, float32, bfloat16 or float16; any strides. float8_e4m3fn
            and float8_e5m2 are computed as bfloat16, which out then is. DTensors may be sharded
            along batch and heads; mods see positions of the whole. Or, with key and value, a nested
            tensor [B, Hq, jagged, D] (torch.jagged): every sequence attends to itself, mods see its
            number as b and count positions from its start.
        key: [Bkv, Hkv, KV_LEN, D]; Bkv is B, or 1 to share one key and value over the batch.
            Dtypes of query, key and value may differ; 8 bits are read as they lie where no gradient
            is wanted. Or a PagedKV or PagedKVCache, which holds keys and values of sequences of any
            lengths; mods then see positions in the sequence.
        value: [Bkv, Hkv, KV_LEN, Dv]; left out where key is a cache.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score on one score at a time; score
            is float32 (float64 if any input is), the positions are integers. Captured tensors
            may require grad. None leaves scores as they are.
        block_mask: made by create_block_mask or a constructor of BlockMask for Q_LEN and KV_LEN;
            its batch and heads are 1 or those of query. Over a cache the mask of whole sequences,
            or a DecodeMask where the cache is a tensor. For nested tensors made by
            create_nested_block_mask.
        scale: factor on query @ key^T; 1 / sqrt(D) if None.
        enable_gqa: allow Hq to be a multiple of Hkv; query head h reads key head h // (Hq / Hkv).
        return_lse: deprecated, use return_aux=AuxRequest(lse=True).
        kernel_options: see FlexKernelOptions.
        return_aux: which auxiliary outputs to return.
        q_descale, k_descale, v_descale: what quantised query, key and value are to be multiplied by
            (FlashAttention-3's names): a number, or a tensor [B, Hkv] of which each size may be 1;
            q_descale may be [B, Hq] too. Scores are multiplied before the score_mod.
    Returns:
        out [B, Hq, Q_LEN, Dv] in query's dtype; with return_aux the tuple (out, AuxOutput); with
        return_lse the tuple (out, lse). A row without keys has out 0 and lse -inf and gives no
        gradient. Under torch.autocast the inputs are cast to its dtype first.
    Raises:
        ShapeError, DtypeError, OptionError: a ValueError each; DeviceError: a RuntimeError.
        TraceError: a mod does something that cannot be placed inside a kernel.
        UnsupportedError: an explicitly chosen backend cannot run the problem; nested tensors of
            the strided layout, with holes, or beside dense ones.
    Source: Dong et al. 2024, arXiv:2412.05496.
    """
    compiling = torch.compiler.is_dynamo_compiling()
    if (
        return_lse is False
        and return_aux is None
        and not compiling
        and q_descale is None
        and k_descale is None
        and v_descale is None
    ):
        known = near.run(
            query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options
        )
        if known is not None:
            return known
    if type(return_lse) is not bool or type(return_aux) not in (type(None), AuxRequest):
        validate.check_outputs(return_lse, return_aux)
    if return_lse:
        _check_return_lse(return_aux)
    run = _beside_graph if compiling else _run
    descale = None
    if q_descale is not None or k_descale is not None or v_descale is not None:
        descale = quantized.Descale(q_descale, k_descale, v_descale)
    want_max_scores = return_aux is not None and return_aux.max_scores
    call = Call(query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options)
    out, lse, max_scores = run(call, want_max_scores, descale)
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, max_scores)
    return (out, lse) if return_lse else out


def _run(call: Call, want_max_scores: bool, descale: quantized.Descale | None) -> pipeline.Outputs:
    query, key, value = call.query, call.key, call.value
    if isinstance(key, cached.CACHES):
        return _run_over_cache(call, want_max_scores, descale)
    if isinstance(query, Tensor) and autocast.is_on(query):
        device = query.device
        query, key, value = (autocast.lowered(x, device) for x in (query, key, value))
        call = call.on(query, key, value)
    if quantized.has_eight_bits(query, key, value):
        call = quantized.readable(call, descale)
    if descale is not None:
        return quantized.run(descale, call, want_max_scores)
    if is_dtensor(query, key, value):
        return sharded.run(call, want_max_scores)
    if jagged.is_nested(query, key, value):
        return jagged.run(call, want_max_scores)
    return pipeline.run(call, want_max_scores)


def _run_over_cache(
    call: Call, want_max_scores: bool, descale: quantized.Descale | None
) -> pipeline.Outputs:
    query = call.query
    sharded.check_plain(query)
    kv = cached.opened(query, call.key, call.value)
    if autocast.is_on(query):
        query = autocast.lowered(query, query.device)
    if quantized.has_eight_bits(query, kv.key, kv.value):
        query = quantized.beside_pages(query, kv.key, kv.value)
    call = call.on(query, kv.key, kv.value)
    if descale is not None:
        return quantized.run(descale, call, want_max_scores, kv.table)
    return pipeline.run(call, want_max_scores, kv.table)


# Dynamo leaves its graph here: tracing a mod is our own compiler's work.
_beside_graph = torch._disable_dynamo(_run)


def _check_return_lse(return_aux: AuxRequest | None) -> None:
    if return_aux is not None:
        raise OptionError(
            "return_lse and return_aux are both given; return_lse is deprecated. Keep only "
            "return_aux=AuxRequest(lse=True)."
        )
    if "return_lse" not in _shown:
        _shown.add("return_lse")
        warnings.warn(
            "return_lse is deprecated; use return_aux=AuxRequest(lse=True) instead.",
            FutureWarning,
            stacklevel=3,
        )
