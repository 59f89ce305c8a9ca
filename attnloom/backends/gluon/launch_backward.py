"""Backward launches of the Gluon backend: prepare, the main kernel, finish.

dk and dv are bitwise equal from run to run; dq, where programs do not sweep over heads, and
gradients of captured tensors are sums in no fixed order. What ready_backward.portable names, and
score_mods that the kernel does not have the registers for, are computed by the portable kernels:
this backend's backward has both.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from attnloom.backends.gluon import ready_backward
from attnloom.backends.gluon.configs_backward import FEW_SPILLS, MAX_HEAD_DIM
from attnloom.backends.gluon.counters import counter_of
from attnloom.backends.gluon.few_keys import finer
from attnloom.backends.gluon.fields_backward import Mods
from attnloom.backends.gluon.launch_forward import has_first_numbers
from attnloom.backends.gluon.launch_shared import buffers, descriptors, prepare_arguments
from attnloom.backends.gluon.lists_backward import (
    expected_key_lists,
    expected_row_lists,
    key_lists,
    row_lists,
)
from attnloom.backends.gluon.ready_backward import Ready
from attnloom.backends.registry import AttentionCall, Gradients, load
from attnloom.backends.triton.again import BackwardAgain, operands_of_aliases
from attnloom.backends.triton.arguments import bind
from attnloom.backends.triton.beside import Launch, wait_for_all
from attnloom.backends.triton.captured import Captured
from attnloom.backends.triton.launch_backward import zero_gradients
from attnloom.backends.triton.launcher import addresses_aligned
from attnloom.backends.triton.operands import Operands

_NO_SINKS = (0.0,)
_HEAVY = "its score_mod needs more registers than the kernel has."
_log = logging.getLogger("attnloom")
_said: set[str] = set()


def refusal(call: AttentionCall) -> str | None:
    """Why the backward of this call cannot run here."""
    return None


def backward(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Gradients:
    """Gradients of a forward's inputs from those of out and lse. No tensor is empty."""
    if is_wide(call):
        from attnloom.backends.gluon import launch_roles, launch_wide

        operands = Operands.of(call, out, lse, ready_backward.with_descriptor(dout), dlse)
        found = launch_roles.backward(operands) if launch_roles.takes(call) else None
        found = launch_wide.backward(operands) if found is None else found
        if found is not None:
            return found
    why = ready_backward.portable(call)
    if why is None:
        taken = finer(call)
        operands = Operands.of(taken, out, lse, ready_backward.with_descriptor(dout), dlse)
        found = _run_known(operands)
        if found is not None:
            return found
        why = _HEAVY
    if why not in _said:
        _said.add(why)
        _log.info("the portable kernels run a backward: %s", why)
    return load("triton").backward(call, out, lse, dout, dlse)


def is_wide(call: AttentionCall) -> bool:
    """Whether launch_wide.py takes it. Modules of kernels that few calls need take tens of
    milliseconds of a first step: they are imported where heads are wide."""
    if call.query.size(3) <= MAX_HEAD_DIM:
        return False
    from attnloom.backends.gluon import launch_wide

    return launch_wide.takes(call)


def _run_known(operands: Operands) -> Gradients | None:
    """With what was chosen for such a problem, or is now; None if all forms spill."""
    key = ready_backward.key_of(operands)
    seen, ready = ready_backward.remembered(key)
    if seen:
        return None if ready is None else _run(operands, ready)
    wait_for_all()
    mods = Mods.of(operands.call, has_first_numbers(operands.call))
    for form, most in ready_backward.forms_of(operands):
        ready = ready_backward.prepare(operands, form, mods)
        found = _run(operands, ready)
        if ready.main.spills <= (FEW_SPILLS if most is None else most):
            ready_backward.remember(key, ready)
            return found
    ready_backward.remember(key, None)
    return None


