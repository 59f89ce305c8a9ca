"""Whether attnloom computes a mod rightly: values and gradients against the float64 oracle.

The oracle calls the mod itself, on float64 copies of what it captures, and shares nothing with the
tracer, the passes and the kernels.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnloom.api.attention import AuxRequest, flex_attention
from attnloom.api.options import read_options
from attnloom.backends.reference import reference_attention
from attnloom.errors import ShapeError
from attnloom.ir.node import DType
from attnloom.masking import short_captures
from attnloom.masking.arguments import read_int
from attnloom.masking.captures import map_captures
from attnloom.tools.budget import Terms, Verdict, judge
from attnloom.tools.eager import eager_attention, sizes_without_cancellation
from attnloom.tools.setting import (
    Defaults,
    Mod,
    Progress,
    Setting,
    check_mods,
    make_setting,
    silent,
)
from attnloom.trace.names import mod_name, named_tensors
from attnloom.trace.tracer import trace_score

# The oracle holds every score several times over, in float64.
MAX_SCORES = 1 << 22
_DEFAULTS = Defaults(160, 2, 2, MAX_SCORES)
# Indices are cheaper to look at than scores, and one entry does for what does not depend on it.
_UNCUT = Defaults(160, 1, 1)
_MAX_LANES = 1 << 26
_LSE_WEIGHT = 0.5
_BOUNDS = {"debug_bounds": True}
_FIXED = ("out", "lse", "dq", "dk", "dv")
_Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_Mods = tuple[Mod | None, Mod | None]


@dataclass(frozen=True, slots=True)
class Check:
    """What `check_mod` found.

    names: of the mods. results: one Verdict for out, lse, dq, dk, dv and each captured tensor that
        requires grad.
    indices_at: the sizes at which indices were looked at; those that captured tensors tell, where
        the oracle's are cut.
    out_of_range: which index into a captured tensor leaves it, in words; "" if none does. Kernels
        clamp such an index, so that it shows as a wrong number and never as a crash.
    """

    names: tuple[str, ...]
    setting: Setting
    seed: int
    results: tuple[Verdict, ...]
    indices_at: Setting
    out_of_range: str

    @property
    def passed(self) -> bool:
        return not self.out_of_range and all(r.passed for r in self.results)


def check_mod(
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    *,
    q_len: int | None = None,
    kv_len: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int = 32,
    dtype: torch.dtype | str = torch.float32,
    block_size: int | tuple[int, int] = 32,
    device: torch.device | str | None = None,
    kernel_options: Mapping[str, object] | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Check:
    """Compare flex_attention under a score_mod, a mask_mod or both with the float64 oracle.

    Inputs are drawn in `dtype`. Each result may be about twice as far from the oracle as attention
    written by hand in the same dtype, see docs/concepts/numerics.md.

    Args:
        score_mod, mask_mod: as flex_attention and create_block_mask take them. What they capture
            is used as it is and never changed.
        q_len, kv_len, batch, heads, kv_heads, head_dim, dtype, block_size, device,
            kernel_options: as for `explain`; small, since the oracle holds every score. Lengths
            are 160 where nothing tells them, and at most 160 where what captured tensors tell
            makes more than 2^19 scores; `setting.notes` says so. batch and heads are 2 where no
            captured tensor tells; what one tells is cut to MAX_SCORES. Indices into captured
            tensors are looked at with nothing cut, up to 2^26 scores.
        seed: of query, key, value and the loss.
        progress: called with the name of each stage as it begins.
    Returns:
        Check; its `passed` is True if every result is within the budget.
    Raises:
        TraceError, ModError, DtypeError, OptionError, UnsupportedError: as for `explain`.
        ShapeError: a size means nothing, or there are more than MAX_SCORES scores.
    """
    check_mods(score_mod, mask_mod)
    read_options(kernel_options)
    seed = read_int("seed", seed)
    make = functools.partial(
        make_setting,
        (score_mod, mask_mod),
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
    setting = make(_DEFAULTS)
    if setting.num_scores > MAX_SCORES:
        raise ShapeError(
            f"batch {setting.batch} x heads {setting.heads} x q_len {setting.q_len} x kv_len "
            f"{setting.kv_len} are {setting.num_scores} scores; the oracle holds each of them, so "
            f"{MAX_SCORES} are the most. A mod that is right on a few tiles of 32 tokens is right "
            "on many."
        )
    progress("looking at indices")
    mods = (score_mod, mask_mod)
    whole = make(_UNCUT)
    indices_at = whole if setting.num_scores < whole.num_scores <= _MAX_LANES else setting
    out_of_range = ""
    try:
        _run_attnloom(indices_at, mods, {**(kernel_options or {}), **_BOUNDS})
    except ShapeError as error:
        out_of_range = str(error)
    results = _results(setting, mods, kernel_options, seed, progress)
    names = tuple(mod_name(mod) for mod in mods if mod is not None)
    return Check(names, setting, seed, results, indices_at, out_of_range)


def _run_attnloom(setting: Setting, mods: _Mods, kernel_options: dict[str, Any]) -> None:
    with torch.no_grad():
        _fused(setting, kernel_options)(*setting.inputs(), *mods)


def _fused(setting: Setting, kernel_options: Mapping[str, object] | None) -> _Attention:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any, mask_mod: Any):
        block_mask = None if mask_mod is None else setting.block_mask(mask_mod)
        with short_captures.quietly():  # the notes of the setting say it
            out, aux = flex_attention(
                q,
                k,
                v,
                score_mod,
                block_mask,
                enable_gqa=setting.heads != setting.kv_heads,
                kernel_options=kernel_options,  # type: ignore[arg-type]
                return_aux=AuxRequest(lse=True),
            )
        assert aux.lse is not None, "lse was asked for"
        return out, aux.lse

    return attend


def _oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any, mask_mod: Any):
    return reference_attention(q, k, v, score_mod, mask_mod)[:2]


def _results(
    setting: Setting,
    mods: _Mods,
    kernel_options: Mapping[str, object] | None,
    seed: int,
    progress: Progress,
) -> tuple[Verdict, ...]:
    captured = _learnable(mods[0], setting)
    wide_mods, wide = _in_float64(mods)
    wide_captured = {name: wide.get(id(t), t) for name, t in captured.items()}
    inputs = setting.inputs(seed)
    dout = setting.inputs(seed + 1)[0]

    def of(attend: _Attention, used: _Mods, captures: dict[str, torch.Tensor], *dtype: Any):
        leaves = [x.to(*dtype).requires_grad_() if dtype else x for x in inputs]
        return _values(attend, leaves, used, captures, dout)

    inputs = tuple(x.requires_grad_() for x in inputs)
    progress("running attnloom, forward and backward")
    mine = of(_fused(setting, kernel_options), mods, captured)
    progress("running eager attention")
    eager = of(eager_attention, mods, captured)
    progress("running the float64 oracle")
    truth = of(_oracle, wide_mods, wide_captured, torch.float64)
    sizes = _term_sizes(setting, inputs, wide_mods, wide_captured, dout)
    # What neither depends on is no result; what one of them forgets counts as zero.
    names = [n for n in (*_FIXED, *captured) if n in mine or n in truth]
    like = dict(zip(("dq", "dk", "dv"), inputs, strict=True)) | captured
    verdicts = []
    for name in names:
        x, rough, exact = (
            found[name] if name in found else torch.zeros_like(like[name])
            for found in (mine, eager, truth)
        )
        terms = Terms(setting.num_scores / max(1, x.numel()), sizes.get(name), setting.dtype)
        verdicts.append(judge(name, x, rough, exact.double(), terms))
    return tuple(verdicts)


def _term_sizes(
    setting: Setting,
    inputs: Sequence[torch.Tensor],
    mods: _Mods,
    captured: dict[str, torch.Tensor],
    dout: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The size of what each captured gradient sums up, by its name."""
    if not captured:
        return {}
    wide = [x.detach().double() for x in inputs]
    lse_weights = torch.full(dout.shape[:3], _LSE_WEIGHT, dtype=torch.float64, device=dout.device)
    weights = (dout.double(), lse_weights)
    found = sizes_without_cancellation(wide, mods, list(captured.values()), weights)
    return dict(zip(captured, found, strict=True))


