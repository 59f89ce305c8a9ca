"""A backward's kernels, compiled while the first forward of a variant is.

At the time of the forward nothing is known of the gradients that will come in, so that the usual is
expected: dout as out lies, no gradient of lse. What comes otherwise is compiled when it comes, and
so is the main kernel where captured tensors get gradients, whose memory is not made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from attnloom.backends.gluon import launch_backward, ready_backward
from attnloom.backends.gluon.configs_backward import FEW_SPILLS
from attnloom.backends.gluon.few_keys import finer
from attnloom.backends.gluon.fields_backward import Mods
from attnloom.backends.gluon.launch_forward import has_first_numbers
from attnloom.backends.gluon.lists_backward import key_lists, tile_lists
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.beside import Job, Launch, compile_for_later
from attnloom.backends.triton.launch import backward_launches
from attnloom.backends.triton.operands import Operands
from attnloom.backends.triton.resources import spills_of

_NEVER_SPILLS = 64  # columns; soft-capping with ALiBi spills 47 registers at D=128, none at 64


def start(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Start compiling what the backward of this forward will launch."""
    if launch_backward.is_wide(call):
        _start_wide(call, out, lse)
        return
    if ready_backward.portable(call) is not None:
        _compile(backward_launches(call, out, lse))
        return
    operands = Operands.expected(finer(call), out, lse)
    if ready_backward.remembered(ready_backward.key_of(operands))[0]:
        return
    mods = Mods.of(call, has_first_numbers(call))
    ready = ready_backward.prepare(operands, ready_backward.form_of(operands), mods)
    main, *around = launch_backward.expected_launches(operands, ready)
    width = max(call.query.size(3), call.value.size(3))
    may_spill = mods.inner is not None and width > _NEVER_SPILLS
    job = None if mods.sinks is not None else compile_for_later(main)
    compile_for_later(*around)
    if job is not None and may_spill:
        _compile_if_spilled(job, partial(backward_launches, call, out, lse))
    launch_backward.lists_of(operands.call, ready)  # remembered


def _start_wide(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    from attnloom.backends.gluon import launch_roles, launch_wide

    operands = Operands.expected(call, out, lse)
    if launch_roles.takes(call):
        main, *others = launch_roles.expected_launches(operands)
        otherwise = partial(launch_wide.expected_launches, operands)
    else:
        main, *others = launch_wide.expected_launches(operands)
        otherwise = partial(backward_launches, call, out, lse)
    # masks by position alone spill at most 30 of FEW_SPILLS registers
    may_spill = call.score is not None or (call.mask is not None and call.mask.tensors)
    job = compile_for_later(main)
    _compile(others)
    if may_spill:
        _compile_if_spilled(job, otherwise)
    # remembered
    _ = tile_lists(call) if launch_roles.takes(call) else key_lists(call)


def _compile_if_spilled(main: Job, otherwise: Callable[[], Sequence[Launch]]) -> None:
    """Compile the portable kernels, which run what spills, once the main kernel is known to. One
    that is on disk is there in no time, so that nothing is prepared beside it."""
    main.read.wait()
    if main.made.done():
        return
    launches = list(otherwise())

    def then(made: Future[Any]) -> None:
        if made.exception() is None and spills_of(made.result().asm["cubin"]) > FEW_SPILLS:
            _compile(launches)
        launches.clear()  # a future keeps what it called, and so the caller's tensors

    main.made.add_done_callback(then)


def _compile(launches: Sequence[Launch]) -> None:
    for launch in launches:
        compile_for_later(launch)
