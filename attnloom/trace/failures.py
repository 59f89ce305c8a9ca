"""What a mod itself raises while it is traced, in words about the mod.

Rewritten are errors that come of a traced value having no data: torch refuses it, or Python does
(`score + None`, `score.nope`, `a, b = score`); and errors of the mod's own arithmetic on Python
numbers (`1 / 0`, `2.0**5000`), which would otherwise surface without the mod's name from deep
inside a call of attention. What else the user's own code raises (a NameError, a `raise
ValueError`) is theirs and passes unchanged.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from attnloom.errors import AttnloomError, TraceError
from attnloom.trace import messages
from attnloom.trace.names import mod_name

if TYPE_CHECKING:
    from attnloom.trace.context import Trace

_MOST_SHOWN = 160
# Mods around the user's: of and_masks, of parts of a mask.
_COMBINATORS = ("attnloom.api.", "attnloom.masking.")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_ADVICE = (
    "inside a mod score, b, h, q_idx and kv_idx are tensors without dimensions whose values exist "
    "only in the kernel. Use arithmetic, comparisons and torch functions of one score."
)
_OF_NUMBERS = (
    "this is arithmetic on Python numbers, done once while the mod is traced. Check the numbers "
    "that the mod captures, or guard it with a Python `if`."
)
# Python and torch of a number that was taken for a tensor.
_NUMBER_FOR_TENSOR = re.compile(
    r"'(int|float|bool)' object has no attribute|must be Tensor, not (int|float|bool)"
)
_IS_NUMBER = (
    "it is a Python number there and no tensor. Compute with it as a number, or make it one with "
    "torch.full_like(score, number)."
)
_ON_ONE_PATH = (
    "on one path of the mod it is a Python number and no tensor: `max(x, 0)`, `min`, `and`, `or` "
    "and `if` give one of their sides as it is. Use x.clamp(min=0), torch.maximum or torch.where, "
    "which give tensors."
)


def explained(trace: Trace, error: Exception) -> TraceError | None:
    """A TraceError to raise in place of `error`, or None if it is the user's own."""
    if isinstance(error, AttnloomError):
        return None
    frames = _frames(trace, error)
    from_library = bool(frames) and messages.is_library(frames[-1][0])
    if not from_library and not isinstance(error, (TypeError, AttributeError, ArithmeticError)):
        return None
    place, source = messages.mod_place(trace.mod), ""
    for frame, line, instruction in frames:
        file = frame.f_code.co_filename
        standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
        ours = frame.f_globals.get("__name__", "").startswith(_COMBINATORS)
        if not (messages.is_library(frame) or standard or ours):
            place = f"{Path(file).name}:{line}"
            column = messages.column_of(frame.f_code, instruction)
            source = messages.source_line(file, line, column)
    said = str(error).strip().partition("\n")[0].replace("'Symbol' object", "a traced value")
    said = said.replace("'Symbol'", "a traced value").replace("Symbol", "traced value")
    said = said.removesuffix(", but expected one of:")[:_MOST_SHOWN].rstrip(". ")
    what = f"raises {type(error).__name__}: {said}"
    where = f" ({place})" if place else ""
    advice = _OF_NUMBERS if isinstance(error, ArithmeticError) else _ADVICE
    if not isinstance(error, ArithmeticError) and _NUMBER_FOR_TENSOR.search(said):
        advice = _ON_ONE_PATH if trace.taken else _IS_NUMBER
    text = f"{trace.kind} '{mod_name(trace.mod)}'{where} {what}; {advice}"
    return TraceError(f"{text}\n    {source}" if source else text)


def _frames(trace: Trace, error: Exception) -> list[tuple[FrameType, int, int]]:
    """Frames, lines and instructions below the call of the mod, outermost first."""
    found: list[tuple[FrameType, int, int]] = []
    step = error.__traceback__
    while step is not None:
        if step.tb_frame is trace.base_frame:
            found = []
        else:
            found.append((step.tb_frame, step.tb_lineno, step.tb_lasti))
        step = step.tb_next
    return found
