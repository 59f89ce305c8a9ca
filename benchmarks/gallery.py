"""The suite `gallery`: every example of benchmarks/variants.py beside dense SDPA, forward.

SDPA is given what it can be given: a dense float mask, and a bias where the score_mod adds one. A
score_mod that does more than add is left out of its call, which then computes less (peer
"sdpa without mod"); outputs are compared wherever both compute the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import attnloom
from attnloom.ir.interpret import interpret
from attnloom.ir.node import DType
from attnloom.trace.tracer import trace_score
from benchmarks import rows as rows_module
from benchmarks.cases import Mod
from benchmarks.rows import Row
from benchmarks.tables import machine_line
from benchmarks.timing import alternate
from benchmarks.variants import VARIANTS, Variant

BATCH, HEADS, LENGTH, HEAD_DIM = 1, 4, 4096, 64
FOLDER = Path(__file__).parent / "results"
# Shown name -> file of results; a file that does not exist is left out.
RESULTS = {"CPU, float32": "gallery.json", "H200, bfloat16": "h200-gallery.json"}
_AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Example:
    """A variant with its results by the names of RESULTS; None where it was not measured."""

    variant: Variant
    density: float
    rows: dict[str, Row | None]


def gallery_suite(keeps: Callable[[str], bool], budget_s: float) -> Iterator[Row]:
    """Forward of each variant on a CUDA device if there is one (bf16), else on the CPU (fp32)."""
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    for variant in VARIANTS:
        if keeps(variant.name):
            with torch.device(device):
                yield _measure(variant, dtype, budget_s)


def examples() -> list[Example]:
    """Every variant with what is committed about it, masks before scores before combinators."""
    found = {name: _read(file) for name, file in RESULTS.items()}
    order = ("mask", "score", "combinator")
    return [
        Example(
            variant,
            _committed_density(variant, found),
            {name: rows.get(variant.name) for name, rows in found.items()},
        )
        for variant in sorted(VARIANTS, key=lambda variant: order.index(variant.family))
    ]


def results_line(name: str) -> str:
    """Where and when the results of that name were measured."""
    if not (FOLDER / RESULTS[name]).exists():
        return f"{name}: not measured yet."
    head, rows = rows_module.read(FOLDER / RESULTS[name])
    batch, heads, _, _, _, head_dim = rows[0].shape or []
    sizes = f"batch {batch}, {heads} heads of {head_dim}"
    return f"{name}: {sizes}, S = {LENGTH}; {machine_line(head)}"


def is_additive(score_mod: Mod, lengths: tuple[int, int]) -> bool:
    """Whether a score_mod adds the same to every score at a position; the first rows tell."""
    corner = (min(64, lengths[0]), lengths[1])
    at_zero, at_three = (_dense_scores(score_mod, corner, value) for value in (0.0, 3.0))
    return bool(torch.allclose(at_three - 3, at_zero, atol=1e-5, equal_nan=True))


def _measure(variant: Variant, dtype: torch.dtype, budget_s: float) -> Row:
    score_mod, mask_mod = variant.build(BATCH, HEADS, LENGTH)
    lengths = variant.lengths(LENGTH)
    block_mask = mask = None
    if mask_mod is not None:
        B = BATCH if "b" in variant.mask_axes else None
        H = HEADS if "h" in variant.mask_axes else None
        block_mask = attnloom.create_block_mask(mask_mod, B, H, *lengths)
        mask = attnloom.create_mask(mask_mod, B, H, *lengths)
    additive = score_mod is None or is_additive(score_mod, lengths)
    peer = "sdpa" if additive else "sdpa without mod"
    density = 1.0 if mask is None else float(mask.float().mean())
    arguments = _sdpa_arguments(score_mod if additive else None, mask, lengths, dtype)
    del mask
    q_len, kv_len = lengths
    inputs = [torch.randn(BATCH, HEADS, n, HEAD_DIM, dtype=dtype) for n in (q_len, kv_len, kv_len)]
    runs = {
        "attnloom": functools.partial(
            attnloom.flex_attention, *inputs, score_mod=score_mod, block_mask=block_mask
        ),
        peer: functools.partial(
            functional.scaled_dot_product_attention, *inputs, **arguments
        ),
    }  # fmt: skip
    with torch.no_grad():
        if additive:
            _require_agreement(variant, runs["attnloom"](), runs[peer]())
        samples = alternate({name: _synchronised(run) for name, run in runs.items()}, budget_s)
    ours, theirs = samples["attnloom"], samples[peer]
    return Row(
        "gallery",
        variant.name,
        "forward",
        "ms",
        ours.median_ms,
        dtype="fp32" if dtype is torch.float32 else "bf16",
        shape=[BATCH, HEADS, HEADS, *lengths, HEAD_DIM],
        density=density,
        peer=peer,
        theirs=theirs.median_ms,
        ours_p10=ours.p10_ms,
        ours_p90=ours.p90_ms,
        theirs_p10=theirs.p10_ms,
        theirs_p90=theirs.p90_ms,
        num_runs=ours.num_runs,
    )


def _sdpa_arguments(
    score_mod: Mod | None,
    mask: torch.Tensor | None,
    lengths: tuple[int, int],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What SDPA takes: its own flag for a plain causal mask, else a dense float mask and bias."""
    if score_mod is None and mask is not None and _is_causal(mask):
        return {"is_causal": True}
    bias = None if score_mod is None else _dense_scores(score_mod, lengths, 0.0)
    if mask is not None:
        bias = torch.zeros(mask.shape) if bias is None else bias
        bias = bias.masked_fill(~mask, -math.inf)
    return {"attn_mask": None if bias is None else bias.to(dtype)}


