"""What attnloom makes of a mod: its program, its gradient, its tiles, its kernel, its speed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from attnloom.api.options import read_options
from attnloom.block_mask import BlockMask
from attnloom.ir.node import Axes, BoundProgram, DType
from attnloom.ir.passes.gradient import Gradient, gradient
from attnloom.ir.passes.simplify import simplify
from attnloom.ir.text import text as program_text
from attnloom.masking.arguments import check_flag
from attnloom.masking.lists import BlockLists, live_area, of_kind
from attnloom.plan.problem import KernelOptions
from attnloom.tools.alike import alike
from attnloom.tools.choice import BackendChoice, choose_backend
from attnloom.tools.formula import Statement, axis_names, statements
from attnloom.tools.setting import (
    Defaults,
    Mod,
    Progress,
    Setting,
    check_mods,
    make_setting,
    silent,
)
from attnloom.tools.speed import SpeedEstimate, estimate
from attnloom.trace.messages import mod_place
from attnloom.trace.names import mod_name, tensor_names
from attnloom.trace.tracer import trace_mask, trace_score

_DEFAULTS = Defaults(2048, 1, 1)
_DSCORE = "dscore_before"
_PICTURE_CELLS = 32
_LEAST_TILE = 32  # below it kernels work on more than a tile at once
_MOST_TRIED = 1 << 18  # tiles
_MUCH_LESS = 0.8


@dataclass(frozen=True, slots=True)
class CapturedTensor:
    """A tensor that a mod reads. learnable: it gets a gradient."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    learnable: bool


@dataclass(frozen=True, slots=True)
class TracedMod:
    """A mod after tracing and simplification.

    place: file and line of its definition. program: every node, one a line, as `ir/text.py` prints.
    statements: the same as formulas, by how often each is computed.
    """

    kind: str
    name: str
    place: str
    captures: tuple[CapturedTensor, ...]
    statements: tuple[Statement, ...]
    program: str


@dataclass(frozen=True, slots=True)
class CapturedGradient:
    """Gradient of one read of a captured tensor.

    index: where it is added. summed_over: positions that the index lacks, over which it is summed
    before it leaves a tile.
    """

    name: str
    index: str
    value: str
    summed_over: str


@dataclass(frozen=True, slots=True)
class GradientSummary:
    """The backward of a score_mod. statements: of dscore, the gradient of the score before the
    mod. num_nodes: of the gradient program, the recomputed forward included."""

    num_nodes: int
    statements: tuple[Statement, ...]
    captured: tuple[CapturedGradient, ...]


