"""From traced mods and inputs to a Launch: run the passes, choose the backend, remember both."""

from __future__ import annotations

import logging
import warnings

import torch

from attnloom.api.launch import Launch, Numbers
from attnloom.backends import registry
from attnloom.backends.registry import Backend
from attnloom.block_mask import BlockLists
from attnloom.errors import UnsupportedError
from attnloom.ir.node import BoundProgram, Program
from attnloom.ir.passes.simplify import simplify
from attnloom.paged.table import PageTable
from attnloom.plan.choose import Candidate, candidates
from attnloom.plan.kernel_plan import KernelPlan
from attnloom.plan.problem import KernelOptions, Problem
from attnloom.stats import count

_log = logging.getLogger("attnloom")
_PLAN_LIMIT = 4096
_plans: dict[tuple[object, ...], tuple[KernelPlan, Backend]] = {}
_warned: set[str] = set()


def bind(
    program: Program | None, tensors: tuple[torch.Tensor, ...], numbers: Numbers
) -> BoundProgram | None:
    """A bound program, or None for no program."""
    return None if program is None else BoundProgram(program, tensors, numbers)


def plan_launch(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    score: BoundProgram | None,
    mask: BoundProgram | None,
    blocks: BlockLists | None,
    scale: float,
    options: KernelOptions,
    table: PageTable | None = None,
) -> tuple[Launch, tuple[torch.Tensor, ...]]:
    """Plan a validated call; a Problem is planned once.

    Returns:
        the launch, and the captured tensors to run it with (those of the score program first).
    Raises:
        UnsupportedError: the chosen backend cannot run it.
    """
    query, key, value = inputs
    # Problem's fields as a plain tuple, which takes a third of the time of building a Problem.
    memo = (
        query.device,
        query.dtype,
        key.dtype,
        value.dtype,
        int(query.size(3)),  # a traced size is made static: kernels are built for it
        int(value.size(3)),
        None if score is None else score.program.digest,
        None if mask is None else mask.program.digest,
        blocks is None,
        options,
        table is None,
        table is None or table.pages is None,
    )
    found = _plans.get(memo)
    if found is not None:
        return _launch(found, score, mask, blocks, scale, table)
    problem = Problem(
        device=query.device,
        dtypes=(query.dtype, key.dtype, value.dtype),
        head_dim=int(query.size(3)),
        value_dim=int(value.size(3)),
        score=None if score is None else score.program.digest,
        mask=None if mask is None else mask.program.digest,
        has_blocks=blocks is not None,
        options=options,
        has_table=table is not None,
        has_pages=table is not None and table.pages is not None,
    )
    programs = (
        _after_passes(score, options, "score"),
        _after_passes(mask, options, "mask"),
    )
    device = query.device.type
    for candidate in candidates(options, device, device == "cpu" and _has_compiler()):
        plan = KernelPlan(problem, candidate.backend, *programs)
        backend = registry.load(candidate.backend)
        launch, tensors = _launch((plan, backend), score, mask, blocks, scale, table)
        reason = backend.unsupported(launch.call(query, key, value, tensors))
        if reason is None:
            _announce(candidate.warning)
            if len(_plans) >= _PLAN_LIMIT:
                _plans.clear()
            _plans[memo] = (plan, backend)
            return launch, tensors
        _reject(candidate, reason, options)
    raise UnsupportedError(f"no backend can run this problem: {reason}")


def _launch(
    planned: tuple[KernelPlan, Backend],
    score: BoundProgram | None,
    mask: BoundProgram | None,
    blocks: BlockLists | None,
    scale: float,
    table: PageTable | None,
) -> tuple[Launch, tuple[torch.Tensor, ...]]:
    plan, backend = planned
    score_numbers: Numbers = ()
    mask_numbers: Numbers = ()
    tensors: tuple[torch.Tensor, ...] = ()
    if score is not None and plan.score is not None:
        score_numbers, tensors = score.numbers, score.tensors
    count_score = len(tensors)
    if mask is not None and plan.mask is not None:
        # A mask is a comparison: nothing is differentiable in it.
        tensors += tuple(t.detach() if t.requires_grad else t for t in mask.tensors)
        mask_numbers = mask.numbers
    launch = Launch(plan, backend, blocks, scale, score_numbers, mask_numbers, count_score, table)
    return launch, tensors


def _after_passes(
    bound: BoundProgram | None, options: KernelOptions, purpose: str
) -> Program | None:
    """The program as backends see it; None for an identity score or an always true mask."""
    if bound is None:
        return None
    program = simplify(bound.program, exact=options.exact_math)
    result = program.nodes[program.outputs[0]]
    if purpose == "score" and result.op == "input" and result.attr == "score":
        return None
    if purpose == "mask" and result.op == "const" and result.attr is True:
        return None
    return program


def _has_compiler() -> bool:
    from attnloom.backends.cpu import toolchain

    return toolchain.available() is not None


def _announce(warning: str | None) -> None:
    if warning is None:
        return
    count("fallbacks")
    if warning not in _warned:
        _warned.add(warning)
        warnings.warn(warning, UserWarning, stacklevel=2)


def _reject(candidate: Candidate, reason: str, options: KernelOptions) -> None:
    """Raise if the caller chose this backend; else say why the next one is tried."""
    why = f"backend '{candidate.backend}' cannot run this: {reason}"
    if options.backend != "auto":
        raise UnsupportedError(f"{why} Use backend='auto' to let attnloom choose.")
    if candidate.special:
        _log.info("%s The next backend runs it.", why)
    else:
        _announce(f"{why} A slower backend runs it instead.")
