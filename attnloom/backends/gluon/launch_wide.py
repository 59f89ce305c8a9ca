"""Backward launches for heads of 129 to 192 that launch_roles.py leaves: dk and dq by wide_kernel,
dv by the portable key kernel that has it alone, on row statistics of the portable kernels
(backward_wide.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnloom.backends.gluon import configs_backward, ready_backward
from attnloom.backends.gluon.backward_around import finish_kernel
from attnloom.backends.gluon.backward_wide import wide_kernel
from attnloom.backends.gluon.configs_backward import (
    FEW_SPILLS,
    KEYS,
    MAX_HEAD_DIM,
    PANEL,
    PANELS,
    STEP,
    Form,
)
from attnloom.backends.gluon.descriptors import Blank
from attnloom.backends.gluon.fields_backward import Mods, around_config, wide_config
from attnloom.backends.gluon.launch_forward import has_first_numbers
from attnloom.backends.gluon.launch_shared import unless_it_spills
from attnloom.backends.gluon.lists_backward import expected_key_lists, key_lists
from attnloom.backends.registry import AttentionCall, Gradients
from attnloom.backends.triton.again import BackwardAgain
from attnloom.backends.triton.arguments import bind
from attnloom.backends.triton.beside import Launch
from attnloom.backends.triton.fields_backward import Role
from attnloom.backends.triton.launch_around import (
    empty_statistics,
    lines_of_queries,
    one_line,
    row_statistics,
    statistics_again,
    statistics_first,
)
from attnloom.backends.triton.launch_backward import (
    keys_again,
    keys_first,
    run_keys,
    started_again,
    zero_gradients,
)
from attnloom.backends.triton.launcher import Launcher, addresses_aligned
from attnloom.backends.triton.operands import Operands
from attnloom.backends.triton.packed import pack_ints
from attnloom.backends.triton.ready_backward import pitch_of

_DV_ALONE = Role(own_keys=True, want_dk=False)


@dataclass(frozen=True, slots=True)
class _Ready:
    """One backward but for addresses. blanks: of query, dout, key, value, dk."""

    main: Launcher
    finish: Launcher
    blanks: tuple[Blank, ...]
    stats: Blank
    scales: tuple[float, float, float]
    main_shape: tuple[float, ...]
    finish_shape: tuple[float, ...]


_ready: dict[tuple[Any, ...], _Ready | None] = {}


def form_of(call: AttentionCall) -> Form:
    """The form of the main kernel."""
    return configs_backward.form_in_panels(ready_backward.may_fold(call))


def takes(call: AttentionCall) -> bool:
    """Whether a backward is one for these kernels or those of launch_roles.py, as far as can be
    told before they are made.

    No head is too narrow: the main kernel's 4 products, of whole panels, have at most 1.06 times
    the columns of the 6 that they stand for in the portable kernels (D=136, Dv=8), and a column
    takes 0.93 of the time there (H200, D=192, full: 18.4 ms against 25.6 with the pass of dv, which
    is in both and was taken as a quarter of the latter). D=192 alone was timed.
    """
    head_dim, value_dim = call.query.size(3), call.value.size(3)
    if not MAX_HEAD_DIM < head_dim <= PANELS * PANEL or value_dim > PANELS * PANEL or call.learns:
        return False
    if ready_backward.refusal(call) is not None:
        return False
    if call.options.backend != "auto":
        return True
    return ready_backward.slower_keys(call) is None and ready_backward.coarse(call) is None


def backward(operands: Operands) -> Gradients | None:
    """Gradients of query, key and value; None where the kernel spills, the first time too."""
    return unless_it_spills(_ready, operands, _prepare, _run, FEW_SPILLS)


def expected_launches(operands: Operands) -> list[Launch]:
    """What a backward will launch, to be compiled and not started. Only addresses are taken of
    memory."""
    ready, stats = _prepare(operands), empty_statistics(operands)
    dq_sum, lists = one_line(stats, PANELS * PANEL), expected_key_lists(operands.call)
    return [
        (ready.main, _main_arguments(operands, ready, stats, dq_sum, lists)),
        keys_first(operands, stats, _DV_ALONE),
        statistics_first(operands, stats, dq_sum),
        (ready.finish, _finish_arguments(operands, ready, dq_sum)),
    ]


def _prepare(operands: Operands) -> _Ready:
    call = operands.call
    query, key, value, dout = operands.inputs
    form = form_of(call)
    mods = Mods.of(call, has_first_numbers(call))
    batch, heads, q_len, _ = query.shape
    pitch = pitch_of(operands)
    lines = batch * heads * pitch
    around, main = around_config(operands, PANELS * PANEL), wide_config(operands, form, mods)
    half = KEYS // 2
    boxes = ((query, STEP), (dout, STEP), (key, half), (value, half), (operands.dk, half))
    return _Ready(
        Launcher(wide_kernel, main, ready_backward.num_programs(key), {"num_warps": 4}),
        Launcher(
            finish_kernel,
            around,
            ready_backward.finish_programs(lines, PANELS * PANEL),
            {"num_warps": 4},
        ),
        tuple(Blank.of(tensor, rows, PANEL) for tensor, rows in boxes),
        ready_backward.blank_statistics(lines, query.device),
        mods.scales,
        pack_ints(ready_backward.main_shape(operands, pitch)),
        pack_ints((heads, q_len, pitch, batch * heads)),
    )


def _run(operands: Operands, ready: _Ready) -> Gradients:
    call = operands.call
    dq_sum = lines_of_queries(operands, PANELS * PANEL)
    stats = row_statistics(operands, dq_sum)
    args = _main_arguments(operands, ready, stats, dq_sum, key_lists(call))
    ready.main(addresses_aligned(call), *args)
    ready.finish(True, *_finish_arguments(operands, ready, dq_sum))
    run_keys(operands, stats, _DV_ALONE, None, None)
    dtensors = () if call.score is None else zero_gradients(call)
    return Gradients(operands.dq, operands.dk, operands.dv, dtensors)


def _main_arguments(
    operands: Operands,
    ready: _Ready,
    stats: torch.Tensor,
    dq_sum: torch.Tensor,
    lists: tuple[Any, ...],
) -> tuple[Any, ...]:
    call = operands.call
    query, key, value, dout = operands.inputs
    tensors = (query, dout, key, value, operands.dk)
    q_desc, do_desc, k_desc, v_desc, dk_desc = (
        blank.at(tensor) for blank, tensor in zip(ready.blanks, tensors, strict=True)
    )
    return (
        q_desc, do_desc, k_desc, v_desc, ready.stats.at(stats), dk_desc, dq_sum, lists,
        bind(call.score), bind(call.mask), ready.scales, ready.main_shape,
    )  # fmt: skip


def _finish_arguments(operands: Operands, ready: _Ready, dq_sum: torch.Tensor) -> tuple[Any, ...]:
    return dq_sum, operands.dq, ready.scales[2], ready.finish_shape


def again(operands: Operands, sources: tuple[torch.Tensor, ...]) -> BackwardAgain | str | None:
    """See `registry.Backend`; a reason where the kernel spills."""
    key = ready_backward.key_of(operands)
    ready = _ready.get(key)
    if ready is None:
        return "it spills." if key in _ready else None
    dq_sum = lines_of_queries(operands, PANELS * PANEL)
    stats = empty_statistics(operands)
    launches = (
        statistics_again(operands, stats, dq_sum),
        (ready.main, _main_arguments(operands, ready, stats, dq_sum, key_lists(operands.call))),
        (ready.finish, _finish_arguments(operands, ready, dq_sum)),
        keys_again(operands, stats, _DV_ALONE),
    )
    return started_again(operands, sources, (stats, dq_sum), launches)
