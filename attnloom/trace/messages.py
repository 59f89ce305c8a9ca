"""Texts of trace errors: where it happened, what is wrong, why, and what to write instead."""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from attnloom.trace.names import author_of

MOST_SHOWN = 120  # characters of a source line
ONE_AT_A_TIME = "a mod is evaluated one score at a time"
_WHOLE = f"{ONE_AT_A_TIME}, so there is nothing to {{}}. {{}} outside and capture the result."
_HOST = "its value exists only inside the kernel. {}"
_RANDOM = (
    "kernels recompute a mod in the backward, so that it must give the same value every time. Draw "
    "the numbers outside and capture them: noise[b, h, q_idx, kv_idx]."
)
_IN_PLACE = "a traced value cannot be changed. Write `x = x {} y` instead of `x {}= y`."

# Function name -> why it cannot be fused and what to write instead.
ADVICE: dict[str, str] = {
    **{
        name: _WHOLE.format(verb, verb.capitalize())
        for verb, names in {
            "sort": "sort argsort msort topk kthvalue median nanmedian quantile mode unique",
            "search": "searchsorted bucketize argmax argmin nonzero argwhere isin",
            "accumulate": "cumsum cumprod cummax cummin logcumsumexp diff",
            "arrange": "stack cat concat concatenate hstack vstack repeat repeat_interleave tile "
            "roll flip flatten tril triu meshgrid",
        }.items()
        for name in names.split()
    },
    **dict.fromkeys(
        ("softmax", "log_softmax", "logsumexp"),
        "the softmax over keys is attention's own; a mod only changes one score.",
    ),
    **{
        name: _HOST.format("Keep it as it is and use torch functions on it.")
        for name in ("item", "tolist", "numpy", "__complex__", "data_ptr", "cpu")
    },
    "__array__": _HOST.format(
        "Use torch functions, and capture numpy arrays as tensors (torch.as_tensor(array))."
    ),
    "__float__": _HOST.format(
        "Use `.float()` instead of `float()`, and torch.sqrt, torch.floor, ... instead of math's."
    ),
    "__int__": _HOST.format("Use `.long()` instead of `int()`."),
    "__index__": _HOST.format(
        "To index a list with it, stack the list into one tensor outside and capture that; "
        "`range()` needs a number that is known outside."
    ),
    "__contains__": _HOST.format("Compare with each value and join the results by `|`."),
    "masked_select": "the size of its result depends on data. Use torch.where.",
    "__setitem__": "captured tensors and traced values are read-only in a mod. Use torch.where.",
    "backward": "gradients flow through a mod by themselves; call backward on the loss.",
    "einsum": "it is not among the small reductions. Write `(a * b).sum()` or `a @ b`.",
    **dict.fromkeys(
        ("norm", "linalg_norm", "linalg_vector_norm", "normalize", "cosine_similarity"),
        "it is not among the small reductions. Write it with sums of a row: "
        "`(a * a).sum().sqrt()`.",
    ),
    **dict.fromkeys(
        ("linear", "bilinear", "layer_norm", "rms_norm"),
        "it is not among the small reductions. Apply it to the whole table outside the mod, and "
        "index the result.",
    ),
    **{
        name: _IN_PLACE.format(sign, sign)
        for name, sign in {
            "add_": "+", "sub_": "-", "mul_": "*", "div_": "/", "pow_": "**",
            "__iadd__": "+", "__isub__": "-", "__imul__": "*", "__itruediv__": "/",
            "__iand__": "&", "__ior__": "|", "__ixor__": "^", "__ifloordiv__": "//",
            "__imod__": "%", "__ipow__": "**", "__ilshift__": "<<", "__irshift__": ">>",
            "bitwise_and_": "&", "bitwise_or_": "|", "bitwise_xor_": "^",
            "floor_divide_": "//", "remainder_": "%",
        }.items()
    },
}  # fmt: skip
RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal "
    "poisson dropout alpha_dropout feature_dropout rrelu uniform_ normal_ random_ bernoulli_ "
    "exponential_ geometric_ cauchy_ log_normal_ empty empty_like empty_strided new_empty".split()
)
_UNINITIALISED = "its contents are not defined. Use torch.zeros outside the mod."
_NO_FUSED_FORM = (
    "attnloom has no fused form of it. Write it with elementwise functions, or compute it outside "
    "and capture the result."
)
# What a mod does when it calls a special method.
_PHRASES = {
    "__float__": "calls float() or a function of `math` on a traced value",
    "__int__": "calls int() on a traced value",
    "__index__": "uses a traced value in range() or as the index of a list",
    "__array__": "gives a traced value to numpy",
    "__setitem__": "assigns to an element of a tensor",
    "__contains__": "uses `in` on a traced value",
}
_OPERATORS = {
    "neg": "`-`",
    "__and__": "`&`",
    "__rand__": "`&`",
    "__or__": "`|`",
    "__ror__": "`|`",
    "__xor__": "`^`",
    "__rxor__": "`^`",
    "__invert__": "`~`",
    "floor_divide": "`//`",
    "__floordiv__": "`//`",
    "__rfloordiv__": "`//`",
    "remainder": "`%`",
    "__rmod__": "`%`",
    "add_": "`+=` or Tensor.add_",
    "sub_": "`-=` or Tensor.sub_",
    "mul_": "`*=` or Tensor.mul_",
    "div_": "`/=` or Tensor.div_",
}


