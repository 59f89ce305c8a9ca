"""Backward launches: preprocess, then the row kernel, then the key kernel.

Shapes, strides and mods that were seen before find a _Kernel, as in launch_forward.py. dq, dk
and dv are bitwise equal from run to run; captured gradients are with options.deterministic
(captured.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from attnloom.backends.registry import AttentionCall, Gradients
from attnloom.backends.triton import configs, configs_backward
from attnloom.backends.triton.arguments import bind, descriptors, is_aligned, steps
from attnloom.backends.triton.backward import delta_kernel
from attnloom.backends.triton.backward_keys import key_kernel
from attnloom.backends.triton.backward_rows import row_kernel
from attnloom.backends.triton.captured import Captured
from attnloom.backends.triton.emit_grad import gradient_of
from attnloom.backends.triton.fields import (
    operand_type,
    overhanging_block,
    triton_type,
    value_of,
)
from attnloom.backends.triton.fields_backward import (
    BackwardConfig,
    DeltaConfig,
    Role,
    backward_config,
    is_heavy,
)
from attnloom.backends.triton.lists import work_lists
from attnloom.backends.triton.operands import Operands
from attnloom.backends.triton.packed import pack_double, pack_ints
from attnloom.backends.triton.transposed import transposed_lists

_NO_LISTS = (0.0,) * 12
_DELTA_ROWS = 64
_DELTA_COLUMNS = 64
_MAX_PARTS = 16
_LARGEST_STEP = 128  # largest tile_m of configs_backward.py
# dk and dv of wider heads do not fit the registers together.
_WIDEST_TOGETHER = {2: 256, 4: 128, 8: 64}


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A launch but for its addresses. tile: what it runs with; next_tiles: what to try if
    refused."""

    role: Role
    config: BackwardConfig
    tile: configs.Tile
    next_tiles: tuple[configs.Tile, ...]
    grid: int
    shape: tuple[float, ...]
    parts: int = 1


_READY_LIMIT = 4096
_ready: dict[tuple[object, ...], _Kernel] = {}


