"""Launches of the Gluon backward but for addresses, and which problems are not for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnloom.backends.gluon import few_keys
from attnloom.backends.gluon.backward_around import finish_kernel, prepare_kernel
from attnloom.backends.gluon.backward_sm90 import backward_kernel
from attnloom.backends.gluon.configs_backward import (
    KEYS,
    LONG_STEP,
    MAX_HEAD_DIM,
    STEP,
    Form,
    followed,
    form_for,
    width_of,
)
from attnloom.backends.gluon.descriptors import Blank
from attnloom.backends.gluon.fields_backward import (
    Mods,
    adds_in_each_step,
    around_config,
    finished_columns,
    main_config,
    tells_heads_apart,
)
from attnloom.backends.gluon.launch_forward import has_first_numbers
from attnloom.backends.gluon.lists_backward import most_rows
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import configs
from attnloom.backends.triton.arguments import steps, takes_descriptor
from attnloom.backends.triton.choice import keep
from attnloom.backends.triton.launcher import Launcher
from attnloom.backends.triton.operands import Operands
from attnloom.backends.triton.packed import pack_ints
from attnloom.backends.triton.refined import refined

_INT32 = 2**31 - 1
_PAIR = 2  # out, dout: operands of the preprocess
_ROWS = NVMMASharedLayout(0, 32, 2)
# By the wider of both as covered: what the products may do beyond those of the portable kernels, a
# column over a column (H200, causal, theirs in brackets: D=48 in 64 columns 2.69 ms (4.07), 80 in
# 128 4.54 (4.84), 96 4.51 (5.18); nothing narrower was timed).
_MOST_PADDING = {64: 4 / 3, 128: 1.6}
_ALIGNED_WIDTH = 8  # elements of a half in the 16 bytes that TMA counts by


@dataclass(frozen=True, slots=True)
class Ready:
    """One backward but for addresses.

    blanks: of query, dout, key, value, dk, dv. stats: of the row statistics.
    lines: rows of the statistics. sum_lines: of dq's memory, `width` columns wide. scales: see
    Mods. finish: None where programs sweep over a head's keys.
    """

    prepare: Launcher
    main: Launcher
    finish: Launcher | None
    blanks: tuple[Blank, ...]
    stats: Blank
    lines: int
    sum_lines: int
    width: int
    scales: tuple[float, float, float]
    around_shape: tuple[float, ...]
    main_shape: tuple[float, ...]
    strides: tuple[float, ...]


def portable(call: AttentionCall) -> str | None:
    """Why the portable kernels compute this call's gradients; None if they do not."""
    if max(call.query.size(3), call.value.size(3)) > MAX_HEAD_DIM:
        return f"heads are wider than {MAX_HEAD_DIM}: dk and dv do not fit the registers together."
    refused = refusal(call)
    if refused is None and call.options.backend == "auto":
        return slower(call)
    return refused


def refusal(call: AttentionCall) -> str | None:
    """Why no kernel of this backend computes this call's gradients, whatever its heads are."""
    query, value, blocks = call.query, call.value, call.blocks
    if call.options.deterministic and not repeats(call):
        return "gradients are to be bitwise repeatable."
    if query.size(3) % _ALIGNED_WIDTH or value.size(3) % _ALIGNED_WIDTH:
        return "rows of the gradients do not start at multiples of 16 bytes."
    if blocks is not None and (blocks.q_block < STEP or blocks.kv_block < KEYS):
        return f"blocks of the mask are smaller than {STEP} x {KEYS}."
    if blocks is not None and blocks.entries.numel() > _INT32:
        return "the mask has more than 2**31 live blocks."
    if lines_of(query) > _INT32:
        return "there are more than 2**31 rows."
    return None


def repeats(call: AttentionCall) -> bool:
    """Whether all gradients are the same bits in each launch."""
    wide = max(call.query.size(3), call.value.size(3)) > MAX_HEAD_DIM
    return not wide and _form_of(call).sweeps


