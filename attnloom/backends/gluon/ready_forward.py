"""Forward launches of the Gluon backend but for their addresses: descriptors, sizes, lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnloom.backends.gluon import merged_lists
from attnloom.backends.gluon.configs_forward import PANEL, Form
from attnloom.backends.gluon.counters import counter_of
from attnloom.backends.gluon.descriptors import Blank
from attnloom.backends.gluon.fields_forward import Scales, config_of, form_of, scales_of
from attnloom.backends.gluon.forward_sm90 import forward_kernel
from attnloom.backends.gluon.short_rows import has_short_rows
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import configs
from attnloom.backends.triton.arguments import bind
from attnloom.backends.triton.beside import Job
from attnloom.backends.triton.fields import Tensors, overhanging_block
from attnloom.backends.triton.launcher import Launcher, addresses_aligned
from attnloom.backends.triton.lists import is_capturing, work_lists
from attnloom.backends.triton.packed import pack_ints
from attnloom.backends.triton.sizes import heads_together

_NO_LISTS = (0.0,) * 8
_REGISTERS = 256  # a thread, of a program of two warpgroups that is alone on a processor
_ROWS_TOGETHER = 2**16  # of heads under a mask, twice as many up to 64 columns
_TILES_OF_A_HEAD = 8  # that run at once and so read the same keys, where rows differ in length


@dataclass(frozen=True, slots=True)
class Ready:
    """A launch but for its addresses. blanks: descriptors of query, key, value and out.
    follower: who compiles the form that takes over from a quick one (first_call.py)."""

    launch: Launcher
    form: Form
    blanks: tuple[Blank, Blank, Blank, Blank]
    scales: Scales
    shape: tuple[float, ...]
    follower: Job | None = None

    def is_over(self, query: torch.Tensor) -> bool:
        """Whether the form that takes over is there."""
        if self.follower is None:
            return False
        if is_capturing(query):
            self.follower.wait()
        return not self.follower.is_running()


def prepare(call: AttentionCall, tensors: Tensors, form: Form, fixed: bool) -> Ready:
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
        _heads_together(call, device),
        batch * heads,
        -(-kv_len // form.tile_n),
        num_tiles * batch * heads,
        0 if key.size(0) == 1 else 1,
        overhang,
    )
    score = form_of(call, fixed)
    config = config_of(call, form, score, tensors.max_scores is not None)
    grid = min(device.num_processors * form.programs, num_tiles * batch * heads)
    blanks = (
        Blank.of(query, form.rows, form.columns(head_dim)),
        Blank.of(key, form.box, form.columns(head_dim)),
        Blank.of(tensors.value, form.box, form.columns(value_dim)),
        Blank.of(tensors.out, form.rows, form.columns(value_dim)),
    )
    options = {"num_warps": form.warps}
    if form.programs > 1:
        options["maxnreg"] = _REGISTERS // form.programs // 8 * 8  # given in eights
    launcher = Launcher(forward_kernel, config, grid, options, hasty=form.hasty)
    return Ready(launcher, form, blanks, scales_of(call, score), pack_ints(shape))


def _heads_together(call: AttentionCall, device: configs.Device) -> int:
    """Query heads taken together, whole groups of a key head: those that share the L2 cache, and
    under a mask more. Its longest tiles start first among them, and the end is the more even; keys
    and values that pass the cache again and again cost power as well as time (H200 with 4 ms of
    rest before each run, causal, ms of 2, 4, 8, 16 heads: D = 128, S = 8192 1.610, 1.588, 1.575,
    1.612 at 1,639, 1,628, 1,624 and 1,596 MHz; S = 16,384 3.065, 3.035, 3.074; S = 32,768 5.964,
    5.996, 6.013, 6.160; D = 96 1.428, 1.403, 1.389, 1.416, ten 1.432; D = 192 2.338, 2.336, 2.303,
    2.367; D = 256 3.121, 3.112, 3.031, 3.085; D = 64 4, 8, 16, 32 heads 1.097, 1.071, 1.048)."""
    together = heads_together(call, device)
    if call.blocks is None or has_short_rows(call):
        return together
    group = call.query.size(1) // call.key.size(1)
    most = device.num_processors // _TILES_OF_A_HEAD
    narrow = max(call.query.size(3), call.value.size(3)) <= PANEL
    rows = _ROWS_TOGETHER * 2 if narrow else _ROWS_TOGETHER
    return max(together, min(most, rows // call.query.size(2)) // group * group)


def start(ready: Ready, call: AttentionCall, tensors: Tensors) -> None:
    counter = counter_of(tensors.lse.device)
    lists = lists_of(call, ready.form)
    ready.launch(addresses_aligned(call), *arguments(ready, call, tensors, counter, lists))


def arguments(
    ready: Ready,
    call: AttentionCall,
    tensors: Tensors,
    counter: torch.Tensor,
    lists: tuple[object, ...],
) -> tuple[object, ...]:
    """Of forward_kernel but for its config."""
    query, key, value, out = (
        blank.at(t) for blank, t in zip(ready.blanks, tensors.operands, strict=True)
    )
    _, lse, max_scores = tensors.outputs()
    return (
        query, key, value, out, lse, max_scores, counter, lists,
        bind(call.score), bind(call.mask), ready.scales.factor, ready.scales.base, ready.shape,
    )  # fmt: skip


def lists_of(call: AttentionCall, form: Form) -> tuple[object, ...]:
    blocks = call.blocks
    if blocks is None:
        return _NO_LISTS
    if form.is_apart(blocks.q_block):
        merged = merged_lists.merged_lists(blocks, form.consumers)
        return merged.entries, merged.work, *merged.steps
    found = work_lists(blocks, form.tile_m)
    # a kernel needs an address, also to read nothing from
    entries = blocks.entries if blocks.entries.numel() else blocks.entries.new_zeros(1)
    return entries, found.work, *found.steps


def expected_lists(call: AttentionCall) -> tuple[object, ...]:
    """Of the types that `lists_of` will have, to compile for: fewer than 2**31 aligned entries."""
    if call.blocks is None:
        return _NO_LISTS
    entries = call.blocks.entries
    return entries, entries, *pack_ints((0, 0))
