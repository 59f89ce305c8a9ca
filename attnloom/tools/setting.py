"""The problem that a tool looks at: sizes, types and place, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnloom.api.masks import create_block_mask
from attnloom.block_mask import BlockMask
from attnloom.errors import DtypeError, ModError, OptionError, ShapeError
from attnloom.ir.node import DType
from attnloom.masking.arguments import read_data_device, read_int, shown
from attnloom.masking.captures import captured_tensors
from attnloom.masking.lists import block_size_pair
from attnloom.tools.lengths import AxisLength, axis_lengths
from attnloom.tools.names import tensor_names
from attnloom.tools.target import kind_of
from attnloom.trace.messages import mod_name
from attnloom.trace.tracer import trace_mask, trace_score

Mod = Callable[..., Any]
Progress = Callable[[str], None]
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
    notes: where a size was told by what the mods capture, one sentence each.
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
        return create_block_mask(
            mask_mod,
            self.batch,
            self.heads,
            self.q_len,
            self.kv_len,
            device=self.device,
            BLOCK_SIZE=self.block_size,
        )


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sizes where neither the caller nor a captured tensor says: explain's and check's differ.

    most_scores: heads and batch that captured tensors tell are cut until so many scores are left;
        None: they are taken as they are.
    """

    batch: int
    heads: int
    most_scores: int | None = None


def make_setting(
    mods: tuple[Mod | None, Mod | None],
    defaults: Defaults,
    *,
    q_len: int,
    kv_len: int | None,
    batch: int | None,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int,
    dtype: torch.dtype | str,
    block_size: int | tuple[int, int],
    device: torch.device | str | None,
) -> Setting:
    """A setting from a user's values; None takes q_len for kv_len, what the mods' captured tensors
    say (else the default) for batch and heads, heads for kv_heads, and the mods' own device.

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
    told_later = {name for name in ("batch", "heads", "kv_heads") if given[name] is None}
    sizes = {n: _positive(n, value) for n, value in given.items() if n not in told_later}
    found = {"dtype": _dtype(dtype), "block_size": block_size_pair(block_size)}
    where = _device(mods, device)
    told, notes = {}, ()
    if batch is None or heads is None:
        told, notes = _told_sizes(mods, defaults, sizes, found["dtype"], where)
    sizes = {"batch": defaults.batch, "heads": defaults.heads, **told, **sizes}
    sizes.setdefault("kv_heads", sizes["heads"])
    if sizes["heads"] % sizes["kv_heads"]:
        raise ShapeError(
            f"heads is {sizes['heads']} and kv_heads {sizes['kv_heads']}; query heads must be a "
            "multiple of key heads."
        )
    return Setting(**sizes, **found, device=where, notes=notes)


def _told_sizes(
    mods: tuple[Mod | None, Mod | None],
    defaults: Defaults,
    given: dict[str, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Batch and heads as captured tensors have them, as far as not given; and a note on each."""
    score_mod, mask_mod = mods
    loads: list[AxisLength] = []
    if score_mod is not None:
        score_dtype = DType.F64 if dtype is torch.float64 else DType.F32
        bound = trace_score(score_mod, score_dtype, device)
        loads += axis_lengths(bound, tensor_names(score_mod, bound.tensors))
    if mask_mod is not None:
        bound = trace_mask(mask_mod, device)
        loads += axis_lengths(bound, tensor_names(mask_mod, bound.tensors))
    told: dict[str, AxisLength] = {}
    for name, axis in (("heads", "h"), ("batch", "b")):
        lengths = [load for load in loads if load.axis == axis and load.length > 0]
        if name not in given and lengths:
            # The shortest: every load is then in range.
            told[name] = min(lengths, key=lambda load: load.length)
    sizes = {name: load.length for name, load in told.items()}
    left = _cut({"batch": defaults.batch, "heads": defaults.heads, **given}, sizes, defaults)
    return left, tuple(_note(name, load, left[name]) for name, load in told.items())


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


def _note(name: str, load: AxisLength, size: int) -> str:
    told = f"{name} is {size}, "
    told += "as" if size == load.length else f"and could be {load.length}, since"
    return f"{told} {load.load} has that length; --{name} says otherwise"


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
