"""A first call whose kernel nobody has compiled yet, on this machine, runs in a form that takes
half the time to compile and gives the same bits (`configs_forward.quick`); the usual form is
compiled beside later calls, which change over as soon as it is there.

Not so where gradients are wanted, whose own kernels take as long in any case; nor while a CUDA
graph is recorded, which would keep the form for good: that waits for the usual one. Whoever would
rather wait always, a benchmark say, sets ATTNLOOM_QUICK_START=0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from attnloom.backends.gluon import configs_forward, merged_lists
from attnloom.backends.gluon.counters import counter_of
from attnloom.backends.gluon.ready_forward import (
    Ready,
    arguments,
    expected_lists,
    lists_of,
    prepare,
    start,
)
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.beside import Job, Launch, is_new, may_begin_quickly
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.fields import Tensors
from attnloom.backends.triton.launcher import addresses_aligned
from attnloom.backends.triton.lists import is_capturing
from attnloom.backends.triton.resources import spills_of
from attnloom.ir.node import BoundProgram

_under_way: dict[KernelConfig, Job] = {}


def begin(
    usual: Ready,
    call: AttentionCall,
    tensors: Tensors,
    following: Iterable[Callable[[], Ready]],
    fixed: bool,
    given: AttentionCall,
) -> Ready | None:
    """Compile the usual kernel while its lists are derived and, beside it, what the gradients of
    its results will ask for; it is not launched. Or launch its quick form, which is returned.

    following: the forms that are tried after the usual one. fixed: see `ready_forward.prepare`.
    given: the call before short_rows.py, for its backward.
    """
    quick = None if is_capturing(call.query) else _quick(usual, call)
    job = _under_way.get(usual.launch.config)
    if job is not None and job.is_running():
        if quick is not None:
            return _started(prepare(call, tensors, quick, fixed), call, tensors, job)
        job.wait()
        return None
    first = (
        None if quick is None else functools.cache(partial(prepare, call, tensors, quick, fixed))
    )
    if not _is_there(usual, call, tensors, given, first):
        assert first is not None
        if _started(first(), call, tensors, None) is not None:
            return replace(first(), follower=_compile(usual, call, tensors, following))
    return None


def _quick(usual: Ready, call: AttentionCall) -> configs_forward.Form | None:
    """The quick form that a call may begin with, on lists of whole tiles."""
    if call.for_backward or not may_begin_quickly():
        return None
    found = configs_forward.quick(usual.form)
    if found is None or (call.blocks is not None and found.is_apart(call.blocks.q_block)):
        return None
    return found


def _is_there(
    usual: Ready,
    call: AttentionCall,
    tensors: Tensors,
    given: AttentionCall,
    first: Callable[[], Ready] | None,
) -> bool:
    """Compile what `begin` says; first: where the usual kernel is not on disk this one is compiled,
    and that is all."""
    if is_capturing(call.query) or not addresses_aligned(call):
        return True
    if first is None and not call.for_backward and call.blocks is None:
        return True
    if not is_new(usual.launch.config, call.for_backward):
        return True
    otherwise = None if first is None else _launch_of(first(), call, tensors)
    job = Job([_launch_of(usual, call, tensors)], look=first is not None, otherwise=otherwise)
    if first is not None:
        job.read.wait()  # reading takes twice as long beside what torch's operators ask of Python
    # remembered; the first use of torch's operators loads their modules
    lists_of(call, usual.form if first is None or not job.missed else first().form)
    if call.for_backward:
        from attnloom.backends.gluon import backward_ahead

        job.read.wait()
        backward_ahead.start(given, tensors.out, tensors.lse)
    job.wait()
    return not job.missed


def _started(quick: Ready, call: AttentionCall, tensors: Tensors, job: Job | None) -> Ready | None:
    """A quick form, launched; None where the device has no room for it."""
    try:
        start(quick, call, tensors)
    except OutOfResources:
        return None
    return replace(quick, follower=job)


def _compile(
    usual: Ready, call: AttentionCall, tensors: Tensors, following: Iterable[Callable[[], Ready]]
) -> Job:
    """Compile the form that calls change over to, and where it spills, those that are tried then.
    What takes seconds holds no memory of the caller's."""
    if call.blocks is not None and usual.form.is_apart(call.blocks.q_block):
        merged_lists.ask_for_kernels(call.blocks, usual.form.consumers)
    hollow = _without_memory(call, tensors)
    others = [_launch_of(ready(), *hollow) for ready in following]

    def then(made: Any) -> None:
        for launcher, args in others:
            if spills_of(made.asm["cubin"]) <= configs_forward.FEW_SPILLS:
                return
            made = launcher.compile(args)

    job = _under_way[usual.launch.config] = Job([_launch_of(usual, *hollow)], then)
    return job


def _launch_of(ready: Ready, call: AttentionCall, tensors: Tensors) -> Launch:
    counter = counter_of(call.query.device)
    return ready.launch, arguments(ready, call, tensors, counter, expected_lists(call))


def _without_memory(call: AttentionCall, tensors: Tensors) -> tuple[AttentionCall, Tensors]:
    """The same for a compiler, which asks tensors for their type and whether they are aligned."""
    score, mask, blocks = _hollow_program(call.score), _hollow_program(call.mask), call.blocks
    if blocks is not None:
        blocks = replace(blocks, entries=_hollow(blocks.entries))
    max_scores = tensors.max_scores
    return replace(call, score=score, mask=mask, blocks=blocks), Tensors(
        _hollow(tensors.query),
        _hollow(tensors.key),
        _hollow(tensors.value),
        _hollow(tensors.out),
        _hollow(tensors.lse),
        None if max_scores is None else _hollow(max_scores),
    )


def _hollow_program(bound: BoundProgram | None) -> BoundProgram | None:
    return None if bound is None else replace(bound, tensors=tuple(map(_hollow, bound.tensors)))


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((1,) * tensor.dim(), dtype=tensor.dtype, device="meta")