@dataclass(frozen=True, slots=True)
class MaskSummary:
    """A BlockMask in numbers, over all batch entries and heads.

    density: scores in live tiles over all scores, 0 .. 1. finer: tokens of a smaller tile with
        which fewer than 0.8 times as many scores would be computed, and the density then; None if
        there is none, or the mask is too long to try.
    alike: the (batch entry, head) pairs that share each map, in order of first appearance; one
        group if all are alike. picture: the first map, full blocks are live, shaded cells are live
        in part.
    """

    shape: tuple[int, ...]
    num_tiles: int
    num_full: int
    num_partial: int
    full_scores: int
    partial_scores: int
    density: float
    build_seconds: float
    alike: tuple[tuple[tuple[int, int], ...], ...]
    picture: str
    finer: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. mask and block_mask are None without a mask_mod, gradient without a
    score_mod, speed when it was not measured. block_mask, for pictures, is no part of its JSON."""

    setting: Setting
    mods: tuple[TracedMod, ...]
    gradient: GradientSummary | None
    mask: MaskSummary | None
    backend: BackendChoice
    speed: SpeedEstimate | None
    block_mask: BlockMask | None = field(default=None, repr=False, metadata={"plain": False})


def explain(
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    *,
    q_len: int | None = None,
    kv_len: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype | str = torch.float32,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str | None = None,
    kernel_options: Mapping[str, object] | None = None,
    measure: bool = True,
    progress: Progress = silent,
) -> Explanation:
    """Say what attnloom makes of a score_mod, a mask_mod or both.

    Args:
        score_mod, mask_mod: as flex_attention and create_block_mask take them.
        q_len: Q_LEN in tokens; default what captured tensors say that q_idx indexes directly
            (`ids[q_idx]` of length 500: 500) or a factory of attnloom.mods noted, else 2048.
        kv_len: KV_LEN; default q_len if that is given, else what is told of kv_idx, else q_len.
        batch, heads: of query; default what captured tensors say that b and h index directly
            (`bias[h]` of length 8: 8 heads), else 1; `setting.notes` tells. kv_heads: of key and
            value, default heads.
        head_dim: D, of value too.
        dtype: of query, key and value, or its name.
        block_size: tokens of a tile, one size or (query, key).
        device: default that of captured tensors, else torch's default.
        kernel_options: as flex_attention takes them.
        measure: time the cost of a tile for the expected speed-up (compiles kernels, runs small
            problems; about a second).
        progress: called with the name of each stage as it begins.
    Returns:
        Explanation, plain data. Nothing of Q_LEN x KV_LEN elements is allocated.
    Raises:
        TraceError: a mod cannot be placed inside a kernel. ModError: a mod is of the wrong kind.
        ShapeError, DtypeError, OptionError: a value means nothing. UnsupportedError: a chosen
        backend cannot run it.
    """
    check_mods(score_mod, mask_mod)
    check_flag("measure", measure)
    options = read_options(kernel_options)
    setting = make_setting(
        (score_mod, mask_mod),
        _DEFAULTS,
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=block_size,
        device=device,
    )
    return _explained(setting, (score_mod, mask_mod), options, measure, progress)


def _explained(
    setting: Setting,
    mods: tuple[Mod | None, Mod | None],
    options: KernelOptions,
    measure: bool,
    progress: Progress,
) -> Explanation:
    score_mod, mask_mod = mods
    progress("tracing")
    score = mask = block_mask = mask_summary = speed = None
    if score_mod is not None:
        score = trace_score(score_mod, DType.of(setting.score_dtype), setting.device)
    if mask_mod is not None:
        mask = trace_mask(mask_mod, setting.device)
        progress(f"building the mask of {setting.q_len} x {setting.kv_len} tokens")
        block_mask, mask_summary = _build(setting, mask_mod)
    blocks = None if block_mask is None else block_mask.lists()
    backend = choose_backend(setting, score, mask, blocks, options)
    if measure:
        progress("measuring the cost of a tile")
        areas = (setting.num_scores, 0)
        if mask_summary is not None:
            areas = (mask_summary.full_scores, mask_summary.partial_scores)
        speed = estimate(setting, score_mod, mask_mod, *areas)
    given = (("score_mod", score_mod, score), ("mask_mod", mask_mod, mask))
    return Explanation(
        setting,
        tuple(_traced(kind, m, p, options) for kind, m, p in given if m is not None and p),
        None if score is None else _gradient_summary(score_mod, score, options),
        mask_summary,
        backend,
        speed,
        block_mask,
    )


def _simplified(bound: BoundProgram, options: KernelOptions) -> BoundProgram:
    program = simplify(bound.program, exact=options.exact_math)
    return BoundProgram(program, bound.tensors, bound.numbers)


def _traced(kind: str, mod: Mod, traced: BoundProgram, options: KernelOptions) -> TracedMod:
    bound = _simplified(traced, options)
    names = tensor_names(mod, bound.tensors)
    captures = tuple(
        CapturedTensor(name, tensor.dtype, tuple(tensor.shape), spec.requires_grad)
        for name, tensor, spec in zip(names, bound.tensors, bound.program.tensors, strict=True)
    )
    lines = statements(bound, names)
    return TracedMod(
        kind, mod_name(mod), mod_place(mod), captures, lines, program_text(bound.program)
    )


def _gradient_summary(
    mod: Mod | None, traced: BoundProgram, options: KernelOptions
) -> GradientSummary:
    found = gradient(_simplified(traced, options).program, exact=options.exact_math)
    bound = BoundProgram(found.program, traced.tensors, traced.numbers)
    names = tensor_names(mod, traced.tensors)
    outputs = [_DSCORE]
    for n, c in enumerate(found.contributions):
        outputs += [f"index {n} {d}" for d in range(len(c.index))] + [f"value {n}"]
    lines = statements(bound, names, outputs)
    return GradientSummary(
        len(found.program.nodes),
        tuple(s for s in lines if s.name not in outputs[1:]),
        _captured_gradients(found, names, {s.name: s.text for s in lines}),
    )


def _captured_gradients(
    found: Gradient, names: tuple[str, ...], texts: dict[str, str]
) -> tuple[CapturedGradient, ...]:
    out = []
    for n, contribution in enumerate(found.contributions):
        axes = Axes.NONE
        for node in contribution.index:
            axes |= found.program.axes[node]
        index = ", ".join(texts[f"index {n} {d}"] for d in range(len(contribution.index)))
        lacking = axis_names(Axes.ALL & ~axes)
        name = names[contribution.slot]
        out.append(CapturedGradient(name, index, texts[f"value {n}"], lacking))
    return tuple(out)


def _build(setting: Setting, mask_mod: Mod) -> tuple[BlockMask, MaskSummary]:
    start = time.perf_counter()
    block_mask = setting.block_mask(mask_mod)
    seconds = time.perf_counter() - start
    lists = block_mask.lists()
    # Lists that are equal over batch entries or heads are stored once and stand for all of them.
    copies = setting.batch * setting.heads // (lists.num_batches * lists.num_heads)
    partial = int(of_kind(lists, "partial").sum())
    tiles = lists.grid.num_rows * lists.grid.num_kv_blocks
    live, full = live_area(lists) * copies, live_area(_full_part(lists)) * copies
    return block_mask, MaskSummary(
        tuple(block_mask.shape),
        tiles * copies,
        (lists.entries.numel() - partial) * copies,
        partial * copies,
        full,
        live - full,
        live / setting.num_scores,
        seconds,
        alike(lists, (setting.batch, setting.heads)),
        block_mask[0, 0].to_string(_PICTURE_CELLS).partition("\n")[2].rstrip("\n"),
        _finer(setting, mask_mod, live / setting.num_scores),
    )


def _finer(setting: Setting, mask_mod: Mod, density: float) -> tuple[int, float] | None:
    """The largest square tile that is smaller than the setting's and computes much less."""
    size = min(setting.block_size) // 2
    while size >= _LEAST_TILE and setting.num_scores // size**2 <= _MOST_TRIED:
        lists = replace(setting, block_size=(size, size)).block_mask(mask_mod).lists()
        copies = setting.batch * setting.heads // (lists.num_batches * lists.num_heads)
        found = live_area(lists) * copies / setting.num_scores
        if found < _MUCH_LESS * density:
            return size, found
        size //= 2
    return None


def _full_part(lists: BlockLists) -> BlockLists:
    """The lists without their partial tiles."""
    full = of_kind(lists, "full")
    rows = lists.entry_rows()[full]
    counts = torch.bincount(rows, minlength=lists.grid.num_rows)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return BlockLists(
        offsets, lists.entries[full], lists.num_batches, lists.num_heads, lists.q_block,
        lists.kv_block, lists.q_len, lists.kv_len,
    )  # fmt: skip
