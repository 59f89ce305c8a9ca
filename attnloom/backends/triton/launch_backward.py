"""Backward launches: preprocess, then the row kernel (dq), then the key kernel (dk, dv).

dq, dk and dv are bitwise equal from run to run; gradients of captured tensors are with
options.deterministic (captured.py). Host work is remembered as in launch_forward.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from attnloom.backends.registry import AttentionCall, Gradients
from attnloom.backends.triton import configs
from attnloom.backends.triton.again import BackwardAgain, operands_of_aliases
from attnloom.backends.triton.arguments import bind, descriptors
from attnloom.backends.triton.beside import Launch, compile_for_later, is_new, wait_for_all
from attnloom.backends.triton.captured import Captured
from attnloom.backends.triton.fields_backward import Role, stats_by_tma
from attnloom.backends.triton.interpreter import INTERPRETED
from attnloom.backends.triton.launch_around import (
    empty_statistics,
    has_run,
    packed_strides,
    row_statistics,
    statistics_again,
    statistics_first,
)
from attnloom.backends.triton.launcher import addresses_aligned
from attnloom.backends.triton.lists import is_capturing, work_lists
from attnloom.backends.triton.operands import Operands
from attnloom.backends.triton.packed import pack_double, pack_ints
from attnloom.backends.triton.ready_backward import (
    Ready,
    both_fit,
    first,
    known,
    run,
)
from attnloom.backends.triton.transposed import transposed_lists

_NO_LISTS = (0.0,) * 12
_NO_SINKS = (0.0,)


def backward(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Gradients:
    """Gradients of a forward's inputs from those of out and lse. No tensor is empty."""
    operands = Operands.of(call, out, lse, dout, dlse)
    captured = Captured.of(call)
    scales: torch.Tensor | None = None
    if not has_run(operands):
        _compile_first(operands)
    stats = row_statistics(operands)
    peaks = _run_rows(operands, stats, captured)
    if captured is not None and captured.needs_peaks:
        scales = captured.scales(peaks)
    for role in _key_roles(operands, captured):
        run_keys(operands, stats, role, captured, scales)
    query, key, value = call.query, call.key, call.value
    dtensors: tuple[torch.Tensor | None, ...] = ()
    if captured is not None:
        dtensors = captured.total(scales)
    elif call.score is not None:
        dtensors = zero_gradients(call)
    dq, dk, dv = operands.dq, operands.dk, operands.dv
    return Gradients(dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), dtensors)


def _compile_first(operands: Operands) -> None:
    """The kernels of a backward that has not run, beside each other; those of all backwards that
    wait for it."""
    if not INTERPRETED and not is_capturing(operands.query) and is_new(*_variant(operands)):
        for launch in first_launches(operands):
            compile_for_later(launch)
    wait_for_all()


def _variant(operands: Operands) -> tuple[object, ...]:
    """What most lengths share."""
    call = operands.call
    programs = (bound and bound.program.digest for bound in (call.score, call.mask))
    widths = operands.query.size(3), operands.value.size(3), operands.dlse is None
    return (*programs, *widths, *[t.dtype for t in operands.inputs], call.options)


def first_launches(operands: Operands) -> list[Launch]:
    """What a backward launches first, of each kind of kernel; none for captured gradients, whose
    memory is not made twice. Only addresses are taken of results."""
    call, stats = operands.call, empty_statistics(operands)
    if call.learns:
        return []
    rows = first(operands, Role(own_keys=False))
    return [
        statistics_first(operands, stats),
        (rows.launch, _row_arguments(operands, rows, stats, _NO_SINKS)),
        *(keys_first(operands, stats, role) for role in _key_roles(operands, None)),
    ]


def keys_first(operands: Operands, stats: torch.Tensor, role: Role) -> Launch:
    """What run_keys launches first, to be compiled."""
    ready = first(operands, role)
    dk, dv = operands.dk, operands.dv
    if ready.parts > 1:
        dk = dv = stats[None, None]  # of the same type as sums of parts
    return ready.launch, _key_arguments(operands, ready, (dk, dv, stats), _NO_SINKS)


def _key_roles(operands: Operands, captured: Captured | None) -> tuple[Role, ...]:
    adds = captured is not None and not all(captured.form.stores)
    sinks = captured.form if captured is not None and adds else None
    role = Role(own_keys=True, sinks=sinks)
    if both_fit(operands):
        return (role,)
    return replace(role, want_dv=False), Role(own_keys=True, want_dk=False)