def backward_again(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> BackwardAgain | str | None:
    """See `registry.Backend`; None where launches are Triton's, and for captured gradients. A
    reason where the portable kernels run it."""
    wide = is_wide(call)
    why = None if wide else ready_backward.portable(call)
    if why is not None:
        return why
    taken = call if wide else finer(call)
    found = operands_of_aliases(taken, out, lse, dout, dlse)
    if found is None or ready_backward.with_descriptor(dout) is not dout:
        return None
    operands, sources = found
    if wide:
        from attnloom.backends.gluon import launch_roles, launch_wide

        again = launch_roles.again(operands, sources) if launch_roles.takes(call) else ""
        return launch_wide.again(operands, sources) if isinstance(again, str) else again
    seen, ready = ready_backward.remembered(ready_backward.key_of(operands))
    if ready is None:
        return _HEAVY if seen else None
    stats, dq_sum = buffers(operands, ready)
    device = operands.dq.device
    counter = counter_of(device).detach()
    sources = (*sources, stats, dq_sum)
    of_keys, of_rows = lists_of(operands.call, ready)
    main_arguments = _main_arguments(operands, ready, (stats, dq_sum), counter, _NO_SINKS, of_keys)
    prepare = ready.prepare.restart(
        prepare_arguments(operands, ready, stats, dq_sum, of_rows), sources
    )
    main = ready.main.restart(main_arguments, (*sources, counter))
    if main is None:
        return None

    def start_main(stream: int, addresses: tuple[int, ...]) -> None:
        tiles = counter_of(device, stream)
        main(stream, (*addresses, tiles.data_ptr()))

    starts = [prepare, start_main]
    if ready.finish is not None:
        finish_arguments = _finish_arguments(operands, ready, dq_sum)
        starts.append(ready.finish.restart(finish_arguments, sources))
    again = BackwardAgain.of(operands, (stats, dq_sum), starts)
    if again is not None and taken is not call:
        # smaller blocks follow from what the mask_mod's tensors held
        return again.only_for(call)
    return again


def expected_launches(operands: Operands, ready: Ready) -> list[Launch]:
    """The main kernel's launch, and those of the others, to be compiled and not started: row
    statistics and the memory of dq may be any memory of float32, here that of lse, and lists are
    not derived yet."""
    call, memory = operands.call, operands.lse
    counter = counter_of(memory.device)
    lists = expected_key_lists(call)
    main_arguments = _main_arguments(operands, ready, (memory, memory), counter, _NO_SINKS, lists)
    lists = expected_row_lists(call, sweeps=ready.finish is None)
    around = prepare_arguments(operands, ready, memory, memory, lists)
    launches: list[Launch] = [(ready.main, main_arguments), (ready.prepare, around)]
    if ready.finish is not None:
        launches.append((ready.finish, _finish_arguments(operands, ready, memory)))
    return launches


def _run(operands: Operands, ready: Ready) -> Gradients:
    call, dq, dk, dv = operands.call, operands.dq, operands.dk, operands.dv
    captured = Captured.of(call)
    stats, dq_sum = buffers(operands, ready)
    sinks = _NO_SINKS if captured is None else captured.arguments(None)
    of_keys, of_rows = lists_of(call, ready)
    args = prepare_arguments(operands, ready, stats, dq_sum, of_rows)
    ready.prepare(operands.rows_aligned, *args)
    counter = counter_of(stats.device)
    args = _main_arguments(operands, ready, (stats, dq_sum), counter, sinks, of_keys)
    ready.main(addresses_aligned(call), *args)
    if ready.finish is not None:
        ready.finish(True, *_finish_arguments(operands, ready, dq_sum))
    dtensors: tuple[torch.Tensor | None, ...] = ()
    if captured is not None:
        dtensors = captured.total(None)
    elif call.score is not None:
        dtensors = zero_gradients(call)
    return Gradients(dq, dk, dv, dtensors)


def lists_of(call: AttentionCall, ready: Ready) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of the main kernel and of prepare; derived once a mask."""
    sweeps = ready.finish is None
    return key_lists(call, sweeps), row_lists(call, sweeps)


def _main_arguments(
    operands: Operands,
    ready: Ready,
    buffers: tuple[torch.Tensor, torch.Tensor],
    counter: torch.Tensor,
    sinks: tuple[Any, ...],
    lists: tuple[Any, ...],
) -> tuple[Any, ...]:
    call, (stats, dq_sum) = operands.call, buffers
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc = descriptors(operands, ready)
    return (
        q_desc, do_desc, k_desc, v_desc, ready.stats.at(stats), dk_desc, dv_desc,
        (dq_sum, operands.dq), counter, lists, bind(call.score), bind(call.mask), sinks,
        ready.scales, ready.main_shape,
    )  # fmt: skip


def _finish_arguments(operands: Operands, ready: Ready, dq_sum: torch.Tensor) -> tuple[Any, ...]:
    return dq_sum, operands.dq, ready.scales[2], ready.around_shape
