"""Decode over pages beside decode over one tensor: with the same kernel, mask and lengths, and by
SDPA's FlashAttention 2, which has no pages; and beside a kernel that only reads those pages, or
that tensor: what pages cost a kernel that does nothing else is in nobody's power."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnloom import PagedKV, PageTable, create_block_mask, flex_attention
from benchmarks.gpu import taken_in_turn
from benchmarks.gpu_cases import DEVICE, GpuCase
from benchmarks.gpu_peers import CONTENDERS
from benchmarks.rows import READING, Row
from benchmarks.timing import Sample, summarise

PAGE_SIZES = (16, 32, 64, 128, 256)
# One query, which sees all keys: causal from the end of them.
SHAPES = (GpuCase("full", 32, 16, 16, 1, 4096, 64), GpuCase("full", 32, 32, 8, 1, 4096, 128))
PEERS = ("contiguous", "sdpa-flash")
_OPTIONS: Any = {"backend": "triton"}
_AGREEMENT = 2e-2
# Contenders differ by 3% at most, of which a row may lose 2%; where tensors lie in memory, which
# nobody chooses, is worth as much.
_ROUNDS = 31
_PLACEMENTS = 3


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def paged_suite(keeps: Callable[[str], bool]) -> Iterator[Row]:
    """One query against caches of one length; pages lie in random order."""
    for case in SHAPES:
        name = f"b{case.batch}-h{case.heads}-g{case.heads // case.kv_heads}-s{case.kv_len}"
        name += f"-d{case.head_dim}"
        if not keeps(name):
            continue
        samples = _measured(case, name)
        theirs = {peer: samples[peer] for peer in PEERS}
        for label in ("contiguous", *(f"page{size}" for size in PAGE_SIZES)):
            ours = samples[label]
            for peer, sample in (theirs | {READING: samples[_alone(label)]}).items():
                if peer == label:
                    continue
                yield Row(
                    "paged",
                    f"{label}-{name}",
                    "decode",
                    "ms",
                    ours.median_ms,
                    dtype="bf16",
                    shape=case.shape,
                    peer=peer,
                    theirs=sample.median_ms,
                    ours_p10=ours.p10_ms,
                    ours_p90=ours.p90_ms,
                    theirs_p10=sample.p10_ms,
                    theirs_p90=sample.p90_ms,
                    num_runs=ours.num_runs,
                )


def _measured(case: GpuCase, name: str) -> dict[str, Sample]:
    """Of all contenders, their tensors put elsewhere several times."""
    times: dict[str, list[float]] = {}
    kept = []
    for _ in range(_PLACEMENTS):
        runs, bounds = _runs(case)
        outputs = {label: run() for label, run in runs.items()}
        for label, out in outputs.items():
            error = float((out - outputs["contiguous"]).abs().max())
            if not error <= _AGREEMENT:
                raise RuntimeError(f"{name}: {label} differs from contiguous by {error:.3g}")
        alone = {_alone(label): bound for label, bound in bounds.items()}
        for label, values in taken_in_turn(runs | alone, _ROUNDS).items():
            times.setdefault(label, []).extend(values)
        kept.append(runs)  # or the next tensors would lie where these do
    return {label: summarise(values) for label, values in times.items()}


def _alone(label: str) -> str:
    return f"{label} {READING}"


Runs = dict[str, Callable[[], torch.Tensor]]


def _runs(case: GpuCase) -> tuple[Runs, Runs]:
    """Attention over the same keys and values in one tensor, the peers', and in pages of each
    size; and what only reads the same."""
    from benchmarks.gpu_reading import reading  # needs Triton

    batch, length = case.batch, case.kv_len
    query, key, value = case.inputs()
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    mask = create_block_mask(_causal, None, None, length, length, DEVICE)
    attend = functools.partial(flex_attention, query, enable_gqa=True, kernel_options=_OPTIONS)
    whole = functools.partial(attend, key, value, block_mask=mask.for_decode(lengths))
    flash = CONTENDERS["sdpa-flash"].prepare(case, None)
    assert flash is not None
    bounds: Runs = {"contiguous": reading(key, value)}
    runs: Runs = {
        "contiguous": whole,  # type: ignore[dict-item]
        "sdpa-flash": functools.partial(flash, query, key, value),
    }
    draw = torch.Generator(device=DEVICE).manual_seed(1)
    for page_size in PAGE_SIZES:
        num_pages = length // page_size
        places = torch.randperm(batch * num_pages, generator=draw, device=DEVICE)
        table = PageTable(lengths, None, places.int().view(batch, num_pages), page_size, length)
        keys, values = (_in_pages(tensor, places, page_size) for tensor in (key, value))
        runs[f"page{page_size}"] = functools.partial(  # type: ignore[assignment]
            attend, PagedKV(keys, values, table), block_mask=mask
        )
        bounds[f"page{page_size}"] = reading(keys, values, table.pages)
    return runs, bounds


def _in_pages(tensor: torch.Tensor, places: torch.Tensor, page_size: int) -> torch.Tensor:
    """[B, Hkv, L, D] as [num_pages, Hkv, page_size, D], page i of a row at places[i]."""
    cut = tensor.unflatten(2, (-1, page_size)).transpose(1, 2).flatten(0, 1)
    pages = torch.empty_like(cut, memory_format=torch.contiguous_format)
    pages[places] = cut
    return pages
