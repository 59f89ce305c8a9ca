"""Forward launches of the Gluon backend, and what is remembered between calls.

A call with shapes, strides, dtypes and mods that were seen before finds a _Ready: everything but
the addresses. A form that the device refuses for resources, or whose kernel spills, is followed by
the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from attnloom.backends.gluon import configs_forward, gate, merged_lists
from attnloom.backends.gluon.configs_forward import ROWS, Form, covered
from attnloom.backends.gluon.counters import counter_of
from attnloom.backends.gluon.descriptors import Blank
from attnloom.backends.gluon.emit import comes_in_pieces, looks_up_lane_by_lane
from attnloom.backends.gluon.few_steps import has_few_steps
from attnloom.backends.gluon.fields import mask_target, score_target
from attnloom.backends.gluon.fields_forward import Scales, config_of, form_of, scales_of
from attnloom.backends.gluon.forward_sm90 import forward_kernel
from attnloom.backends.gluon.short_rows import finer, has_short_rows
from attnloom.backends.registry import AttentionCall, ForwardResult
from attnloom.backends.triton import configs
from attnloom.backends.triton.again import ForwardAgain, with_aliases
from attnloom.backends.triton.arguments import bind
from attnloom.backends.triton.beside import Job, is_new
from attnloom.backends.triton.choice import keep
from attnloom.backends.triton.fields import Tensors, launch_key, overhanging_block
from attnloom.backends.triton.launcher import Launcher, addresses_aligned
from attnloom.backends.triton.lists import is_capturing, work_lists
from attnloom.backends.triton.packed import pack_ints
from attnloom.backends.triton.sizes import heads_together, is_decode
from attnloom.block_mask import BlockLists

_NO_LISTS = (0.0,) * 8
_INT32 = 2**31 - 1
_TILE_M = _TILE_N = 128
_REGISTERS = 256  # a thread, of a program of two warpgroups that is alone on a processor
_FEW_SPILLS = 16
_MANY_SPILLS = 64
_TILES_OF_A_HEAD = 8  # that run at once and so read the same keys, where rows differ in length


@dataclass(frozen=True, slots=True)
class _Ready:
    """A launch but for its addresses. blanks: descriptors of query, key, value and out."""

    launch: Launcher
    form: Form
    blanks: tuple[Blank, Blank, Blank, Blank]
    scales: Scales
    shape: tuple[float, ...]


# A reason in place of a launch: such calls do not run here.
_ready: dict[tuple[object, ...], _Ready | str] = {}
_first_numbers: dict[str, str] = {}


def forward(call: AttentionCall, want_max_scores: bool) -> ForwardResult | str:
    """Run the forward kernel on tensors none of which is empty; or say why another backend has to,
    or under "auto" had better."""
    # small problems hear it first: their time is the host's
    why = _not_here(call)
    if why is not None:
        return why
    given, call = call, finer(call)
    fixed, key = _key(call, want_max_scores)
    ready = _ready.get(key)
    if isinstance(ready, str):
        return ready
    if ready is not None:
        tensors = Tensors.of(call, want_max_scores)
        _launch(ready, call, tensors)
        return tensors.result()
    why = _refusal(call)
    if why is None and call.options.backend == "auto":
        why = _slower_mods(call, fixed)
    if why is None:
        tensors = Tensors.of(call, want_max_scores)
        ready = _choose(call, tensors, fixed, given)
        keep(_ready, key, ready)
        return ready if isinstance(ready, str) else tensors.result()
    keep(_ready, key, why)
    return why


def forward_again(call: AttentionCall, want_max_scores: bool) -> ForwardAgain | str | None:
    """See `registry.Backend`; None where launches are Triton's, a reason as `forward`'s."""
    why = _not_here(call)
    if why is not None:
        return why
    given, call = call, finer(call)
    ready = _ready.get(_key(call, want_max_scores)[1])
    if isinstance(ready, str):
        return ready
    tensors = Tensors.of(call, want_max_scores)
    found = with_aliases(call, tensors)
    if ready is None or found is None or not addresses_aligned(call):
        return None
    alias, others, sources = found
    device = call.query.device
    counter = counter_of(device).detach()
    args = _arguments(ready, alias, others, counter, _lists(alias, ready.form))
    restart = ready.launch.restart(args, (*sources, counter))
    if restart is None:
        return None

    def start(stream: int, addresses: tuple[int, ...]) -> None:
        tiles = counter_of(device)
        restart(stream, (*addresses, tiles.data_ptr()))

    found = ForwardAgain(call, tensors, start)
    return found if call is given else found.only_for(call)


def _not_here(call: AttentionCall) -> str | None:
    why = _slower(call) if call.options.backend == "auto" else None
    return why or gate.call_refusal(call)


def _key(call: AttentionCall, want_max_scores: bool) -> tuple[bool, tuple[object, ...]]:
    """Whether numbers are the first ones, and what launches are remembered by."""
    fixed = has_first_numbers(call)
    inputs = _Inputs(call.query, call.key, call.value, call.query if want_max_scores else None)
    lists = _size_class(call.blocks), has_few_steps(call), has_short_rows(call)
    return fixed, (fixed, call.scale, *lists, *launch_key(call, inputs))


class _Inputs(NamedTuple):
    """What `launch_key` asks of tensors."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    max_scores: torch.Tensor | None


