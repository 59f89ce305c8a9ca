"""What forward and decode kernels are compiled for, and the keys that launches are remembered
by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from attnloom.backends.cpu.widths import needs_wide_ints
from attnloom.backends.registry import AttentionCall, ForwardResult
from attnloom.backends.triton import configs, emit
from attnloom.backends.triton.arguments import (
    is_aligned,
    reaches_far,
    takes_descriptor,
    unit_stride,
)
from attnloom.backends.triton.config import KernelConfig, value_of
from attnloom.backends.triton.device_math import HUGE
from attnloom.backends.triton.emit import NEAR
from attnloom.backends.triton.fragments import Fragment, mask_fragment, score_fragment
from attnloom.backends.triton.interpreter import INTERPRETED
from attnloom.backends.triton.layouts import mask_layouts, score_layouts
from attnloom.ir.node import BoundProgram, Program
from attnloom.ir.passes.bounds import stays_within
from attnloom.plan.problem import compute_type

_SCORE = 2.0**20  # what scores are taken to be at most, before a score_mod
_TL = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@dataclass(frozen=True, repr=False)
class ForwardConfig(KernelConfig):
    """Everything that a forward or decode kernel is compiled for; see the glossary of forward.py.

    SINGLE, OVERLAPS, HINT: of decode.py and paged.py: one split; a second kernel starts beside this
    one; what copies say to the second-level cache (read_once.py), "": nothing.
    LAST_FIRST: of forward.py, see launch_forward.py.
    """

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
    NATURAL: bool
    HUGE: bool
    SCORE_HEAD: JITFunction | None = None
    SCORE_ROW: JITFunction | None = None
    SCORE_BODY: JITFunction | None = None
    MASK_HEAD: JITFunction | None = None
    MASK_ROW: JITFunction | None = None
    MASK_BODY: JITFunction | None = None
    SINGLE: bool = False
    OVERLAPS: bool = False
    HINT: str = ""
    LAST_FIRST: bool = False

    __hash__ = KernelConfig.__hash__


Chunks = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Tensors:
    """Inputs with neighbouring elements in a row, and fresh results; max_scores may be None."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    max_scores: torch.Tensor | None

    @staticmethod
    def of(call: AttentionCall, want_max_scores: bool) -> Tensors:
        query, key, value = unit_stride(call.query), unit_stride(call.key), unit_stride(call.value)
        batch, heads, q_len, _ = query.shape
        real = compute_type(query.dtype, key.dtype, value.dtype).torch
        shape = (batch, heads, q_len, value.size(3))
        if INTERPRETED:
            out = query.new_empty(shape, dtype=stored_type(query.dtype))
        else:
            out = query.new_empty(shape)
        lse = query.new_empty(shape[:3], dtype=real)
        max_scores = torch.empty_like(lse) if want_max_scores else None
        return Tensors(query, key, value, out, lse, max_scores)

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value, self.out

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """out, lse and max_scores as kernel arguments; an unused one needs an address too."""
        return self.out, self.lse, self.lse if self.max_scores is None else self.max_scores

    def result(self) -> ForwardResult:
        out = self.out
        if out.dtype != self.query.dtype:
            out = out.to(self.query.dtype)
        return ForwardResult(out, self.lse, self.max_scores)


def launch_key(call: AttentionCall, tensors: Tensors) -> tuple[object, ...]:
    """All that a launch depends on but for addresses, numbers and block lists."""
    query, key, value = tensors.query, tensors.key, tensors.value
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
        # without numbers and captured tensors it follows from the rest of this key
        _binds(score, mask) and _is_wide(call),
        score_layouts(call),
        mask_layouts(call),
        call.scale > 0,
        call.options,
        tensors.max_scores is None,
    )


def target_of(call: AttentionCall) -> emit.Target:
    """What the fragments of a call may use."""
    half = call.query.dtype in configs.HALF
    # float32 inputs buy float32's accuracy; the hardware's log and exp are a few units off it
    exact = call.options.exact_math or not half
    arch = configs.device_of(call.query.device).arch
    return emit.Target(half and not exact and arch >= 75, _is_wide(call), exact, _is_near(call))


def _binds(*programs: BoundProgram | None) -> bool:
    return any(p is not None and (p.numbers or p.tensors) for p in programs)


def _is_near(call: AttentionCall) -> bool:
    blocks = call.blocks
    offset = 0 if blocks is None else max(abs(blocks.q_offset), abs(blocks.kv_offset))
    reach = max(call.query.size(2), call.kv_len) + offset + configs.MAX_TILE
    return max(reach, call.query.size(0), call.query.size(1)) <= emit.NEAR


def _is_wide(call: AttentionCall) -> bool:
    return needs_wide_ints(call) or reaches_far(call.score) or reaches_far(call.mask)


