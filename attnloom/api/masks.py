"""create_block_mask and its relatives, with the signatures of torch.nn.attention.flex_attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType

import torch

from attnloom.backends import mask_builders
from attnloom.block_mask import BlockMask
from attnloom.errors import ModError, OptionError, ShapeError, counted
from attnloom.ir.node import DType
from attnloom.masking import extent, versions
from attnloom.masking.arguments import check_flag, read_data_device, read_device, read_int, shown
from attnloom.masking.build import build
from attnloom.masking.captures import captured_tensors
from attnloom.masking.dynamo import outside_graph
from attnloom.masking.lists import TileGrid, block_size_pair
from attnloom.masking.tokens import evaluate, mask_tokens
from attnloom.masking.views import MaskMod, noop_mask
from attnloom.trace.names import NOTE, mod_name
from attnloom.trace.tracer import trace_score

__all__ = ["and_masks", "create_block_mask", "create_mask", "noop_mask", "or_masks"]

Mod = Callable[..., torch.Tensor]

_AXES: tuple[extent.Axis, ...] = ("batch", "heads", *extent.LENGTHS)

mask_builders.register()


@outside_graph
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Build a BlockMask from a mask_mod, without ever holding the Q_LEN x KV_LEN mask.

    The mask_mod is traced; parts that depend on queries alone or keys alone are evaluated once a
    position, interval arithmetic decides tiles in bulk, and only tiles that stay undecided are
    evaluated score by score, a bounded number at a time.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> bool, True where a score is kept.
        B, H: batch size and query heads; None for a mask that broadcasts (size 1). Lists are stored
            once where they do not differ.
        Q_LEN, KV_LEN: lengths in tokens, 0 or more, any remainder to the block.
        device: of the block lists; default: that of the captured tensors, else torch's default.
        BLOCK_SIZE: tile in tokens, one size or (query, key), powers of two from 16.
        _compile: accepted for torch's sake; the builder needs no compilation.
        separate_full_blocks: False lists full tiles as partial, so that mask_mod runs on all.
        compute_dq_write_order: also fill dq_write_order, dq_write_order_full (torch's FLASH
            backward reads them, attnloom does not).
        dq_kv_order: their order of kv blocks: True descending, False ascending.
    Returns:
        BlockMask of shape [B or 1, H or 1, Q_LEN, KV_LEN]. The numbers of full and partial tiles
        are torch's, except in a last row or column of tiles that overhangs its length: there a
        tile is full if all its real scores are kept.
    Raises:
        TraceError: mask_mod cannot be traced. ModError: it does not take 4 arguments.
        ShapeError: a size is negative. OptionError: BLOCK_SIZE or dq_kv_order means nothing.
    Source: Dong et al. 2024, arXiv:2412.05496, sec. 4.1 (BlockMask).
    """
    del _compile
    if _num_arguments(mask_mod) == 5:
        raise ModError(
            f"{_name(mask_mod)} takes 5 arguments, which makes it a score_mod; create_block_mask "
            "needs a mask_mod(b, h, q_idx, kv_idx) that returns True where a score is kept."
        )
    if not isinstance(dq_kv_order, bool):
        raise OptionError(
            f"dq_kv_order is {shown(dq_kv_order)}; create_block_mask takes True or False."
        )
    check_flag("separate_full_blocks", separate_full_blocks)
    check_flag("compute_dq_write_order", compute_dq_write_order)
    sizes = _sizes(B, H, Q_LEN, KV_LEN)
    extent.check(mask_mod, dict(zip(_AXES, sizes, strict=True)))
    where = read_data_device(_device(mask_mod, device))
    grid = TileGrid(*sizes, *block_size_pair(BLOCK_SIZE))
    built = build(mask_mod, grid, where, separate_full_blocks)
    mask = BlockMask.from_lists(built.lists, mask_mod, sizes[:2], separate_full_blocks)
    mask._reading = versions.read(mask_mod, built.bound)
    mask._lists_of_mod = True
    if compute_dq_write_order:
        mask.compute_write_order(dq_kv_order)
    return mask


