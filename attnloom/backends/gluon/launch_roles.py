"""Backward launches for heads of 129 to 192 without a score_mod: prepare, roles_kernel, finish
(backward_roles.py). Where it is not for a call that launch_wide.py takes, wide_kernel is."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from attnloom.backends.gluon import merged_lists, ready_backward
from attnloom.backends.gluon.backward_around import finish_kernel, prepare_kernel
from attnloom.backends.gluon.backward_roles import roles_kernel
from attnloom.backends.gluon.configs_backward import (
    FEW_SPILLS,
    PANEL,
    PANELS,
    STEP,
    TILE_KEYS,
    form_of_roles,
)
from attnloom.backends.gluon.descriptors import NARROW, TILES, Blank
from attnloom.backends.gluon.fields_backward import (
    Mods,
    around_config,
    roles_config,
    shift_of,
    tells_heads_apart,
)
from attnloom.backends.gluon.launch_forward import has_first_numbers
from attnloom.backends.gluon.launch_shared import (
    buffers,
    descriptors,
    prepare_arguments,
    unless_it_spills,
)
from attnloom.backends.gluon.lists_backward import (
    expected_tile_lists,
    row_lists,
    tile_lists,
)
from attnloom.backends.gluon.ready_backward import Ready
from attnloom.backends.registry import AttentionCall, Gradients
from attnloom.backends.triton import configs
from attnloom.backends.triton.again import BackwardAgain
from attnloom.backends.triton.arguments import bind, steps
from attnloom.backends.triton.beside import Launch
from attnloom.backends.triton.launch_backward import started_again
from attnloom.backends.triton.launcher import Launcher, addresses_aligned
from attnloom.backends.triton.operands import Operands
from attnloom.backends.triton.packed import pack_ints

_WIDTH = PANELS * PANEL
_PIECE = TILE_KEYS // 3  # keys, and columns of keys, that are copied at once
_PAIR = 2  # out, dout: operands of the preprocess
# Key heads whose tiles are started longest first among each other. H200, of the time of as many as
# processors have tiles for: 4 in place of 1 at S=8192 0.986 causal and 0.992 without a mask, in
# place of 6 at S=2048 0.990. Longer rows have fewer, whose queries and sums of dq share the cache.
_TOGETHER = 4
_ROWS_TOGETHER = 1 << 15

_ready: dict[tuple[Any, ...], Ready | None] = {}


def takes(call: AttentionCall) -> bool:
    """Whether a backward that launch_wide.py takes is one for these kernels, as far as can be told
    before they are made. A mask is applied as of one head for all that share keys."""
    if call.score is not None:
        return False
    if ready_backward.units_of(call.query, call.key) > 1 and tells_heads_apart(call):
        return False
    blocks = call.blocks
    parts = 1 if blocks is None else blocks.kv_block // _PIECE
    return blocks is None or blocks.entries.numel() * parts <= merged_lists.LIMIT


def backward(operands: Operands) -> Gradients | None:
    """Gradients of query, key and value; None where the kernel spills, the first time too."""
    return unless_it_spills(_ready, operands, _prepare, _run, FEW_SPILLS)


def expected_launches(operands: Operands) -> list[Launch]:
    """What a backward will launch, to be compiled and not started, the main kernel first. Only
    addresses are taken of memory, which that of lse stands for."""
    ready, memory = _prepare(operands), operands.lse
    lists = expected_tile_lists(operands.call)
    return [
        (ready.main, _main_arguments(operands, ready, memory, memory, lists)),
        (ready.prepare, prepare_arguments(operands, ready, memory, memory, _rows(operands))),
        (ready.finish, _finish_arguments(operands, ready, memory)),
    ]


def again(operands: Operands, sources: tuple[torch.Tensor, ...]) -> BackwardAgain | str | None:
    """See `registry.Backend`; a reason where the kernel spills."""
    key = ready_backward.key_of(operands)
    ready = _ready.get(key)
    if ready is None:
        return "it spills." if key in _ready else None
    memory = stats, dq_sum = buffers(operands, ready)
    lists = tile_lists(operands.call)
    launches = (
        (ready.prepare, prepare_arguments(operands, ready, stats, dq_sum, _rows(operands))),
        (ready.main, _main_arguments(operands, ready, stats, dq_sum, lists)),
        (ready.finish, _finish_arguments(operands, ready, dq_sum)),
    )
    return started_again(operands, sources, memory, launches)


def heads_together(query: torch.Tensor) -> int:
    """See _TOGETHER."""
    return max(1, min(_TOGETHER, _ROWS_TOGETHER // query.size(2)))


def _prepare(operands: Operands) -> Ready:
    call = operands.call
    query, key, value, dout = operands.inputs
    mods = Mods.of(call, has_first_numbers(call))
    overlaps = configs.device_of(query.device).can_overlap
    around = around_config(operands, _WIDTH, overlaps=overlaps)
    main = roles_config(operands, form_of_roles(), mods, overlaps)
    beside = {"num_warps": 4} | ({"launch_pdl": True} if overlaps else {})
    lines, pitch = ready_backward.lines_of(query), ready_backward.pitch_of(query)
    tiles = -(-key.size(2) // TILE_KEYS)
    shape = list(ready_backward.main_shape(operands, pitch))
    shape[6], shape[9] = tiles, heads_together(query)
    boxes: tuple[tuple[torch.Tensor, int, int, NVMMASharedLayout], ...] = (
        (query, STEP, PANEL, TILES),
        (dout, STEP, PANEL, TILES),
        (key, _PIECE, _PIECE, NARROW),
        (value, _PIECE, PANEL, TILES),
        (operands.dk, _PIECE, PANEL, TILES),
        (operands.dv, _PIECE, PANEL, TILES),
    )
    finish_programs = ready_backward.finish_programs(lines - STEP, _WIDTH)
    return Ready(
        Launcher(prepare_kernel, around, lines // STEP, {"num_warps": 4}, _PAIR),
        Launcher(roles_kernel, main, key.size(0) * key.size(1) * tiles, beside),
        Launcher(finish_kernel, around, finish_programs, beside),
        tuple(Blank.of(*box) for box in boxes),
        ready_backward.blank_statistics(lines, query.device),
        lines,
        lines,
        _WIDTH,
        mods.scales,
        pack_ints((query.size(1), query.size(2), pitch, query.size(0) * query.size(1))),
        pack_ints(shape),
        pack_ints([step for t in (operands.out, dout) for step in steps(t)]),
    )


def _run(operands: Operands, ready: Ready) -> Gradients:
    call = operands.call
    stats, dq_sum = buffers(operands, ready)
    args = prepare_arguments(operands, ready, stats, dq_sum, _rows(operands))
    ready.prepare(operands.rows_aligned, *args)
    args = _main_arguments(operands, ready, stats, dq_sum, tile_lists(call))
    ready.main(addresses_aligned(call), *args)
    assert ready.finish is not None
    ready.finish(True, *_finish_arguments(operands, ready, dq_sum))
    return Gradients(operands.dq, operands.dk, operands.dv, ())


def _rows(operands: Operands) -> tuple[Any, ...]:
    return row_lists(operands.call, sweeps=False)


def _main_arguments(
    operands: Operands,
    ready: Ready,
    stats: torch.Tensor,
    dq_sum: torch.Tensor,
    lists: tuple[Any, ...],
) -> tuple[Any, ...]:
    call = operands.call
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc = descriptors(operands, ready)
    return (
        q_desc, do_desc, k_desc, v_desc, ready.stats.at(stats), dk_desc, dv_desc, dq_sum, lists,
        bind(call.score), bind(call.mask), ready.scales, ready.main_shape,
    )  # fmt: skip


def _finish_arguments(operands: Operands, ready: Ready, dq_sum: torch.Tensor) -> tuple[Any, ...]:
    scale = ready.scales[2] / (1 << shift_of(operands.query.dtype))
    return dq_sum, operands.dq, scale, ready.around_shape