def slower(call: AttentionCall) -> str | None:
    """Why "auto" leaves this call to the portable kernels although the kernel takes it: they are
    faster, or it was not seen right and faster on a device (docs/log.md)."""
    query, value = call.query, call.value
    widths = width_of(query.size(3)), width_of(value.size(3))
    if _padded(query.size(3), value.size(3)) > _MOST_PADDING[max(widths)]:
        return (
            f"heads of {query.size(3)} and {value.size(3)} would be padded to "
            f"{widths[0]} and {widths[1]}."
        )
    if adds_in_each_step(call):
        return "gradients of captured tensors are added to in every step."
    draws = may_fold(call) and _form_of(call).persistent
    return slower_keys(call) or (None if draws else coarse(call))


def slower_keys(call: AttentionCall) -> str | None:
    """As `slower`, whatever heads and score_mod are."""
    query, key = call.query, call.key
    if _leaves_idle(query, key):
        return "there are few keys for many queries."
    if units_of(query, key) > 1 and tells_heads_apart(call):
        return "the mods tell heads apart that share keys."
    return None


def coarse(call: AttentionCall) -> str | None:
    """The same of masks that the portable kernels leave out more of. Programs that draw their tiles
    were seen faster even with them, where they had no score_mod."""
    if refined(call) is not call:
        return "blocks of 64 leave out many scores of those of the mask."
    return None


def _padded(head_dim: int, value_dim: int) -> float:
    """How much more the products have to do than those of the portable kernels, which cover heads
    more tightly: 3 along D, 2 along Dv."""
    done = 3 * width_of(head_dim) + 2 * width_of(value_dim)
    return done / (3 * sum(configs.chunks(head_dim)) + 2 * sum(configs.chunks(value_dim)))


def units_of(query: torch.Tensor, key: torch.Tensor) -> int:
    """Pairs of batch entry and query head for each of the key's."""
    return query.size(0) // key.size(0) * (query.size(1) // key.size(1))