def _values(
    attend: _Attention,
    leaves: list[torch.Tensor],
    mods: _Mods,
    captures: dict[str, torch.Tensor],
    dout: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """out, lse and the gradients of a loss that depends on both, by name."""
    out, lse = attend(*leaves, *mods)
    # An empty row has lse -inf, which no loss depends on. The weight of lse is alike for all.
    reached = torch.isfinite(lse.detach())
    weights = [dout.to(out.dtype), reached.to(lse.dtype) * _LSE_WEIGHT]
    named = {**dict(zip(("dq", "dk", "dv"), leaves, strict=True)), **captures}
    grads = torch.autograd.grad(
        (out, lse), list(named.values()), weights, allow_unused=True, retain_graph=True
    )
    found = {"out": out.detach(), "lse": lse.detach()}
    return found | {n: g for n, g in zip(named, grads, strict=True) if g is not None}


def _learnable(score_mod: Mod | None, setting: Setting) -> dict[str, torch.Tensor]:
    """Tensors that the score_mod reaches and that require grad, by the names of their gradients."""
    if score_mod is None:
        return {}
    bound = trace_score(score_mod, DType.of(setting.score_dtype), setting.device)
    reached = [(f"d_{name}", tensor) for name, tensor in named_tensors(score_mod)]
    reached += [(f"d_tensor{slot}", t) for slot, t in enumerate(bound.tensors) if t.is_leaf]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in reached:
        if tensor.requires_grad and all(tensor is not other for other in found.values()):
            found[name] = tensor
    return found


def _in_float64(mods: _Mods) -> tuple[_Mods, dict[int, torch.Tensor]]:
    """The mods over float64 copies of what they capture, and the copy of each tensor by its id."""
    copies: dict[int, torch.Tensor] = {}

    def widen(value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            twin = copy.deepcopy(value).double()
            for old, new in zip(_state(value), _state(twin), strict=True):
                copies[id(old)] = new
            return twin
        if not value.is_floating_point():
            return value
        twin = value.detach().double().requires_grad_(value.requires_grad)
        copies[id(value)] = twin
        return twin

    kinds: Any = (torch.Tensor, torch.nn.Module)
    wide = [
        None if mod is None else map_captures(mod, kinds, widen, with_globals=True) for mod in mods
    ]
    return (wide[0], wide[1]), copies


def _state(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