def _is_causal(mask: torch.Tensor) -> bool:
    return mask.size(2) == mask.size(3) and torch.equal(mask, torch.ones_like(mask).tril())


def _dense_scores(score_mod: Mod, lengths: tuple[int, int], value: float) -> torch.Tensor:
    """[B, H, Q_LEN, KV_LEN] float32: what the mod makes of a score of `value`."""
    q_len, kv_len = lengths
    with torch.no_grad():
        bound = trace_score(score_mod, DType.F32, torch.empty(0).device)
        out = torch.empty(BATCH, HEADS, q_len, kv_len)
        for first in range(0, q_len, _ROWS_AT_ONCE):
            part = out[:, :, first : first + _ROWS_AT_ONCE]
            inputs = {
                "b": torch.arange(BATCH)[:, None, None, None],
                "h": torch.arange(HEADS)[:, None, None],
                "q": torch.arange(first, first + part.size(2))[:, None],
                "kv": torch.arange(kv_len),
                "score": torch.full(part.shape, value),
            }
            part.copy_(interpret(bound, inputs)[0])
    return out


def _require_agreement(variant: Variant, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """A speed counts only where both compute the same; SDPA gives NaN where a row has no key."""
    limit = _AGREEMENT[ours.dtype] * float(ours.float().abs().max())
    error = float((ours.float() - theirs.float().nan_to_num()).abs().max())
    if not error <= limit:
        raise RuntimeError(
            f"{variant.name}: attnloom and SDPA differ by {error:.3g} (at most {limit:.3g} is "
            "rounding), so one of them is wrong and neither is timed"
        )


def _synchronised(run: Callable[[], object]) -> Callable[[], object]:
    if not torch.cuda.is_available():
        return run

    def waited() -> None:
        run()
        torch.cuda.synchronize()

    return waited


def _read(file: str) -> dict[str, Row]:
    path = FOLDER / file
    return {row.case: row for row in rows_module.read(path)[1]} if path.exists() else {}


def _committed_density(variant: Variant, found: dict[str, dict[str, Row]]) -> float:
    for rows in found.values():
        row = rows.get(variant.name)
        if row is not None and row.density is not None:
            return row.density
    return math.nan