def _leaves_idle(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether half of the processors would have no program, where the portable kernels divide the
    queries of a key head among several."""
    num_processors = configs.device_of(query.device).num_processors
    return units_of(query, key) > 1 and 2 * num_programs(key) <= num_processors


def num_programs(key: torch.Tensor) -> int:
    return key.size(0) * key.size(1) * -(-key.size(2) // KEYS)


def programs_of(form: Form, key: torch.Tensor) -> int:
    """One for each tile, or one a processor that draws tiles or heads."""
    if not form.persistent:
        return num_programs(key)
    drawn = key.size(0) * key.size(1) if form.sweeps else num_programs(key)
    return min(drawn, configs.device_of(key.device).num_processors)


def pitch_of(query: torch.Tensor, step: int = STEP) -> int:
    """Q_LEN in whole steps."""
    return -(-query.size(2) // step) * step


def lines_of(query: torch.Tensor, step: int = STEP) -> int:
    """Rows of all heads, and STEP that are nobody's. A longer step there has zeros for the other
    statistics, as copies have them past a tensor's end, for queries and gradients that are zeros:
    it adds nothing to dk and dv."""
    return query.size(0) * query.size(1) * pitch_of(query, step) + STEP


def finish_programs(lines: int, used: int) -> int:
    """Programs of finish_kernel. used: columns of dq's memory."""
    return lines // STEP * (used // finished_columns(used))


def forms_of(operands: Operands) -> Iterator[tuple[Form, int | None]]:
    """The form of a problem and those that are tried where it spills, with the registers that each
    may spill; None: as many as any form may."""
    form = form_of(operands)
    while (then := followed(form)) is not None:
        most, following = then
        yield form, most
        form = following
    yield form, None


def form_of(operands: Operands) -> Form:
    return _form_of(operands.call)


def _form_of(call: AttentionCall) -> Form:
    tail = call.key.size(2) % KEYS != 0
    return form_for(
        call.query.size(3),
        call.value.size(3),
        may_mask=call.mask is not None or tail,
        may_fold=may_fold(call),
        learns=call.learns,
        sweeps=few_keys.sweeps(call),
        sees_few=few_keys.sees_few(call),
        sees_some=few_keys.sees_some(call),
        sees_many=few_keys.sees_many(call),
        long_steps=_has_long_steps(call),
    )


def _has_long_steps(call: AttentionCall) -> bool:
    blocks = call.blocks
    return blocks is not None and blocks.q_block % LONG_STEP == 0 and not tells_heads_apart(call)


def may_fold(call: AttentionCall) -> bool:
    return call.score is None and 1e-20 < call.scale < 1e20


def prepare(operands: Operands, form: Form, mods: Mods) -> Ready:
    """Everything of a backward that does not change from call to call."""
    query, key, value, dout = operands.inputs
    batch, heads, q_len, head_dim = query.shape
    step, width = form.step, width_of(head_dim)
    lines, pitch = lines_of(query, step), pitch_of(query, step)
    used = form.columns(head_dim) if form.native else width
    value_width = width_of(value.size(3))
    overlaps = configs.device_of(query.device).can_overlap
    around = around_config(operands, width, form.sweeps, overlaps, used)
    main = main_config(operands, form, mods, overlaps)
    beside = {"num_warps": 4} | ({"launch_pdl": True} if overlaps else {})
    programs, finish = programs_of(form, key), None
    # a step that is nobody's is added to memory as well
    sum_lines = lines + step - STEP
    if form.sweeps:
        assert operands.call.blocks is not None
        sum_lines = programs * (most_rows(operands.call.blocks) + STEP)
    else:
        programs_after = finish_programs(lines - STEP, used)
        finish = Launcher(finish_kernel, around, programs_after, beside)
    boxes = (
        (query, step, width),
        (dout, step, value_width),
        (key, KEYS // 2, width),
        (value, KEYS // 2, value_width),
        (operands.dk, KEYS // 2, width),
        (operands.dv, KEYS // 2, value_width),
    )
    return Ready(
        Launcher(prepare_kernel, around, lines // STEP, {"num_warps": 4}, _PAIR),
        Launcher(backward_kernel, main, programs, beside),
        finish,
        tuple(Blank.of(tensor, n, w) for tensor, n, w in boxes),
        blank_statistics(lines, query.device, step),
        lines,
        sum_lines,
        width,
        mods.scales,
        pack_ints((heads, q_len, pitch, batch * heads)),
        pack_ints(main_shape(operands, pitch)),
        pack_ints([stride for t in (operands.out, dout) for stride in steps(t)]),
    )


def keys_together(key: torch.Tensor) -> int:
    """Key heads whose tiles are started longest first among each other: as many as processors have
    tiles for. More would share the second-level cache for nothing, which holds a head's queries,
    their gradients and the sums of dq while its keys go over them."""
    processors = configs.device_of(key.device).num_processors
    return max(1, processors // -(-key.size(2) // KEYS))


def blank_statistics(lines: int, device: torch.device, step: int = STEP) -> Blank:
    """Of [2, lines] numbers, those of a step at a time."""
    stats = torch.empty(2, lines, dtype=torch.float32, device=device)
    found = TensorDescriptor(stats, [2, lines], [lines, 1], [1, step], _ROWS)
    found.base = None
    return Blank(found)


def main_shape(operands: Operands, pitch: int) -> tuple[int, ...]:
    """`shape` of backward_shared.plan_of. pitch: rows of a head in the statistics."""
    query, key, blocks = operands.query, operands.key, operands.call.blocks
    batch, heads, q_len, _ = query.shape
    kv_batch, heads_kv, kv_len, _ = key.shape
    group = heads // heads_kv
    offsets = (0, 0) if blocks is None else (blocks.q_offset, blocks.kv_offset)
    return (
        heads,
        heads_kv,
        group,
        q_len,
        kv_len,
        batch,
        -(-kv_len // KEYS),
        *offsets,
        keys_together(key),
        group * batch // kv_batch,
        kv_batch * heads_kv,
        pitch,
    )


def with_descriptor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, in a form that TMA can read."""
    return tensor if takes_descriptor(tensor) else tensor.contiguous()


_ready: dict[tuple[Any, ...], Ready | None] = {}


def key_of(operands: Operands) -> tuple[Any, ...]:
    blocks = operands.call.blocks
    alike = blocks is None or blocks.num_batches * blocks.num_heads == 1
    form = _form_of(operands.call)
    # by numbers of blocks, which the signature has not
    counted = form.sweeps, form.leaves_late, form.by_warp, form.dv_early
    return operands.signature, operands.call.scale, has_first_numbers(operands.call), alike, counted


def remembered(key: tuple[Any, ...]) -> tuple[bool, Ready | None]:
    """(whether this problem was seen, what it runs with; None: the portable kernels)."""
    return key in _ready, _ready.get(key)


def remember(key: tuple[Any, ...], ready: Ready | None) -> None:
    keep(_ready, key, ready)