@outside_graph
def create_mask(
    mod_fn: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The dense mask of a mod; memory B x H x Q_LEN x KV_LEN bytes.

    Args:
        mod_fn: a mask_mod, or a score_mod, which masks where it turns a score of 0 into -inf.
        B, H: None for 1.
        Q_LEN, KV_LEN: lengths in tokens.
        device: default: that of the captured tensors, else torch's default.
    Returns:
        [B, H, Q_LEN, KV_LEN] bool, True where a score is kept.
    Raises:
        TraceError: the mod cannot be traced. ModError: it takes neither 4 nor 5 arguments.
        ShapeError: a size is negative.
    """
    sizes, where = _sizes(B, H, Q_LEN, KV_LEN), _device(mod_fn, device)
    extent.check(mod_fn, dict(zip(_AXES, sizes, strict=True)))
    if _num_arguments(mod_fn) == 4:
        return mask_tokens(mod_fn, sizes, where)
    with torch.no_grad():
        program = trace_score(mod_fn, DType.F32, where)
        return evaluate(program, sizes, where, lambda score: ~torch.isneginf(score))


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask_mod that keeps what every one of mask_mods keeps; without any, everything.

    Raises:
        ModError: one of them is not callable, or does not take 4 arguments.
    """
    _check_callables(mask_mods)

    def and_mask(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        kept = noop_mask(b, h, q_idx, kv_idx)
        for mask_mod in mask_mods:
            kept = kept & mask_mod(b, h, q_idx, kv_idx)
        return kept

    return extent.limited(and_mask, *extent.limits_of(*mask_mods))


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask_mod that keeps what any one of mask_mods keeps; without any, nothing.

    Raises:
        ModError: one of them is not callable, or does not take 4 arguments.
    """
    _check_callables(mask_mods)

    def or_mask(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        kept = torch.zeros_like(b, dtype=torch.bool)
        for mask_mod in mask_mods:
            kept = kept | mask_mod(b, h, q_idx, kv_idx)
        return kept

    return extent.limited(or_mask, *extent.limits_of(*mask_mods))


def _check_callables(mask_mods: tuple[MaskMod, ...]) -> None:
    for place, mask_mod in enumerate(mask_mods):
        if not callable(mask_mod):
            raise ModError(
                f"argument {place} is {shown(mask_mod)}; every argument must be a mask_mod(b, h, "
                "q_idx, kv_idx). Pass the functions themselves, not a list of them or a BlockMask."
            )
        # Dynamo cannot look into signatures; the trace of the mask finds the mistake then.
        if not torch.compiler.is_dynamo_compiling() and _num_arguments(mask_mod) == 5:
            raise ModError(
                f"argument {place}, {_name(mask_mod)}, takes 5 arguments, which makes it a "
                "score_mod; every argument must be a mask_mod(b, h, q_idx, kv_idx). Score_mods are "
                "combined by calling one on the score that the other returns."
            )


def _sizes(B: int | None, H: int | None, Q_LEN: int, KV_LEN: int) -> tuple[int, int, int, int]:
    given = {"B": 1 if B is None else B, "H": 1 if H is None else H}
    given |= {"Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    for name, value in given.items():
        size = read_int(name, value)
        if size < 0:
            raise ShapeError(f"{name} is {size}; sizes are 0 or more.")
    return tuple(map(int, given.values()))  # type: ignore[return-value]


def _device(mod: Mod, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return _numbered(read_device(device))
    for tensor in captured_tensors(mod):
        return tensor.device
    return _numbered(read_device(torch.get_default_device()))


def _numbered(device: torch.device) -> torch.device:
    """The device that tensors made on it report: "cuda" is the current one of several."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _num_arguments(mod: Mod) -> int:
    """4 for a mask_mod, 5 for a score_mod: parameters without defaults."""
    if not callable(mod):
        hint = "a mask_mod is a function of (b, h, q_idx, kv_idx)."
        if isinstance(mod, ModuleType):
            own = [n for n, f in vars(mod).items() if getattr(f, "__module__", "") == mod.__name__]
            names = [f"'{n}'" for n in own if not n.startswith("_") and callable(vars(mod)[n])]
            found = f" It holds {', '.join(names)}." if names else ""
            raise ModError(f"module '{mod.__name__}' is not callable; {hint}{found}")
        raise ModError(f"{shown(mod)} is not callable; {hint}")
    count = _count_parameters(mod)
    if count not in (4, 5):
        raise ModError(
            f"{_name(mod)} takes {counted(count, 'argument')}; a mask_mod takes 4, (b, h, q_idx, "
            "kv_idx), and a score_mod 5, (score, b, h, q_idx, kv_idx)."
        )
    return count


def _count_parameters(mod: Mod) -> int:
    """Positional parameters without defaults; 4 where there are any number of them."""
    # inspect.signature takes a while
    if type(mod) is FunctionType and vars(mod).keys() <= {extent.ATTRIBUTE, NOTE}:
        code = mod.__code__
        takes_any = code.co_flags & inspect.CO_VARARGS
        return 4 if takes_any else code.co_argcount - len(mod.__defaults__ or ())
    try:
        parameters = inspect.signature(mod).parameters.values()
    except ValueError as error:
        raise ModError(f"{_name(mod)} has no signature to read; wrap it in a function.") from error
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return 4
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _name(mod: object) -> str:
    return repr(mod_name(mod))
