"""Inputs of 8-bit floating point, and factors that undo a quantisation.

Keys and values of 8 bits are read as they lie by the kernels that can (the CPU's, and Triton's from
compute capability 8.9 on), so that a cache takes half the memory of bfloat16. Every number of
float8_e4m3fn and float8_e5m2 is a number of bfloat16 and of float16 too: elsewhere, and where a
gradient is wanted, inputs are converted first and nothing is lost but memory.

A factor on queries or keys becomes one on scores, in float32, before the score_mod; one on values
becomes one on out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from attnloom.api import pipeline, validate
from attnloom.api.autograd import num_dispatch_modes, transforms_active
from attnloom.api.call import Call
from attnloom.api.validate import EIGHT_BITS
from attnloom.errors import DeviceError, DtypeError, OptionError, ShapeError, UnsupportedError
from attnloom.masking.arguments import shown
from attnloom.masking.captures import captured_tensors
from attnloom.masking.known_masks import lookup
from attnloom.paged import PageTable
from attnloom.trace.dtensor import is_dtensor

_HALVES = (torch.bfloat16, torch.float16)
_READS_EIGHT_BITS = (8, 9)  # compute capability from which Triton converts both types

Factor = float | Tensor
ScoreMod = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Descale:
    """Factors that the caller gives; None where there is none."""

    query: Factor | None
    key: Factor | None
    value: Factor | None

    def given(self) -> dict[str, Factor]:
        named = {"q_descale": self.query, "k_descale": self.key, "v_descale": self.value}
        return {name: factor for name, factor in named.items() if factor is not None}


def has_eight_bits(query: Any, key: Any, value: Any) -> bool:
    """Whether one of the inputs is a tensor of 8-bit floating point."""
    # Written out: it is asked on every call.
    return (
        getattr(query, "dtype", None) in EIGHT_BITS
        or getattr(key, "dtype", None) in EIGHT_BITS
        or getattr(value, "dtype", None) in EIGHT_BITS
    )


def readable(call: Call, descale: Descale | None) -> Call:
    """The call with inputs converted where kernels do not read 8 bits: query to bfloat16 always,
    key and value to its dtype (bfloat16 beside wider ones)."""
    query, key, value = call.query, call.key, call.value
    for name, x in (("query", query), ("key", key), ("value", value)):
        validate.check_is_tensor(name, x)
    query = _wide_query(query)
    factors = () if descale is None else tuple(descale.given().values())
    if _gradient_wanted((query, key, value, *factors), call.score_mod) or not _reads_eight_bits(
        query.device
    ):
        half = query.dtype if query.dtype in _HALVES else torch.bfloat16
        key, value = (t.to(half) if t.dtype in EIGHT_BITS else t for t in (key, value))
    return call.on(query, key, value)


def beside_pages(query: Any, key: Tensor, value: Tensor) -> Tensor:
    """The query as kernels read it beside the pages of a cache.

    Raises:
        UnsupportedError: they cannot read the pages, all of which would have to be converted on
        every call.
    """
    validate.check_is_tensor("query", query)
    for stored in (key, value):
        if stored.dtype in EIGHT_BITS and not _reads_eight_bits(query.device):
            raise UnsupportedError(
                f"the cache holds {stored.dtype}, which kernels on {query.device} cannot read: on "
                "NVIDIA GPUs they can from compute capability 8.9 on. Make the cache with "
                "dtype=torch.bfloat16."
            )
    return _wide_query(query)


def run(
    descale: Descale, call: Call, want_max_scores: bool, table: PageTable | None = None
) -> pipeline.Outputs:
    """As `pipeline.run`, of inputs that are to be multiplied by factors.

    Raises:
        UnsupportedError: nested tensors and DTensors; else as `pipeline.run` and for factors that
        fit no head.
    """
    query, key, value, score_mod, _, scale, enable_gqa, _ = call
    if is_dtensor(query, key, value) or query.is_nested:
        kind = "nested" if query.is_nested else "sharded"
        raise UnsupportedError(
            f"{next(iter(descale.given()))} is given for {kind} tensors, whose parts it cannot be "
            "told apart for. Multiply scores by a captured tensor in score_mod, and out afterwards."
        )
    validate.check_inputs(query, key, value, enable_gqa, table is not None)
    score_mod, scale = fold_descale(descale, query, key.size(1), score_mod, scale)
    call = call._replace(score_mod=score_mod, scale=scale)
    out, lse, max_scores = pipeline.run(call, want_max_scores, table)
    if descale.value is not None:
        out = descaled_values(out, descale.value)
    return out, lse, max_scores


def _wide_query(query: Tensor) -> Tensor:
    return query.to(torch.bfloat16) if query.dtype in EIGHT_BITS else query


def _gradient_wanted(inputs: tuple[Factor, ...], score_mod: ScoreMod | None) -> bool:
    """Whether somebody may ask for one: kernels give none of, or beside, 8 bits."""
    if transforms_active() or num_dispatch_modes():
        return True
    if not torch.is_grad_enabled():
        return False
    captured = () if score_mod is None else captured_tensors(score_mod)
    return any(isinstance(t, Tensor) and t.requires_grad for t in (*inputs, *captured))


def _reads_eight_bits(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _READS_EIGHT_BITS
    return device.type == "cpu"


def fold_descale(
    descale: Descale,
    query: Tensor,
    num_kv_heads: int,
    score_mod: ScoreMod | None,
    scale: float | None,
) -> tuple[ScoreMod | None, float | None]:
    """score_mod and scale that also undo the quantisation of queries and keys.

    Raises:
        ShapeError, DtypeError, DeviceError, OptionError: a factor is none of a number, a tensor
        without dimensions, and a tensor by batch entry and head.
    """
    for name, factor in descale.given().items():
        _check_factor(name, factor, query, num_kv_heads)
    factors = [f for f in (descale.query, descale.key) if f is not None]
    if all(isinstance(f, Real) for f in factors):
        product = math.prod(float(f) for f in factors)
        return score_mod, validate.read_scale(scale, query.size(3)) * product
    table = torch.ones((), device=query.device)
    for factor in factors:
        table = table * _by_query_head(factor, query)
    if score_mod is not None:
        validate.check_score_mod(score_mod)
    by = "".join(name for name, size in zip("bh", table.shape, strict=False) if size > 1)
    table = table.reshape([size for size in table.shape if size > 1])
    return functools.partial(scaled_score, score_mod, by, table), scale


def scaled_score(
    mod: ScoreMod | None,
    by: str,
    table: Tensor,
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
) -> Tensor:
    """The mod of a score that was computed from quantised queries and keys."""
    score = score * lookup(by, table, b, h)
    return score if mod is None else mod(score, b, h, q_idx, kv_idx)


def descaled_values(out: Tensor, factor: Factor) -> Tensor:
    """out [B, Hq, Q_LEN, Dv] of quantised values, times their factor; rounded once more."""
    if isinstance(factor, Tensor):
        factor = _by_query_head(factor, out)
        factor = factor[..., None, None] if factor.dim() else factor
    return (out.to(torch.promote_types(out.dtype, torch.float32)) * factor).to(out.dtype)


def _by_query_head(factor: Factor, query: Tensor) -> Tensor:
    """A factor as [], or [B or 1, Hq or 1]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    if not isinstance(factor, Tensor):
        return torch.tensor(float(factor), dtype=wide, device=query.device)
    factor = factor.to(wide)
    if factor.dim() == 2 and factor.size(1) not in (1, query.size(1)):
        factor = factor.repeat_interleave(query.size(1) // factor.size(1), dim=1)
    return factor


def _check_factor(name: str, factor: Any, query: Tensor, num_kv_heads: int) -> None:
    if isinstance(factor, Real) and not isinstance(factor, bool) and math.isfinite(factor):
        return
    if not isinstance(factor, Tensor):
        raise OptionError(
            f"{name} is {shown(factor)}; it must be a finite number or a tensor [B, Hkv], which "
            "query, key or value are multiplied by."
        )
    if not factor.is_floating_point() or factor.dtype in EIGHT_BITS:
        raise DtypeError(f"{name} is {factor.dtype}; it must be float32 (or float64, half).")
    if factor.device != query.device:
        raise DeviceError(
            f"{name} is on {factor.device}, query on {query.device}; move it with "
            f".to('{query.device}')."
        )
    batch, heads = query.shape[:2]
    known = {1, num_kv_heads} | ({heads} if name == "q_descale" else set())
    if factor.dim() == 0:
        return
    if factor.dim() != 2 or factor.size(0) not in (1, batch) or factor.size(1) not in known:
        raise ShapeError(
            f"{name} has shape {list(factor.shape)}; it must be [] or [B, Hkv], here [{batch}, "
            f"{num_kv_heads}], where each of both may be 1."
        )
