"""kernel_options: the keys that attnloom obeys, and those of torch that it accepts."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import torch

from attnloom.errors import OptionError
from attnloom.masking.arguments import shown
from attnloom.plan.choose import BUILT
from attnloom.plan.problem import KernelOptions

_log = logging.getLogger("attnloom")


class FlexKernelOptions(TypedDict, total=False):
    """Options of a call, all optional. Lower-case keys in the first group are attnloom's own.

    backend: "auto" (default), "cpu", "gluon" (Hopper), "triton", "tiled", "reference". A backend
        chosen here never falls back.
    exact_math: no approximate tanh or exp beyond one unit in the last place. Default False.
    deterministic: gradients bitwise equal from run to run; also switched on by
        `torch.use_deterministic_algorithms(True)`. Default False.
    debug_bounds: check every index into a captured tensor before the launch. Default False; slow.
    fp32_precision: how GPU kernels multiply float32 matrices. "ieee" (default): float32 products;
        "tf32x3": three tensor-core products, about float32's accuracy; "tf32": one, 10-bit
        mantissas.

    The remaining keys are those of `torch.nn.attention.flex_attention.FlexKernelOptions`. They
    tune torch's own kernels and steer nothing here; they are accepted, also with the prefixes
    `fwd_` and `bwd_`, so that code written for torch runs unchanged, and logged at debug level.
    """

    backend: str
    exact_math: bool
    deterministic: bool
    debug_bounds: bool
    fp32_precision: Literal["ieee", "tf32x3", "tf32"]

    num_warps: int
    num_stages: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_M1: int
    BLOCK_N1: int
    BLOCK_M2: int
    BLOCK_N2: int
    PRESCALE_QK: bool
    ROWS_GUARANTEED_SAFE: bool
    BLOCKS_ARE_CONTIGUOUS: bool
    WRITE_DQ: bool
    FORCE_USE_FLEX_ATTENTION: bool
    USE_TMA: bool
    kpack: int
    matrix_instr_nonkdim: int
    waves_per_eu: int
    BACKEND: Literal["AUTO", "TRITON", "FLASH", "TRITON_DECODE"]


FP32_PRECISIONS = ("ieee", "tf32x3", "tf32")
_TORCH_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")


def _backend(value: object) -> str:
    known = BUILT
    if isinstance(value, str) and value in known:
        return value
    near = difflib.get_close_matches(str(value)[:64].lower(), known, 1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise OptionError(
        f"kernel_options['backend'] is {shown(value)}, which is no backend of attnloom.{hint} "
        f"Known: {', '.join(repr(b) for b in known)}."
    )


def _flag(name: str) -> Callable[[object], bool]:
    def parse(value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise OptionError(f"kernel_options['{name}'] is {shown(value)}; it must be True or False.")

    return parse


def _fp32_precision(value: object) -> str:
    if isinstance(value, str) and value in FP32_PRECISIONS:
        return value
    raise OptionError(
        f"kernel_options['fp32_precision'] is {shown(value)}; it must be one of "
        f"{', '.join(repr(p) for p in FP32_PRECISIONS)}."
    )


_OURS: dict[str, Callable[[object], Any]] = {
    "backend": _backend,
    "exact_math": _flag("exact_math"),
    "deterministic": _flag("deterministic"),
    "debug_bounds": _flag("debug_bounds"),
    "fp32_precision": _fp32_precision,
}
_TORCHS = frozenset(FlexKernelOptions.__annotations__) - frozenset(_OURS)

_DEFAULT = {False: KernelOptions(), True: KernelOptions(deterministic=True)}
_SEEN: dict[tuple[object, ...], KernelOptions] = {}
_SEEN_LIMIT = 256


def read_options(options: Mapping[str, object] | None) -> KernelOptions:
    """Validated options of a call, with torch's deterministic mode folded in.

    Raises:
        OptionError: an unknown key (the nearest known one is named) or a value out of range.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    if options is None:
        return _DEFAULT[deterministic]
    if type(options) is not dict and not isinstance(options, Mapping):
        raise OptionError(
            f"kernel_options is a {type(options).__name__}; it must be a dictionary such as "
            "{'backend': 'auto'}."
        )
    try:
        # The type tells 1 and True apart, which are equal as keys.
        values = tuple(options.values())
        key = (deterministic, *options, *map(type, values), *values)
        found = _SEEN.get(key)
    except (TypeError, AttributeError):
        return _parse(options, deterministic)
    if found is None:
        found = _parse(options, deterministic)
        if len(_SEEN) >= _SEEN_LIMIT:
            _SEEN.clear()
        _SEEN[key] = found
    return found


def _parse(options: Mapping[str, object], deterministic: bool) -> KernelOptions:
    ours: dict[str, Any] = {}
    for name, value in options.items():
        if name in _OURS:
            ours[name] = _OURS[name](value)
        else:
            _accept_torch_option(name, value)
    if options.get("FORCE_USE_FLEX_ATTENTION") and "BACKEND" in options:
        raise OptionError(
            "kernel_options has both BACKEND and FORCE_USE_FLEX_ATTENTION, which torch refuses "
            "as well: BACKEND supersedes the other. Drop FORCE_USE_FLEX_ATTENTION."
        )
    ours["deterministic"] = ours.get("deterministic", False) or deterministic
    return KernelOptions(**ours)


def _accept_torch_option(name: object, value: object) -> None:
    bare = name
    if isinstance(name, str) and name.startswith(("fwd_", "bwd_")):
        bare = name[4:]
    if bare not in _TORCHS:
        known = sorted((*_OURS, *_TORCHS))
        folded = {k.lower(): k for k in known} | {k: k for k in _OURS}
        near = difflib.get_close_matches(str(name).lower(), folded, 1)
        hint = f" Did you mean '{folded[near[0]]}'?" if near else ""
        raise OptionError(
            f"kernel_options has the unknown key {shown(name)}.{hint} attnloom's own keys are "
            f"{', '.join(_OURS)}; torch's FlexKernelOptions keys are accepted and steer nothing."
        )
    if bare == "BACKEND" and not (isinstance(value, str) and value in _TORCH_BACKENDS):
        raise OptionError(
            f"kernel_options['BACKEND'] is {shown(value)}; torch knows "
            f"{', '.join(_TORCH_BACKENDS)}. To choose a backend of attnloom use the lower-case key "
            "'backend'."
        )
    _log.debug("kernel_options[%r] = %r steers torch's kernels only; ignored", name, value)
