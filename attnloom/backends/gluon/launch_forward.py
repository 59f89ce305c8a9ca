"""Forward launches of the Gluon backend, and what is remembered between calls.

A call with shapes, strides, dtypes and mods that were seen before finds a _Ready: everything but
the addresses. A form that the device refuses for resources, or whose kernel spills, is followed by
the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.runtime.errors import OutOfResources

from attnloom.backends.gluon import configs_forward, merged_lists
from attnloom.backends.gluon.configs_forward import ROWS, Form, width_of
from attnloom.backends.gluon.descriptors import Blank
from attnloom.backends.gluon.fields_forward import Scales, config_of, form_of, scales_of
from attnloom.backends.gluon.forward_sm90 import forward_kernel
from attnloom.backends.registry import AttentionCall, ForwardResult
from attnloom.backends.triton import configs
from attnloom.backends.triton.arguments import bind, takes_descriptor
from attnloom.backends.triton.fields import Tensors, launch_key, overhanging_block
from attnloom.backends.triton.launch_decode import is_decode
from attnloom.backends.triton.launch_forward import heads_together
from attnloom.backends.triton.launcher import Launcher, addresses_aligned
from attnloom.backends.triton.lists import work_lists
from attnloom.backends.triton.packed import pack_ints

_NO_LISTS = (0.0,) * 8
_INT32 = 2**31 - 1
_FEW_SPILLS = 16
_READY_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class _Ready:
    """A launch but for its addresses. blanks: descriptors of query, key, value and out."""

    launch: Launcher
    form: Form
    blanks: tuple[Blank, Blank, Blank, Blank]
    scales: Scales
    shape: tuple[float, ...]


_ready: dict[tuple[object, ...], _Ready] = {}
_first_numbers: dict[str, str] = {}
_counters: dict[tuple[int, int], torch.Tensor] = {}


def refusal(call: AttentionCall) -> str | None:
    """Why the forward of this call cannot run here."""
    value, blocks = call.value, call.blocks
    if value.size(3) * value.element_size() % 16:
        return (
            f"value has head dimension {value.size(3)}, and TMA writes rows of the output that "
            "start at multiples of 16 bytes."
        )
    if blocks is None:
        return None
    if not _forms(call):
        return (
            f"blocks of the mask are {blocks.q_block} x {blocks.kv_block} tokens; the kernels take "
            f"blocks from 64 x 128 (64 x 64 for heads wider than 128)."
        )
    if blocks.entries.numel() * blocks.kv_block // ROWS > _INT32:
        return "the mask has more live blocks than 32 bits count."
    return None


def slower(call: AttentionCall) -> str | None:
    """Why the portable kernels are the better choice for this call."""
    if is_decode(call):
        return "there are few queries; the keys are split instead."
    return None


def forward(call: AttentionCall, want_max_scores: bool) -> ForwardResult:
    """Run the forward kernel on tensors that TMA can read; none is empty."""
    tensors = Tensors.of(call, want_max_scores)
    assert takes_descriptor(tensors.out)
    fixed = has_first_numbers(call)
    key = (fixed, call.scale, *launch_key(call, tensors))
    ready = _ready.get(key)
    if ready is None:
        if len(_ready) >= _READY_LIMIT:
            _ready.clear()
        _ready[key] = _choose(call, tensors, fixed)
    else:
        _launch(ready, call, tensors)
    return tensors.result()


def has_first_numbers(call: AttentionCall) -> bool:
    """Whether the score_mod's numbers are those that it was first called with. A kernel is compiled
    for these, and one more for all others."""
    if call.score is None or not call.score.numbers:
        return True
    # text tells 0.0 from -0.0, and finds NaN equal to itself
    numbers = repr(call.score.numbers)
    return _first_numbers.setdefault(call.score.program.digest, numbers) == numbers


def _choose(call: AttentionCall, tensors: Tensors, fixed: bool) -> _Ready:
    """Launch with the first form that fits the device and keeps all values in registers; else with
    the one that comes closest."""
    best: _Ready | None = None
    refused: OutOfResources | None = None
    for form in _forms(call):
        ready = prepare(call, tensors, form, fixed)
        try:
            _launch(ready, call, tensors)
        except OutOfResources as error:
            refused = error
            continue
        if best is None or ready.launch.spills < best.launch.spills:
            best = ready
        if best.launch.spills <= _FEW_SPILLS:
            break
    if best is None:
        raise refused or AssertionError("no forms")
    return best


def _launch(ready: _Ready, call: AttentionCall, tensors: Tensors) -> None:
    query, key, value, out = (
        blank.at(t) for blank, t in zip(ready.blanks, tensors.operands, strict=True)
    )
    _, lse, max_scores = tensors.outputs()
    ready.launch(
        addresses_aligned(call), query, key, value, out, lse, max_scores, _counter(lse.device),
        _lists(call, ready.form), bind(call.score), bind(call.mask), ready.scales.factor,
        ready.scales.base, ready.shape,
    )  # fmt: skip


def _lists(call: AttentionCall, form: Form) -> tuple[object, ...]:
    blocks = call.blocks
    if blocks is None:
        return _NO_LISTS
    if form.is_apart(blocks.q_block):
        entries, work, step = merged_lists.merged_lists(blocks, form.consumers)
        return entries, work, *step
    found = work_lists(blocks, form.tile_m)
    # a kernel needs an address, also to read nothing from
    entries = blocks.entries if blocks.entries.numel() else blocks.entries.new_zeros(1)
    return entries, found.work, *found.steps


def _counter(device: torch.device) -> torch.Tensor:
    """One int32, zero between launches, for the launches of a stream."""
    if torch.cuda.is_current_stream_capturing():
        # replays may run beside each other
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index or 0, torch.cuda.current_stream(device).cuda_stream)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


def prepare(call: AttentionCall, tensors: Tensors, form: Form, fixed: bool) -> _Ready:
    """A launch of this form; fixed: see `has_first_numbers`."""
    query, key, blocks = tensors.query, tensors.key, call.blocks
    batch, heads, q_len, head_dim = query.shape
    kv_len, value_dim = key.size(2), tensors.value.size(3)
    num_tiles = -(-q_len // form.tile_m)
    overhang = overhanging_block(call)
    if blocks is None and kv_len % form.tile_n:
        overhang = kv_len // form.tile_n
    device = configs.device_of(query.device)
    shape = (
        heads,
        q_len,
        kv_len,
        0 if blocks is None else blocks.q_offset,
        0 if blocks is None else blocks.kv_offset,
        heads // key.size(1),
        num_tiles,
        heads_together(call, device),
        batch * heads,
        -(-kv_len // form.tile_n),
        num_tiles * batch * heads,
        0 if key.size(0) == 1 else 1,
        overhang,
    )
    score = form_of(call, fixed)
    config = config_of(call, form, score, tensors.max_scores is not None)
    grid = min(device.num_processors, num_tiles * batch * heads)
    blanks = (
        Blank.of(query, ROWS, width_of(head_dim)),
        Blank.of(key, form.tile_n, width_of(head_dim)),
        Blank.of(tensors.value, form.tile_n, width_of(value_dim)),
        Blank.of(tensors.out, ROWS, width_of(value_dim)),
    )
    launcher = Launcher(forward_kernel, config, grid, {"num_warps": 4})
    return _Ready(launcher, form, blanks, scales_of(call, score), pack_ints(shape))


def _forms(call: AttentionCall) -> tuple[Form, ...]:
    widths = width_of(call.query.size(3)), width_of(call.value.size(3))
    blocks = call.blocks
    if blocks is None:
        return configs_forward.forms(*widths, None)
    if blocks.q_block % ROWS:
        return ()
    found = configs_forward.forms(*widths, blocks.kv_block)
    if blocks.entries.numel() > merged_lists.LIMIT:
        found = tuple(f for f in found if not f.is_apart(blocks.q_block))
    return found