def advice(name: str) -> str:
    """Why the function `name` cannot be fused, and what to do."""
    if name in RANDOM:
        return _UNINITIALISED if "empty" in name else _RANDOM
    if name in ADVICE:
        return ADVICE[name]
    if name.endswith("_") and not name.endswith("__"):
        return f"a traced value cannot be changed in place. Use `x = x.{name[:-1]}(...)`."
    return _NO_FUSED_FORM


def phrase(func: Callable[..., Any]) -> str:
    """What a mod does that calls `func`, as a user would say it."""
    special = _PHRASES.get(getattr(func, "__name__", ""))
    return special or f"calls {display(func)} on a traced value"


def operator(name: str) -> str:
    """An operator's sign for the name of its function, other names as they are."""
    return _OPERATORS.get(name, name)


def display(func: Callable[..., Any]) -> str:
    """A torch function as users write it."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return f"Tensor.{getattr(getattr(func, '__self__', None), '__name__', '?')}"
    if name in _OPERATORS and name.endswith("_"):
        return _OPERATORS[name]
    if name.startswith("special_"):
        return f"torch.special.{name.removeprefix('special_')}"
    owner = getattr(func, "__objclass__", None)
    qualified = getattr(func, "__qualname__", name)
    if owner is not None or qualified.startswith(("Tensor.", "TensorBase.")):
        return f"Tensor.{name}"
    module = getattr(func, "__module__", None) or "torch"
    if module in ("torch._C._nn", "torch.nn.functional"):
        return f"torch.nn.functional.{name}"
    return f"torch.{name}" if module.startswith("torch") else f"{module}.{name}"


def mod_place(mod: Any) -> str:
    """`file.py:line` of a mod's definition, or '' where it has no Python code."""
    mod = inspect.unwrap(author_of(mod))
    if isinstance(mod, functools.partial):
        mod = mod.func
    call = inspect.getattr_static(type(mod), "__call__", None)
    code = getattr(mod, "__code__", None) or getattr(call, "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""


def is_library(frame: FrameType) -> bool:
    """Whether a frame belongs to torch or the tracer rather than to the user's code."""
    module = frame.f_globals.get("__name__", "")
    return module.startswith(("torch.", "attnloom.trace.")) or module in ("torch", "functools")


def user_frame() -> FrameType | None:
    """The innermost frame of the caller's stack that is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame):
        frame = frame.f_back
    return frame


def source_line(filename: str, line: int, column: int | None = None) -> str:
    """The stripped text of a source line, '' where the file cannot be read.

    A line of more than MOST_SHOWN characters is cut, around `column` if that is known.
    """
    text = linecache.getline(filename, line)
    margin = len(text) - len(text.lstrip())
    text = text.strip()
    if len(text) <= MOST_SHOWN:
        return text
    middle = 0 if column is None else column - margin
    start = max(0, min(middle - MOST_SHOWN // 2, len(text) - MOST_SHOWN))
    before, after = "..." if start else "", "..." if start + MOST_SHOWN < len(text) else ""
    return f"{before}{text[start : start + MOST_SHOWN].strip()}{after}"


def column_of(code: CodeType, last_instruction: int) -> int | None:
    """Where in its line an instruction was written; None before Python 3.11, which does not say.

    Python counts bytes; in a line of other letters the cut is only nearby.
    """
    positions = getattr(code, "co_positions", None)
    if positions is None:
        return None
    place = next(itertools.islice(positions(), last_instruction // 2, None), None)
    return None if place is None else place[2]
