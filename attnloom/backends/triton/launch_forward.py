"""Forward launches: configuration, arguments and what is remembered between calls.

A call with shapes, strides, dtypes and mods that were seen before finds a _Ready: everything but
the addresses. Configurations that a device refused for resources are remembered by structure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from attnloom.backends.cpu.widths import needs_wide_ints
from attnloom.backends.registry import AttentionCall, ForwardResult
from attnloom.backends.triton import configs, emit
from attnloom.backends.triton.arguments import (
    bind,
    descriptors,
    is_aligned,
    reaches_far,
    steps,
    takes_descriptor,
    unit_stride,
)
from attnloom.backends.triton.config import INTERPRETED, KernelConfig
from attnloom.backends.triton.forward import forward_kernel
from attnloom.backends.triton.fragments import Fragment, mask_fragment, score_fragment
from attnloom.backends.triton.lists import work_lists
from attnloom.backends.triton.packed import pack_double, pack_ints
from attnloom.ir.node import DType
from attnloom.plan.problem import compute_type

_TL = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
_NO_LISTS = (0.0,) * 8


@dataclass(frozen=True, repr=False)
class ForwardConfig(KernelConfig):
    """Everything that the forward kernel is compiled for; see forward.py's glossary."""

    TILE_M: int
    TILE_N: int
    D: int
    DV: int
    D0: int
    D1: int
    D2: int
    E0: int
    E1: int
    E2: int
    SUB: int
    HAS_LISTS: bool
    HAS_SCORE: bool
    HAS_MASK: bool
    MAY_MASK: bool
    WANT_MAX: bool
    MAX_UNSCALED: bool
    USE_TMA: bool
    ALIGNED: bool
    OUT_ALIGNED: bool
    PRECISION: str
    OPERAND: tl.dtype
    ACC: tl.dtype
    SCORE_HEAD: JITFunction | None = None
    SCORE_ROW: JITFunction | None = None
    SCORE_BODY: JITFunction | None = None
    MASK_HEAD: JITFunction | None = None
    MASK_ROW: JITFunction | None = None
    MASK_BODY: JITFunction | None = None

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, slots=True)
class _Ready:
    """A launch but for its addresses. tile: see configs.py; next_tiles: what to try if refused."""

    config: ForwardConfig
    tile: configs.Tile
    next_tiles: tuple[configs.Tile, ...]
    grid: int
    shape: tuple[float, ...]
    strides: tuple[float, ...]


_READY_LIMIT = 4096
_ready: dict[tuple[object, ...], _Ready] = {}


def forward(call: AttentionCall, want_max_scores: bool) -> ForwardResult:
    """Run the forward kernel. Tensors may have any strides; neither B * Hq * Q_LEN nor KV_LEN is
    0."""
    query, key, value = unit_stride(call.query), unit_stride(call.key), unit_stride(call.value)
    batch, heads, q_len, _ = query.shape
    real = compute_type(query.dtype, key.dtype, value.dtype).torch
    device = query.device
    out_dtype = stored_type(query.dtype)
    out = torch.empty((batch, heads, q_len, value.size(3)), dtype=out_dtype, device=device)
    lse = torch.empty((batch, heads, q_len), dtype=real, device=device)
    max_scores = torch.empty_like(lse) if want_max_scores else None
    operands = (query, key, value, out)
    key_ = _key(call, operands, want_max_scores)
    ready = _ready.get(key_)
    if ready is None:
        ready = _remember(key_, _prepare(call, operands, want_max_scores))
    results = (out, lse, lse if max_scores is None else max_scores)
    while True:
        try:
            _launch(ready, call, (query, key, value), results)
            return ForwardResult(out.to(query.dtype), lse, max_scores)
        except OutOfResources:
            if not ready.next_tiles:
                raise
            ready = _remember(key_, _prepare(call, operands, want_max_scores, ready.next_tiles))


def _remember(key: tuple[object, ...], ready: _Ready) -> _Ready:
    if len(_ready) >= _READY_LIMIT:
        _ready.clear()
    _ready[key] = ready
    return ready


