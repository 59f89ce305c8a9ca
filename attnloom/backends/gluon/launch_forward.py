"""Forward launches of the Gluon backend, and what is remembered between calls.

A call with shapes, strides, dtypes and mods that were seen before finds a Ready: everything but
the addresses. A form that the device refuses for resources, or whose kernel spills, is followed by
the next."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from attnloom.backends.gluon import configs_forward, first_call, gate, merged_lists
from attnloom.backends.gluon.configs_forward import FEW_SPILLS, ROWS, Form, covered
from attnloom.backends.gluon.counters import counter_of
from attnloom.backends.gluon.emit import comes_in_pieces, looks_up_lane_by_lane
from attnloom.backends.gluon.emit_mask import is_of_edges
from attnloom.backends.gluon.few_steps import has_few_steps, wants_short_steps
from attnloom.backends.gluon.fields import mask_target, score_target
from attnloom.backends.gluon.fields_forward import form_of
from attnloom.backends.gluon.ready_forward import Ready, arguments, lists_of, prepare, start
from attnloom.backends.gluon.short_rows import finer, has_short_rows
from attnloom.backends.registry import NOT_YET, AttentionCall, ForwardResult, NotYet
from attnloom.backends.triton import configs
from attnloom.backends.triton.again import ForwardAgain, with_aliases
from attnloom.backends.triton.choice import keep
from attnloom.backends.triton.fields import Tensors, launch_key
from attnloom.backends.triton.launcher import addresses_aligned
from attnloom.backends.triton.sizes import is_decode
from attnloom.block_mask import BlockLists

_INT32 = 2**31 - 1
_TILE_M = _TILE_N = 128
_MANY_SPILLS = 64


# A reason in place of a launch: such calls do not run here.
_ready: dict[tuple[object, ...], Ready | str] = {}
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
    if ready is not None and not ready.is_over(call.query):
        tensors = Tensors.of(call, want_max_scores)
        start(ready, call, tensors)
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


def forward_again(call: AttentionCall, want_max_scores: bool) -> ForwardAgain | NotYet | str | None:
    """See `registry.Backend`; None where launches are Triton's, a reason as `forward`'s."""
    why = _not_here(call)
    if why is not None:
        return why
    given, call = call, finer(call)
    ready = _ready.get(_key(call, want_max_scores)[1])
    if isinstance(ready, str):
        return ready
    if ready is not None and ready.follower is not None:
        return NOT_YET
    tensors = Tensors.of(call, want_max_scores)
    found = with_aliases(call, tensors)
    if ready is None or found is None or not addresses_aligned(call):
        return None
    alias, others, sources = found
    device = call.query.device
    counter = counter_of(device).detach()
    args = arguments(ready, alias, others, counter, lists_of(alias, ready.form))
    restart = ready.launch.restart(args, (*sources, counter))
    if restart is None:
        return None

    def start(stream: int, addresses: tuple[int, ...]) -> None:
        tiles = counter_of(device, stream)
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
    chosen = call.blocks is not None and call.blocks.chosen
    few = has_few_steps(call) or wants_short_steps(call)  # of different heads
    lists = _size_class(call.blocks), chosen, few, has_short_rows(call)
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
) -> Ready | str:
    """Launch with the first form that fits the device and keeps all values in registers; else with
    the one that comes closest, unless another backend may do better. given: the call before
    short_rows.py, for its backward."""
    best: Ready | None = None
    forms = _in_order(call, fixed)
    for i, form in enumerate(forms):
        ready = prepare(call, tensors, form, fixed)
        if best is None:
            following = (partial(prepare, call, tensors, f, fixed) for f in forms[i + 1 :])
            begun = first_call.begin(ready, call, tensors, following, fixed, given)
            if begun is not None:
                return begun
        try:
            start(ready, call, tensors)
        except OutOfResources:
            continue
        if best is None or ready.launch.spills < best.launch.spills:
            best = ready
        if best.launch.spills <= FEW_SPILLS:
            break
    if best is None:
        return "no form of the kernel fits the device's memory."
    if best.launch.spills > _MANY_SPILLS and call.options.backend == "auto":
        return "its mods need more registers than the kernel has."
    return best


def _in_order(call: AttentionCall, fixed: bool) -> tuple[Form, ...]:
    """Forms to try for a call, best first. What a score_mod computes of scores takes registers, and
    more of them a thread are worth more than a third consumer (soft-cap, D = 64: 3%, H200).
    Elements of single scores come in pieces if they can; a form that reads them lane by lane is
    none for "auto" (_slower_mods)."""
    score = form_of(call, fixed)
    if score is None or score.inner is None:
        found = _forms(call)
        if has_few_steps(call):
            return tuple(sorted(found, key=_consumers))
        return tuple(sorted(found, key=_step)) if wants_short_steps(call) else found
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


def _step(form: Form) -> int:
    return form.tile_n


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
    if call.mask and not is_of_edges(call.mask.program, mask_target(call, narrow=True)):
        found = tuple(f for f in found if not f.turns)
    if _size_class(blocks):
        found = tuple(f for f in found if not f.is_apart(blocks.q_block))
    if blocks.chosen or call.mask is None or _size_class(blocks):
        # a step may have boxes of two blocks, and is partial if one of them is: so the mask has to
        # be true in full blocks
        found = tuple(f for f in found if not f.strips)
    return tuple(f for f in found if not (f.strips and f.is_apart(blocks.q_block)))