def _size_class(blocks: BlockLists | None) -> int:
    """0: lists of any form; 1: too long to be merged; 2: too long to be counted in 32 bits."""
    if blocks is None:
        return 0
    count = blocks.entries.numel()
    if count * blocks.kv_block // ROWS > _INT32:
        return 2
    return 1 if count > merged_lists.LIMIT else 0


def _refusal(call: AttentionCall) -> str | None:
    """Why the forward of this call does not run here."""
    value, blocks = call.value, call.blocks
    if value.size(3) * value.element_size() % 16:
        return (
            f"value has head dimension {value.size(3)}, and TMA writes rows of the output that "
            "start at multiples of 16 bytes."
        )
    if blocks is not None and not _forms(call):
        return (
            f"blocks of the mask are {blocks.q_block} x {blocks.kv_block} tokens; the kernels take "
            f"blocks from 64 x 128 (64 x 64 for heads wider than 128, and for others where a mask "
            f"has few blocks a row: packed documents, and windows at 65 to 128)."
        )
    if _size_class(blocks) == 2:
        return "the mask has more live blocks than 32 bits count."
    return None


def _slower(call: AttentionCall) -> str | None:
    """Why the portable kernels are the better choice for this call."""
    query = call.query
    num_tiles = query.size(0) * query.size(1) * -(-query.size(2) // _TILE_M)
    if num_tiles < configs.device_of(query.device).num_processors:
        return "there are fewer tiles of queries than processors; smaller tiles are used instead."
    if is_decode(call):
        return "there are few queries; the keys are split instead."
    head_dim, value_dim = query.size(3), call.value.size(3)
    if not _is_filled(head_dim, value_dim) or not _is_filled(value_dim, head_dim):
        return (
            "heads are narrower than the tiles that cover them; tiles of other widths fit better."
        )
    if call.key.size(2) < _TILE_N:
        return "there are fewer keys than a tile has; smaller tiles are used instead."
    return None


def _slower_mods(call: AttentionCall, fixed: bool) -> str | None:
    """The same of what does not change while the mods do not."""
    form = _in_order(call, fixed)[0]
    targets = score_target(call, form, form.tile_m), mask_target(call, narrow=True)
    for bound, target in zip((call.score, call.mask), targets, strict=True):
        # a full bias, D=64: lane by lane 0.396 ms, in the portable kernels 0.300, in pieces 0.291
        # (H200)
        if bound is not None and looks_up_lane_by_lane(bound.program, target):
            return "a mod looks up a captured tensor for each score."
    return None


def _is_filled(head_dim: int, other_dim: int) -> bool:
    """Whether tiles are wide enough for one of D and Dv, and little wider: 96 of 128 was faster
    than the portable kernels, 192 of 256 slower."""
    width = covered(head_dim, other_dim)
    return 4 * head_dim > 3 * width if width > 128 else 4 * head_dim >= 3 * width


def has_first_numbers(call: AttentionCall) -> bool:
    """Whether the score_mod's numbers are those that it was first called with. A kernel is compiled
    for these, and one more for all others."""
    if call.score is None or not call.score.numbers:
        return True
    # text tells 0.0 from -0.0, and finds NaN equal to itself
    numbers = repr(call.score.numbers)
    return _first_numbers.setdefault(call.score.program.digest, numbers) == numbers


def _choose(
    call: AttentionCall, tensors: Tensors, fixed: bool, given: AttentionCall
) -> _Ready | str:
    """Launch with the first form that fits the device and keeps all values in registers; else with
    the one that comes closest, unless another backend may do better. given: the call before
    short_rows.py, for its backward."""
    best: _Ready | None = None
    for form in _in_order(call, fixed):
        ready = prepare(call, tensors, form, fixed)
        if best is None and (call.for_backward or call.blocks is not None):
            _compile_beside(ready, call, tensors, given)
        try:
            _launch(ready, call, tensors)
        except OutOfResources:
            continue
        if best is None or ready.launch.spills < best.launch.spills:
            best = ready
        if best.launch.spills <= _FEW_SPILLS:
            break
    if best is None:
        return "no form of the kernel fits the device's memory."
    if best.launch.spills > _MANY_SPILLS and call.options.backend == "auto":
        return "its mods need more registers than the kernel has."
    return best


def _compile_beside(
    ready: _Ready, call: AttentionCall, tensors: Tensors, given: AttentionCall
) -> None:
    """Compile the kernel while its lists are derived and, beside it, what the gradients of its
    results will ask for."""
    if is_capturing(call.query) or not addresses_aligned(call):
        return
    if not is_new(ready.launch.config, call.for_backward):
        return
    counter = counter_of(call.query.device)
    job = Job([(ready.launch, _arguments(ready, call, tensors, counter, _expected_lists(call)))])
    _lists(call, ready.form)  # remembered; the first use of torch's operators loads their modules
    if call.for_backward:
        from attnloom.backends.gluon import backward_ahead

        job.read.wait()
        backward_ahead.start(given, tensors.out, tensors.lse)
    job.wait()


def _launch(ready: _Ready, call: AttentionCall, tensors: Tensors) -> None:
    counter = counter_of(tensors.lse.device)
    lists = _lists(call, ready.form)
    ready.launch(addresses_aligned(call), *_arguments(ready, call, tensors, counter, lists))


def _arguments(
    ready: _Ready,
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


def _expected_lists(call: AttentionCall) -> tuple[object, ...]:
    """Of the types that `_lists` will have, to compile for: fewer than 2**31 aligned entries."""
    if call.blocks is None:
        return _NO_LISTS
    entries = call.blocks.entries
    return entries, entries, *pack_ints((0, 0))


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
        Blank.of(query, ROWS, form.columns(head_dim)),
        Blank.of(key, form.tile_n, form.columns(head_dim)),
        Blank.of(tensors.value, form.tile_n, form.columns(value_dim)),
        Blank.of(tensors.out, ROWS, form.columns(value_dim)),
    )
    options = {"num_warps": 4}
    if form.programs > 1:
        options["maxnreg"] = _REGISTERS // form.programs // 8 * 8  # given in eights
    launcher = Launcher(forward_kernel, config, grid, options)
    return _Ready(launcher, form, blanks, scales_of(call, score), pack_ints(shape))


def _heads_together(call: AttentionCall, device: configs.Device) -> int:
    """Query heads taken together, whole groups of a key head: those that share the L2 cache, and
    under a mask more. Its longest tiles start first among them, and the end is the more even; keys
    that do not fit are read at about the same time by the tiles that run at once (H200, S = 8192:
    D = 128, causal, 2, 4, 8, 16 heads 1.892, 1.843, 1.820, 1.816 ms; 16 heads gain 2% with
    soft cap, windows and at D = 64, 3% with ALiBi, 4 to 5% at D = 192 and 256)."""
    together = heads_together(call, device)
    if call.blocks is None or has_short_rows(call):
        return together
    group = call.query.size(1) // call.key.size(1)
    return max(together, device.num_processors // _TILES_OF_A_HEAD // group * group)


def _in_order(call: AttentionCall, fixed: bool) -> tuple[Form, ...]:
    """Forms to try for a call, best first. What a score_mod computes of scores takes registers, and
    more of them a thread are worth more than a third consumer (soft-cap, D = 64: 3%, H200).
    Elements of single scores come in pieces if they can; a form that reads them lane by lane is
    none for "auto" (_slower_mods)."""
    score = form_of(call, fixed)
    if score is None or score.inner is None:
        found = _forms(call)
        return tuple(sorted(found, key=_consumers)) if has_few_steps(call) else found
    inner = score.inner
    in_pieces = tuple(
        form
        for form in _forms(call, pieces=True)
        if comes_in_pieces(inner, score_target(call, form, form.tile_m))
    )
    if in_pieces and call.options.backend == "auto":
        return in_pieces
    return (*in_pieces, *sorted(_forms(call), key=_consumers))


def _consumers(form: Form) -> int:
    return form.consumers


def _forms(call: AttentionCall, pieces: bool = False) -> tuple[Form, ...]:
    dims = call.query.size(3), call.value.size(3)
    blocks = call.blocks
    plain = call.score is None and not (call.mask and call.mask.tensors)
    if blocks is None:
        return configs_forward.forms(*dims, None, pieces, plain)
    if has_short_rows(call):
        return () if pieces else configs_forward.forms_of_short_rows(*dims)
    if blocks.q_block % ROWS:
        return ()
    found = configs_forward.forms(*dims, blocks.kv_block, pieces, plain)
    if _size_class(blocks):
        found = tuple(f for f in found if not f.is_apart(blocks.q_block))
    return found