def backward_again(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> BackwardAgain | None:
    """See `registry.Backend`; None for launches that are Triton's, captured gradients, and keys
    whose queries are divided among programs."""
    found = operands_of_aliases(call, out, lse, dout, dlse)
    if found is None:
        return None
    operands, sources = found
    stats = empty_statistics(operands)
    rows = known(operands, Role(own_keys=False))
    launches = [
        statistics_again(operands, stats),
        rows and (rows.launch, _row_arguments(operands, rows, stats, _NO_SINKS)),
        *(keys_again(operands, stats, role) for role in _key_roles(operands, None)),
    ]
    return started_again(operands, sources, (stats,), launches)


def keys_again(operands: Operands, stats: torch.Tensor, role: Role) -> Launch | None:
    """The launch of run_keys, if it has run, as one kernel."""
    ready = known(operands, role)
    if ready is None or ready.parts > 1:
        return None
    results = operands.dk, operands.dv, stats
    return ready.launch, _key_arguments(operands, ready, results, _NO_SINKS)


def started_again(
    operands: Operands,
    sources: tuple[torch.Tensor, ...],
    buffers: tuple[torch.Tensor, ...],
    launches: Sequence[Launch | None],
) -> BackwardAgain | None:
    """These launches with other addresses; None if there is one that has not run."""
    found = [launch for launch in launches if launch is not None]
    if len(found) < len(launches):
        return None
    restarts = [launch.restart(args, (*sources, *buffers)) for launch, args in found]
    return BackwardAgain.of(operands, buffers, restarts)


def zero_gradients(call: AttentionCall) -> tuple[torch.Tensor | None, ...]:
    """Gradients of captured tensors that no score depends on differentiably."""
    assert call.score is not None
    specs = call.score.program.tensors
    return tuple(
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if spec.requires_grad else None
        for spec, t in zip(specs, call.score.tensors, strict=True)
    )


def _sources(operands: Operands, ready: Ready) -> tuple[object, ...]:
    """q, k, v and dout in chunks: TMA descriptors, or the same pointer three times."""
    query, key, value, dout = operands.inputs
    if not operands.uses_tma:
        return tuple(t for t in (query, key, value, dout) for _ in range(3))
    tile = ready.tile
    widths, value_widths = configs.chunks(query.size(3)), configs.chunks(value.size(3))
    return (
        *descriptors(query, tile.tile_m, widths),
        *descriptors(key, tile.tile_n, widths),
        *descriptors(value, tile.tile_n, value_widths),
        *descriptors(dout, tile.tile_m, value_widths),
    )


def _some(entries: torch.Tensor) -> torch.Tensor:
    """A kernel needs an address, also to read nothing from."""
    return entries if entries.numel() else entries.new_zeros(1)


def _run_rows(operands: Operands, stats: torch.Tensor, captured: Captured | None) -> torch.Tensor:
    """dq, and captured gradients that are stored; returns the largest contributions to the others,
    [programs, contributions]."""
    call = operands.call
    role, num_peaks = Role(own_keys=False), 0
    if captured is not None and (captured.needs_peaks or any(captured.form.stores)):
        role = Role(own_keys=False, sinks=captured.form, peaks=captured.needs_peaks)
        num_peaks = len(captured.items)
    found: list[torch.Tensor] = []

    def launch(ready: Ready) -> None:
        found[:] = [stats.new_empty(ready.launch.grid, num_peaks)]
        if captured is not None and num_peaks:
            given = (*found, *captured.arguments(None))
        else:
            given = _NO_SINKS
        ready.launch(addresses_aligned(call), *_row_arguments(operands, ready, stats, given))

    run(operands, role, launch)
    return found[0]


def _row_arguments(
    operands: Operands, ready: Ready, stats: torch.Tensor, sinks: tuple[object, ...]
) -> tuple[object, ...]:
    call = operands.call
    lists: tuple[object, ...] = _NO_LISTS
    if call.blocks is not None:
        work = work_lists(call.blocks, ready.tile.tile_m)
        lists = (_some(call.blocks.entries), work.work, *work.steps)
    return (
        *_sources(operands, ready), operands.dq, stats, lists, bind(call.score),
        bind(call.mask), sinks, pack_double(call.scale), ready.shape,
        packed_strides(*operands.inputs, operands.dq),
    )  # fmt: skip


def run_keys(
    operands: Operands,
    stats: torch.Tensor,
    role: Role,
    captured: Captured | None,
    scales: torch.Tensor | None,
) -> None:
    """dk, dv and captured gradients, as far as the role wants them."""
    call = operands.call
    sinks = captured.arguments(scales) if captured is not None and role.sinks else _NO_SINKS
    started: list[Ready] = []

    def launch(ready: Ready) -> None:
        if started and captured is not None and role.sinks:
            captured.clear()  # another try adds once more
        started.append(ready)
        dk, dv = operands.dk, operands.dv
        if ready.parts > 1:
            dk, dv = (
                t.new_empty((ready.parts * t.size(0), *t.shape[1:]), dtype=operands.real)
                for t in (dk, dv)
            )
        args = _key_arguments(operands, ready, (dk, dv, stats), sinks)
        ready.launch(addresses_aligned(call), *args)
        if ready.parts > 1:
            _sum_parts(operands, role, (dk, dv), ready.parts)

    run(operands, role, launch)


def _key_arguments(
    operands: Operands,
    ready: Ready,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sinks: tuple[object, ...],
) -> tuple[object, ...]:
    """results: dk, dv, and the row statistics."""
    call, (dk, dv, stats) = operands.call, results
    lines: object = stats
    if stats_by_tma(operands, ready.tile):
        box = [1, ready.tile.tile_m]
        lines = TensorDescriptor(stats, list(stats.shape), list(stats.stride()), box)
    return (
        *_sources(operands, ready), dk, dv, lines, _key_lists(call, ready), bind(call.score),
        bind(call.mask), sinks, pack_double(call.scale), ready.shape,
        packed_strides(*operands.inputs, dk, dv),
    )  # fmt: skip


def _key_lists(call: AttentionCall, ready: Ready) -> tuple[Any, ...]:
    if call.blocks is None:
        return _NO_LISTS
    turned = transposed_lists(call.blocks)
    blocks = turned.blocks
    work = work_lists(blocks, ready.tile.tile_n)
    num_key_blocks = pack_ints((blocks.grid.num_q_blocks,))
    return turned.offsets, _some(blocks.entries), work.work, *work.steps, *num_key_blocks


def _sum_parts(
    operands: Operands, role: Role, parts: tuple[torch.Tensor, torch.Tensor], num_parts: int
) -> None:
    results = ((role.want_dk, operands.dk), (role.want_dv, operands.dv))
    for (wanted, result), part in zip(results, parts, strict=True):
        if wanted:
            result.copy_(part.view(num_parts, *result.shape).sum(0))