def _launch(
    ready: _Ready, call: AttentionCall, inputs: tuple[torch.Tensor, ...], results: tuple[Any, ...]
) -> None:
    cfg, tile = ready.config, ready.tile
    sources: tuple[object, ...]
    if object.__getattribute__(cfg, "USE_TMA"):
        sources = ()
        d_chunks, e_chunks = _chunk_fields(cfg)
        query, key, value = inputs
        sources += descriptors(query, tile.tile_m, d_chunks)
        sources += descriptors(key, tile.tile_n, d_chunks)
        sources += descriptors(value, tile.tile_n, e_chunks)
    else:
        query, key, value = inputs
        sources = (query, query, query, key, key, key, value, value, value)
    lists: tuple[object, ...] = _NO_LISTS
    blocks = call.blocks
    if blocks is not None:
        found = work_lists(blocks, tile.tile_m)
        entries = blocks.entries if blocks.entries.numel() else blocks.entries.new_zeros(1)
        lists = (entries, found.work, *found.steps)
    forward_kernel[(ready.grid,)](
        *sources, *results, lists, bind(call.score), bind(call.mask), pack_double(call.scale),
        ready.shape, ready.strides, cfg, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _chunk_fields(cfg: ForwardConfig) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    get = object.__getattribute__
    return (
        (get(cfg, "D0"), get(cfg, "D1"), get(cfg, "D2")),
        (get(cfg, "E0"), get(cfg, "E1"), get(cfg, "E2")),
    )


def target_of(call: AttentionCall) -> emit.Target:
    """What the fragments of a call may use."""
    half = call.query.dtype in configs.HALF
    exact = call.options.exact_math
    arch = configs.device_of(call.query.device).arch
    wide = needs_wide_ints(call) or reaches_far(call.score) or reaches_far(call.mask)
    return emit.Target(half and not exact and arch >= 75, wide, exact)


def _key(
    call: AttentionCall, operands: tuple[torch.Tensor, ...], want_max_scores: bool
) -> tuple[object, ...]:
    query, key, value, _ = operands
    blocks, score, mask = call.blocks, call.score, call.mask
    return (
        query.device,
        query.dtype,
        key.dtype,
        value.dtype,
        query.shape,
        key.shape,
        value.shape,
        query.stride(),
        key.stride(),
        value.stride(),
        (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16,
        None if score is None else score.program.digest,
        None if mask is None else mask.program.digest,
        None
        if blocks is None
        else (blocks.q_block, blocks.kv_block, blocks.q_offset, blocks.kv_offset),
        None if score is None and mask is None else target_of(call),
        call.scale > 0,
        call.options,
        want_max_scores,
    )


def _prepare(
    call: AttentionCall,
    operands: tuple[torch.Tensor, ...],
    want_max_scores: bool,
    tiles: tuple[configs.Tile, ...] | None = None,
) -> _Ready:
    query, key, value, out = operands
    batch, heads, q_len, head_dim = query.shape
    kv_len, value_dim = key.size(2), value.size(3)
    device = configs.device_of(query.device)
    dtype = operand_type(query.dtype, key.dtype, value.dtype)
    blocks = call.blocks
    if tiles is None:
        tiles = configs.forward_tiles(device, _shape_class(call, dtype))
    tile, *rest = tiles
    real = compute_type(query.dtype, key.dtype, value.dtype)
    has_tail = kv_len % (tile.tile_n if blocks is None else blocks.kv_block) != 0
    use_tma = (
        device.has_tma
        and not INTERPRETED
        and query.dtype == key.dtype == value.dtype
        and all(takes_descriptor(t) for t in operands[:3])
    )
    target = target_of(call)
    score = None if call.score is None else score_fragment(call.score.program, target)
    mask = None if call.mask is None else mask_fragment(call.mask.program, target)
    config = ForwardConfig(
        TILE_M=tile.tile_m,
        TILE_N=tile.tile_n,
        D=head_dim,
        DV=value_dim,
        **_named(("D0", "D1", "D2"), configs.chunks(head_dim)),
        **_named(("E0", "E1", "E2"), configs.chunks(value_dim)),
        SUB=1 if blocks is None else blocks.kv_block // tile.tile_n,
        HAS_LISTS=blocks is not None,
        HAS_SCORE=score is not None,
        HAS_MASK=mask is not None,
        MAY_MASK=mask is not None or blocks is not None or has_tail,
        WANT_MAX=want_max_scores,
        MAX_UNSCALED=score is None and call.scale > 0,
        USE_TMA=use_tma,
        ALIGNED=all(is_aligned(t) for t in operands[:3]),
        OUT_ALIGNED=is_aligned(out),
        PRECISION=precision_of(call, dtype),
        OPERAND=_TL[dtype],
        ACC=tl.float64 if real is DType.F64 else tl.float32,
        **fragment_fields("SCORE", score),
        **fragment_fields("MASK", mask),
    )
    num_tiles = -(-q_len // tile.tile_m)
    overhang = -1
    if blocks is not None and kv_len % blocks.kv_block:
        overhang = kv_len // blocks.kv_block
    shape = (
        heads,
        heads // key.size(1),
        batch,
        num_tiles,
        q_len,
        kv_len,
        0 if blocks is None else blocks.q_offset,
        0 if blocks is None else blocks.kv_offset,
        0 if key.size(0) == 1 else 1,
        _heads_together(call, device),
        overhang,
    )
    strides = [step for t in operands for step in steps(t)]
    return _Ready(
        config, tile, tuple(rest), num_tiles * batch * heads, pack_ints(shape), pack_ints(strides)
    )


def fragment_fields(prefix: str, fragment: Fragment | None) -> dict[str, JITFunction | None]:
    """Fields SCORE_HEAD, SCORE_ROW, SCORE_BODY (or MASK_*) of a kernel's configuration."""
    parts = ("head", "row", "body")
    return {f"{prefix}_{p.upper()}": getattr(fragment, p, None) for p in parts}


def _named(names: tuple[str, ...], values: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(names, values, strict=True))


def _shape_class(call: AttentionCall, dtype: torch.dtype) -> configs.Shape:
    query, key, value, blocks = call.query, call.key, call.value, call.blocks
    limit_m = max(16, 1 << (query.size(2) - 1).bit_length())
    limit_n = max(16, 1 << (key.size(2) - 1).bit_length())
    if blocks is not None:
        limit_m, limit_n = min(limit_m, blocks.q_block), min(limit_n, blocks.kv_block)
    return configs.Shape(
        width=max(sum(configs.chunks(query.size(3))), sum(configs.chunks(value.size(3)))),
        itemsize=dtype.itemsize,
        max_m=limit_m,
        max_n=limit_n,
        num_rows=query.size(0) * query.size(1) * query.size(2),
    )


def _heads_together(call: AttentionCall, device: configs.Device) -> int:
    """Query heads whose keys and values share half of the L2 cache; whole groups of a key head."""
    key, value = call.key, call.value
    group = call.query.size(1) // key.size(1)
    bytes_a_head = key.size(2) * (
        key.size(3) * key.element_size() + value.size(3) * value.element_size()
    )
    together = max(1, device.l2_bytes // 2 // max(bytes_a_head, 1))
    return min(together, 64) * group


def operand_type(*dtypes: torch.dtype) -> torch.dtype:
    """Type of matrix operands: that of query if all are halves, else the widest."""
    dtypes = tuple(stored_type(d) for d in dtypes)
    widest = max(dtypes, key=lambda d: d.itemsize)
    return dtypes[0] if widest.itemsize == 2 else widest


def stored_type(dtype: torch.dtype) -> torch.dtype:
    """Type that a kernel computes with and stores in place of one: Triton's interpreter multiplies
    the bit patterns of bfloat16, and truncates where it rounds to it."""
    return torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype


def precision_of(call: AttentionCall, dtype: torch.dtype) -> str:
    """input_precision of tl.dot; halves and doubles have one only."""
    return call.options.fp32_precision if dtype == torch.float32 else "ieee"