def backward(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Gradients:
    """Gradients of a forward's inputs from those of out and lse. No tensor is empty."""
    operands = Operands.of(call, out, lse, dout, dlse)
    signature = operands.signature()
    deterministic = call.options.deterministic
    stats = _row_statistics(operands)
    captured = scales = None
    if call.score is not None:
        found = gradient_of(call.score.program, call.options.exact_math)
        if found.contributions:
            captured = Captured.of(call, found, deterministic)
    peaks = _run_rows(operands, signature, stats, captured is not None and captured.needs_peaks)
    if captured is not None and peaks is not None:
        scales = captured.scales(peaks)
    sinks = (0.0,) if captured is None else captured.arguments(scales)
    _run_keys(operands, signature, stats, None if captured is None else captured.form, sinks)
    query, key, value = call.query, call.key, call.value
    dtensors: tuple[torch.Tensor | None, ...] = ()
    if captured is not None:
        dtensors = captured.total(scales)
    elif call.score is not None:
        dtensors = _zeros(call)
    dk, dv = operands.dk.to(key.dtype), operands.dv.to(value.dtype)
    return Gradients(operands.dq.to(query.dtype), dk, dv, dtensors)


def _zeros(call: AttentionCall) -> tuple[torch.Tensor | None, ...]:
    """Gradients of captured tensors that no score depends on differentiably."""
    assert call.score is not None
    specs = call.score.program.tensors
    return tuple(
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if spec.requires_grad else None
        for spec, t in zip(specs, call.score.tensors, strict=True)
    )


def _row_statistics(operands: Operands) -> torch.Tensor:
    """`stats` of backward.py."""
    batch, heads, q_len, width = operands.dout.shape
    pitch = _pitch(q_len)
    stats = torch.empty(2 * batch * heads, pitch, dtype=operands.real, device=operands.query.device)
    pair = (operands.out, operands.dout)
    config = DeltaConfig(
        TILE_M=_DELTA_ROWS,
        CHUNK=min(_DELTA_COLUMNS, max(16, triton.next_power_of_2(width))),
        DV=width,
        HAS_DLSE=operands.dlse is not None,
        USE_TMA=False,
        ALIGNED=all(is_aligned(t) for t in pair),
        ACC=triton_type(operands.real),
    )
    lse = operands.lse
    delta_kernel[(pitch // _DELTA_ROWS * batch * heads,)](
        *pair, lse if operands.dlse is None else operands.dlse, lse, stats,
        pack_ints((heads, q_len, pitch, batch * heads)), _strides(*pair), config,
    )  # fmt: skip
    return stats


def _pitch(q_len: int) -> int:
    """Q_LEN in whole tiles of every size."""
    return -(-q_len // _LARGEST_STEP) * _LARGEST_STEP


def _shape_class(operands: Operands) -> configs_backward.Shape:
    call, blocks = operands.call, operands.call.blocks
    query, key, value = operands.query, operands.key, operands.value
    limit_m, limit_n = _covering(query.size(2)), _covering(key.size(2))
    if blocks is not None:
        limit_m, limit_n = min(limit_m, blocks.q_block), min(limit_n, blocks.kv_block)
    score = None if call.score is None else call.score.program
    return configs_backward.Shape(
        width=max(sum(configs.chunks(query.size(3))), sum(configs.chunks(value.size(3)))),
        itemsize=operand_type(query.dtype, key.dtype, value.dtype).itemsize,
        max_m=limit_m,
        max_n=limit_n,
        heavy=is_heavy(score, call.options.exact_math),
    )


def _covering(length: int) -> int:
    """The smallest tile side that covers a length."""
    return max(16, 1 << (length - 1).bit_length())


def _run(
    key: tuple[object, ...],
    prepare: Callable[[tuple[configs.Tile, ...] | None], _Kernel],
    launch: Callable[[_Kernel], None],
) -> None:
    """Launch a kernel with the first tiles that the device accepts, remembered from then on."""
    kernel = _ready.get(key)
    if kernel is None:
        kernel = _remember(key, prepare(None))
    while True:
        try:
            launch(kernel)
            return
        except OutOfResources:
            if not kernel.next_tiles:
                raise
            kernel = _remember(key, prepare(kernel.next_tiles))


def _remember(key: tuple[object, ...], kernel: _Kernel) -> _Kernel:
    if len(_ready) >= _READY_LIMIT:
        _ready.clear()
    _ready[key] = kernel
    return kernel


def _sources(operands: Operands, config: BackwardConfig) -> tuple[object, ...]:
    """q, k, v and dout in chunks: TMA descriptors, or the same pointer three times."""
    query, key, value, dout = operands.inputs
    if not operands.uses_tma:
        return tuple(t for t in (query, key, value, dout) for _ in range(3))
    tile_m, tile_n = value_of(config, "TILE_M"), value_of(config, "TILE_N")
    widths, value_widths = configs.chunks(query.size(3)), configs.chunks(value.size(3))
    return (
        *descriptors(query, tile_m, widths),
        *descriptors(key, tile_n, widths),
        *descriptors(value, tile_n, value_widths),
        *descriptors(dout, tile_m, value_widths),
    )


def _strides(*tensors: torch.Tensor) -> tuple[float, ...]:
    return pack_ints([step for tensor in tensors for step in steps(tensor)])


def _run_rows(
    operands: Operands, signature: tuple[object, ...], stats: torch.Tensor, peaks: bool
) -> torch.Tensor | None:
    """dq; with `peaks` also the largest captured contributions of every program."""
    call = operands.call
    role = Role(own_keys=False, peaks=peaks)
    found: list[torch.Tensor] = []

    def launch(kernel: _Kernel) -> None:
        sinks: tuple[Any, ...] = (0.0,)
        if peaks:
            assert call.score is not None
            items = gradient_of(call.score.program, call.options.exact_math).contributions
            found[:] = [stats.new_empty(kernel.grid, len(items))]
            sinks = tuple(found)
        lists: tuple[object, ...] = _NO_LISTS
        if call.blocks is not None:
            work = work_lists(call.blocks, kernel.tile.tile_m)
            lists = (_some(call.blocks.entries), work.work, *work.steps)
        row_kernel[(kernel.grid,)](
            *_sources(operands, kernel.config), operands.dq, stats, lists, bind(call.score),
            bind(call.mask), sinks, pack_double(call.scale), kernel.shape,
            _strides(*operands.inputs, operands.dq), kernel.config,
            num_warps=kernel.tile.num_warps, num_stages=kernel.tile.num_stages,
        )  # fmt: skip

    _run((signature, role), lambda tiles: _prepare_rows(operands, role, tiles), launch)
    return found[0] if found else None


def _some(entries: torch.Tensor) -> torch.Tensor:
    """A kernel needs an address, also to read nothing from."""
    return entries if entries.numel() else entries.new_zeros(1)


def _prepare_rows(
    operands: Operands, role: Role, tiles: tuple[configs.Tile, ...] | None
) -> _Kernel:
    call, blocks = operands.call, operands.call.blocks
    query, key = operands.query, operands.key
    device = configs.device_of(query.device)
    if tiles is None:
        tiles = configs_backward.row_tiles(device, _shape_class(operands))
    tile, *rest = tiles
    batch, heads, q_len, _ = query.shape
    num_tiles = -(-q_len // tile.tile_m)
    group = heads // key.size(1)
    shape = (
        heads,
        group,
        batch,
        num_tiles,
        q_len,
        key.size(2),
        0 if blocks is None else blocks.q_offset,
        0 if blocks is None else blocks.kv_offset,
        0 if key.size(0) == 1 else 1,
        _together(device, call, key, operands.value) * group,
        overhanging_block(call),
        _pitch(q_len),
    )
    config = backward_config(operands, tile, role)
    grid = num_tiles * batch * heads
    return _Kernel(role, config, tile, tuple(rest), grid, pack_ints(shape))


def _together(
    device: configs.Device, call: AttentionCall, first: torch.Tensor, second: torch.Tensor
) -> int:
    """Heads whose streamed tensors share half of the L2 cache; more with a mask, so that the
    longest of many programs start first."""
    bytes_a_head = first.size(2) * (
        first.size(3) * first.element_size() + second.size(3) * second.element_size()
    )
    together = max(1, device.l2_bytes // 2 // max(bytes_a_head, 1))
    return min(64, together if call.blocks is None else 4 * together)


def _run_keys(
    operands: Operands, signature: tuple[object, ...], stats: torch.Tensor, form: Any, sinks: Any
) -> None:
    """dk, dv and captured gradients; in two passes where dk and dv together are too wide."""
    shape = _shape_class(operands)
    together = shape.width <= _WIDEST_TOGETHER[shape.itemsize]
    both = Role(own_keys=True, sinks=form)
    roles = (both,) if together else (replace(both, want_dv=False), replace(both, want_dk=False))
    for role in roles:
        _run_key_kernel(operands, signature, stats, role, sinks)


def _run_key_kernel(
    operands: Operands,
    signature: tuple[object, ...],
    stats: torch.Tensor,
    role: Role,
    sinks: Any,
) -> None:
    call = operands.call

    def prepare(tiles: tuple[configs.Tile, ...] | None) -> _Kernel:
        return _prepare_keys(operands, role, tiles)

    def launch(kernel: _Kernel) -> None:
        dk, dv = operands.dk, operands.dv
        if kernel.parts > 1:
            dk, dv = (
                t.new_empty((kernel.parts * t.size(0), *t.shape[1:]), dtype=operands.real)
                for t in (dk, dv)
            )
        lines: object = stats
        if value_of(kernel.config, "USE_TMA"):
            lines = TensorDescriptor(
                stats, list(stats.shape), list(stats.stride()), [1, kernel.tile.tile_m]
            )
        lists: tuple[object, ...] = _NO_LISTS
        if call.blocks is not None:
            turned = transposed_lists(call.blocks)
            work = work_lists(turned.blocks, kernel.tile.tile_n)
            blocks = turned.blocks.grid.num_q_blocks
            lists = (
                turned.offsets, _some(turned.blocks.entries), work.work, *work.steps,
                *pack_ints((blocks,)),
            )  # fmt: skip
        key_kernel[(kernel.grid,)](
            *_sources(operands, kernel.config), dk, dv, lines, lists, bind(call.score),
            bind(call.mask), sinks, pack_double(call.scale), kernel.shape,
            _strides(*operands.inputs, dk, dv), kernel.config,
            num_warps=kernel.tile.num_warps, num_stages=kernel.tile.num_stages,
        )  # fmt: skip
        if kernel.parts > 1:
            for wanted, parts, result in (
                (role.want_dk, dk, operands.dk),
                (role.want_dv, dv, operands.dv),
            ):
                if wanted:
                    result.copy_(parts.view(kernel.parts, *result.shape).sum(0))

    _run((signature, role), prepare, launch)


def _prepare_keys(
    operands: Operands, role: Role, tiles: tuple[configs.Tile, ...] | None
) -> _Kernel:
    call, blocks = operands.call, operands.call.blocks
    query, key = operands.query, operands.key
    device = configs.device_of(query.device)
    if tiles is None:
        tiles = configs_backward.key_tiles(device, _shape_class(operands))
    tile, *rest = tiles
    batch, heads, q_len, _ = query.shape
    kv_batch, heads_kv, kv_len, _ = key.shape
    group = heads // heads_kv
    units = group * batch // kv_batch
    num_tiles = -(-kv_len // tile.tile_n)
    programs = num_tiles * kv_batch * heads_kv
    parts = min(units, _MAX_PARTS, max(1, device.num_processors // programs))
    owners = kv_batch * heads_kv * parts
    together = _together(device, call, query, operands.dout)
    shape = (
        heads,
        heads_kv,
        group,
        q_len,
        kv_len,
        batch,
        num_tiles,
        0 if blocks is None else blocks.q_offset,
        0 if blocks is None else blocks.kv_offset,
        max(1, together // group) * parts,
        units,
        parts,
        owners,
        kv_batch,
        _pitch(q_len),
    )
    config = backward_config(operands, tile, role)
    return _Kernel(role, config, tile, tuple(rest), num_tiles * owners, pack_ints(shape), parts)