def shared_fields(call: AttentionCall, tensors: Tensors, tile: configs.Tile) -> dict[str, Any]:
    """Fields of ForwardConfig that forward and decode choose alike."""
    query, key, value, out = tensors.operands
    blocks, kv_len = call.blocks, key.size(2)
    dtype = operand_type(query.dtype, key.dtype, value.dtype)
    target = target_of(call)
    score = mask = None
    if call.score is not None:
        score = score_fragment(call.score.program, target.reading(score_layouts(call)))
    if call.mask is not None:
        mask = mask_fragment(call.mask.program, target.reading(mask_layouts(call)))
    has_tail = kv_len % (tile.tile_n if blocks is None else blocks.kv_block) != 0
    wide = compute_type(query.dtype, key.dtype, value.dtype).torch
    return {
        "TILE_M": tile.tile_m,
        "TILE_N": tile.tile_n,
        **dimension_fields(query, value),
        "SUB": 1 if blocks is None else configs.per_block(blocks.kv_block, tile.tile_n),
        "HAS_LISTS": blocks is not None,
        "HAS_SCORE": score is not None,
        "HAS_MASK": mask is not None,
        "MAY_MASK": mask is not None or blocks is not None or has_tail,
        "WANT_MAX": tensors.max_scores is not None,
        "MAX_UNSCALED": score is None and call.scale > 0,
        "USE_TMA": _uses_tma(call, tensors),
        "ALIGNED": all(is_aligned(t) for t in (query, key, value)),
        "OUT_ALIGNED": is_aligned(out),
        "PRECISION": precision_of(call, dtype),
        "OPERAND": _TL[dtype],
        "ACC": _TL[wide],
        "NATURAL": num_tries(call) == 1,
        "HUGE": call.score is not None and may_be_huge(call.score.program),
        **fragment_fields("SCORE", score),
        **fragment_fields("MASK", mask),
    }


def dimension_fields(query: torch.Tensor, value: torch.Tensor) -> dict[str, int]:
    """D and Dv, and the chunks that cover each."""
    head_dim, value_dim = query.size(3), value.size(3)
    return {
        "D": head_dim,
        "DV": value_dim,
        **dict(zip(("D0", "D1", "D2"), configs.chunks(head_dim), strict=True)),
        **dict(zip(("E0", "E1", "E2"), configs.chunks(value_dim), strict=True)),
    }


def _uses_tma(call: AttentionCall, tensors: Tensors) -> bool:
    query, key, value = tensors.query, tensors.key, tensors.value
    return (
        configs.device_of(query.device).has_tma
        and not INTERPRETED
        and query.dtype == key.dtype == value.dtype
        and all(takes_descriptor(t) for t in (query, key, value))
    )


def fragment_fields(prefix: str, fragment: Fragment | None) -> dict[str, JITFunction | None]:
    """Fields SCORE_HEAD, SCORE_ROW, SCORE_BODY (or MASK_*) of a kernel's configuration."""
    parts = ("head", "row", "body")
    return {f"{prefix}_{p.upper()}": getattr(fragment, p, None) for p in parts}


def chunk_widths(config: ForwardConfig, letter: str) -> tuple[int, int, int]:
    """Chunks of the query and key ("D") or of the value ("E") dimension."""
    first, second, third = (value_of(config, f"{letter}{i}") for i in range(3))
    return first, second, third


def tma_widths(config: ForwardConfig) -> tuple[Chunks, Chunks] | None:
    """Chunks of D and of Dv that TMA descriptors cover; None where pointers are used."""
    if not value_of(config, "USE_TMA"):
        return None
    return chunk_widths(config, "D"), chunk_widths(config, "E")


def overhanging_block(call: AttentionCall) -> int:
    """The key block of the mask that overhangs KV_LEN, -1 if none does."""
    kv_len = call.key.size(2)
    if call.blocks is None or kv_len % call.blocks.kv_block == 0:
        return -1
    return kv_len // call.blocks.kv_block


def operand_type(*dtypes: torch.dtype) -> torch.dtype:
    """Type of matrix operands: that of query if all are halves, else the widest."""
    dtypes = tuple(stored_type(d) for d in dtypes)
    widest = max(dtypes, key=lambda d: d.itemsize)
    return dtypes[0] if widest.itemsize == 2 else widest


def stored_type(dtype: torch.dtype) -> torch.dtype:
    """Type that a kernel computes with and stores in place of one: Triton's interpreter multiplies
    the bit patterns of bfloat16, and truncates where it rounds to it."""
    return torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype


def may_be_huge(score: Program) -> bool:
    """Whether a score_mod may lead to HUGE scores, as masks do that add the lowest finite number.
    Scores themselves are taken not to; numbers, which kernels are not compiled for, may."""
    return not stays_within(score, HUGE.value, _SCORE, NEAR)


def num_tries(call: AttentionCall) -> int:
    """How many tiles to compile in search of one that does not spill. Products by fused
    multiply-adds spill with all tiles, and take long to compile."""
    dtype = operand_type(call.query.dtype, call.key.dtype, call.value.dtype)
    return 1 if by_multiply_adds(call, dtype) else configs.MAX_TRIES


def by_multiply_adds(call: AttentionCall, dtype: torch.dtype) -> bool:
    """Whether products of operands of this type run without matrix instructions: float32 unless it
    may be rounded to tf32, float64, which is as wide, and all on devices before Ampere."""
    if not configs.device_of(call.query.device).has_matrix_instructions:
        return True
    return dtype.itemsize > 2 and precision_of(call, dtype) == "ieee"


def precision_of(call: AttentionCall, dtype: torch.dtype) -> str:
    """input_precision of tl.dot; halves and doubles have one only."""
    return call.options.fp32_precision if dtype == torch.float32 else "ieee"


def triton_type(dtype: torch.dtype) -> tl.dtype:
    return _TL[dtype]
