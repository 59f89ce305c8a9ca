"""The problem that a tool looks at: sizes, types and place, checked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnloom.api.masks import create_block_mask
from attnloom.block_mask import BlockMask
from attnloom.errors import DtypeError, ModError, OptionError, ShapeError
from attnloom.ir.node import BoundProgram, DType
from attnloom.masking import short_captures
from attnloom.masking.arguments import read_data_device, read_int, shown
from attnloom.masking.captures import captured_tensors
from attnloom.masking.lists import block_size_pair
from attnloom.tools.lengths import AxisLength, axis_lengths, noted_lengths, told
from attnloom.tools.target import kind_of
from attnloom.trace.names import mod_name, tensor_names
from attnloom.trace.tracer import trace_mask, trace_score

Mod = Callable[..., Any]
Progress = Callable[[str], None]
_AFFORDABLE = 1 << 19  # scores that check_mod takes unasked: about a second of its oracle
_AXES = {"q_len": "q", "kv_len": "kv", "heads": "h", "batch": "b"}
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def silent(stage: str) -> None:
    """The Progress that shows nothing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """query [batch, heads, q_len, head_dim]; key and value [batch, kv_heads, kv_len, head_dim].

    block_size: (query, key) tokens of a BlockMask's tile.
    notes: where a size was told by what the mods capture, and where one is more than what they
        capture has; one sentence each.
    """

    q_len: int
    kv_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: tuple[int, int]
    device: torch.device
    notes: tuple[str, ...] = ()

    @property
    def num_scores(self) -> int:
        return self.batch * self.heads * self.q_len * self.kv_len

    @property
    def score_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    def shrunk(self, most_tokens: int, most_heads: int) -> Setting:
        """The same with lengths and heads cut, and one batch entry; groups of heads stay whole."""
        group = self.heads // self.kv_heads
        kv_heads = max(1, min(self.kv_heads, most_heads // group))
        return replace(
            self,
            batch=1,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            q_len=min(self.q_len, most_tokens),
            kv_len=min(self.kv_len, most_tokens),
        )

    def inputs(self, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key and value from a standard normal, drawn in the setting's dtype."""
        generator = torch.Generator().manual_seed(seed)
        rows = (
            (self.heads, self.q_len),
            (self.kv_heads, self.kv_len),
            (self.kv_heads, self.kv_len),
        )
        q, k, v = (
            torch.randn(self.batch, h, n, self.head_dim, generator=generator, device="cpu")
            .to(self.dtype)
            .to(self.device)
            for h, n in rows
        )
        return q, k, v

    def placeholders(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key and value of the full size over one element of memory each."""
        rows = (
            (self.heads, self.q_len),
            (self.kv_heads, self.kv_len),
            (self.kv_heads, self.kv_len),
        )
        q, k, v = (
            torch.zeros(1, dtype=self.dtype, device=self.device).expand(
                self.batch, h, n, self.head_dim
            )
            for h, n in rows
        )
        return q, k, v

    def block_mask(self, mask_mod: Mod) -> BlockMask:
        """The mask over all batch entries and heads; lists that do not differ are stored once."""
        sizes = (self.batch, self.heads, self.q_len, self.kv_len)
        with short_captures.quietly():  # the notes say it
            return create_block_mask(
                mask_mod, *sizes, device=self.device, BLOCK_SIZE=self.block_size
            )


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sizes where neither the caller nor a captured tensor says: explain's and check's differ.

    most_scores: for an oracle that holds every score. Where what captured tensors tell is more
        than 2^19 scores, lengths beyond q_len then leave it as it is, and heads and batch are cut
        until most_scores are left; None: they are taken as they are.
    """

    q_len: int
    batch: int
    heads: int
    most_scores: int | None = None


def make_setting(
    mods: tuple[Mod | None, Mod | None],
    defaults: Defaults,
    *,
    q_len: int | None,
    kv_len: int | None,
    batch: int | None,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int,
    dtype: torch.dtype | str,
    block_size: int | tuple[int, int],
    device: torch.device | str | None,
) -> Setting:
    """A setting from a user's values; None takes what the mods' captured tensors and factories say
    (else the default) for q_len, batch and heads, the same (else q_len) for kv_len unless q_len is
    given, heads for kv_heads, and the mods' own device.

    Raises:
        ShapeError: a size is no positive int, or heads are no multiple of kv_heads.
        DtypeError: attention does not take the dtype. OptionError: block_size means nothing.
        TraceError: a mod cannot be placed inside a kernel.
    """
    given = {
        "q_len": q_len,
        "kv_len": q_len if kv_len is None else kv_len,
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    needed = {n: value for n, value in given.items() if value is not None or n == "head_dim"}
    sizes = {n: _positive(n, value) for n, value in needed.items()}
    found = {"dtype": _dtype(dtype), "block_size": block_size_pair(block_size)}
    where = _device(mods, device)
    traced = _traced(mods, found["dtype"], where)
    notes: tuple[str, ...] = ()
    if {"q_len", "kv_len", "batch", "heads"} - sizes.keys():
        sizes, notes = _with_told_sizes(_told_lengths(traced), defaults, sizes)
    sizes.setdefault("kv_heads", sizes["heads"])
    if sizes["heads"] % sizes["kv_heads"]:
        raise ShapeError(
            f"heads is {sizes['heads']} and kv_heads {sizes['kv_heads']}; query heads must be a "
            "multiple of key heads."
        )
    reach = {axis: sizes[name] for name, axis in _AXES.items()}
    short = [text for each in traced for text in short_captures.texts(*each, reach)]
    if found["dtype"] is torch.float64:
        short += [text for each in traced for text in _narrow_parts(*each)]
    return Setting(**sizes, **found, device=where, notes=(*notes, *short))


def _narrow_parts(kind: str, mod: Mod, bound: BoundProgram) -> Iterator[str]:
    """A note where a score_mod of float64 scores computes in float32, as torch would."""
    if kind != "score_mod":
        return
    names = tensor_names(mod, bound.tensors)
    nodes, found = bound.program.nodes, []
    for node in nodes:
        if node.dtype is DType.F32 and node.op == "load":
            found.append(names[int(str(node.attr))])
        elif node.dtype is DType.F32 and any(not nodes[a].dtype.is_float for a in node.args):
            found.append("integers")
    if found:
        yield (
            f"dtype is float64, but score_mod '{mod_name(mod)}' computes in float32 what it makes "
            f"of {' and of '.join(dict.fromkeys(found))} alone, as torch does; .double() there "
            "makes it float64"
        )


def _traced(
    mods: tuple[Mod | None, Mod | None], dtype: torch.dtype, device: torch.device
) -> list[tuple[str, Mod, BoundProgram]]:
    """Each mod that is there, with its kind and its program."""
    score_mod, mask_mod = mods
    found = []
    if score_mod is not None:
        score_dtype = DType.F64 if dtype is torch.float64 else DType.F32
        found.append(("score_mod", score_mod, trace_score(score_mod, score_dtype, device)))
    if mask_mod is not None:
        found.append(("mask_mod", mask_mod, trace_mask(mask_mod, device)))
    return found


def _told_lengths(traced: list[tuple[str, Mod, BoundProgram]]) -> list[AxisLength]:
    """What both mods say of sizes."""
    found = [length for _, mod, _ in traced for length in noted_lengths(mod)]
    for _, mod, bound in traced:
        found += axis_lengths(bound, tensor_names(mod, bound.tensors))
    return found


def _with_told_sizes(
    lengths: list[AxisLength], defaults: Defaults, given: dict[str, int]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Given sizes and all others, and a note on each that a mod told."""
    sayings = {
        name: saying
        for name, axis in _AXES.items()
        if name not in given and (saying := told(lengths, axis)) is not None
    }
    sizes = {name: saying.length for name, saying in sayings.items()}
    if defaults.most_scores is not None and _num_scores(sizes, defaults, given) > _AFFORDABLE:
        for name in ("q_len", "kv_len"):
            if name in sizes and not sayings[name].exact:
                sizes[name] = min(sizes[name], defaults.q_len)
    # A length that nobody tells is the other one.
    fallback = {**sizes, **given}
    q_len = fallback.get("q_len", fallback.get("kv_len", defaults.q_len))
    fixed = {"q_len": q_len, "kv_len": fallback.get("kv_len", q_len)}
    others = {"batch": defaults.batch, "heads": defaults.heads, **given, **fixed}
    outer = {name: sizes[name] for name in ("heads", "batch") if name in sizes}
    left = {**others, **_cut(others, outer, defaults)}
    return left, tuple(_note(name, saying, left[name]) for name, saying in sayings.items())


def _num_scores(sizes: dict[str, int], defaults: Defaults, given: dict[str, int]) -> int:
    known = {"batch": defaults.batch, "heads": defaults.heads, **sizes, **given}
    q_len = known.get("q_len", known.get("kv_len", defaults.q_len))
    return known["batch"] * known["heads"] * q_len * known.get("kv_len", q_len)


def _cut(others: dict[str, int], told: dict[str, int], defaults: Defaults) -> dict[str, int]:
    """Told sizes, the batch halved first, then heads, until few enough scores are left."""
    left = dict(told)
    while defaults.most_scores is not None:
        sizes = {**others, **left}
        scores = sizes["batch"] * sizes["heads"] * sizes["q_len"] * sizes["kv_len"]
        larger = [name for name in ("batch", "heads") if left.get(name, 1) > 1]
        if scores <= defaults.most_scores or not larger:
            break
        step = others.get("kv_heads", 1) if larger[0] == "heads" else 1
        halved = left[larger[0]] // 2 // step * step
        if not halved:
            break
        left[larger[0]] = halved
    return left


def _note(name: str, saying: AxisLength, size: int) -> str:
    text = f"{name} is {size}, "
    text += "as" if size == saying.length else f"and could be {saying.length}, since"
    otherwise = "" if saying.exact else f"; --{name.replace('_', '-')} says otherwise"
    return f"{text} {saying.why}{otherwise}"


def check_mods(score_mod: object, mask_mod: object) -> None:
    """At least one mod, each in its own place.

    Raises:
        OptionError: both are None. ModError: one is no function, takes a wrong number of arguments,
        or is the other kind.
    """
    if score_mod is None and mask_mod is None:
        raise OptionError("score_mod and mask_mod are both None; give at least one of them.")
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is None:
            continue
        if isinstance(mod, BlockMask):
            raise ModError(f"{name} is a BlockMask; pass its function, block_mask.mask_mod.")
        kind = kind_of(mod, mod_name(mod))
        if kind != name:
            raise ModError(
                f"'{mod_name(mod)}' is a {kind} by its number of arguments and was given as "
                f"{name}; pass it as {kind}=."
            )


def _positive(name: str, value: object) -> int:
    size = read_int(name, value)
    if size < 1:
        raise ShapeError(f"{name} is {size}; it must be 1 or more.")
    return size


def _dtype(dtype: object) -> torch.dtype:
    known = {**DTYPES, **{d: d for d in DTYPES.values()}}
    found = known.get(dtype) if isinstance(dtype, (str, torch.dtype)) else None  # type: ignore
    if found is None:
        raise DtypeError(f"dtype is {shown(dtype)}; attention takes {', '.join(DTYPES)}.")
    return found


def _device(mods: tuple[Mod | None, ...], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return read_data_device(device)
    for mod in mods:
        for tensor in captured_tensors(mod) if mod is not None else ():
            return tensor.device
    return read_data_device(torch.get_default_device())
