"""Result types of operations: rules from the operands' types to the result's.

A rule is called with the operands' types, already counted, and raises ProgramError when they do
not fit; the tracer inserts the casts that make them fit.
"""

from __future__ import annotations

from collections.abc import Callable

from attnloom.ir.node import DType


class ProgramError(AssertionError):
    """A program breaks the rules of the IR: a bug of the compiler, never of the user."""


TypeRule = Callable[[tuple[DType, ...]], DType]


def _shared(types: tuple[DType, ...]) -> DType:
    if any(t is not types[0] for t in types):
        raise ProgramError(f"operands differ in type: {_names(types)}")
    return types[0]


def number(types: tuple[DType, ...]) -> DType:
    """All operands of one integer or float type, which is the result's."""
    if types[0] is DType.BOOL:
        raise ProgramError(f"needs numbers, got {_names(types)}")
    return _shared(types)


def real(types: tuple[DType, ...]) -> DType:
    """All operands of one float type, which is the result's."""
    if not types[0].is_float:
        raise ProgramError(f"needs floats, got {_names(types)}")
    return _shared(types)


def bits(types: tuple[DType, ...]) -> DType:
    """All operands BOOL, or all of one integer type."""
    if types[0].is_float:
        raise ProgramError(f"needs BOOL or integers, got {_names(types)}")
    return _shared(types)


def comparison(types: tuple[DType, ...]) -> DType:
    """Operands of one type, BOOL result."""
    _shared(types)
    return DType.BOOL


def classification(types: tuple[DType, ...]) -> DType:
    """A float operand, BOOL result."""
    real(types)
    return DType.BOOL


def shift(types: tuple[DType, ...]) -> DType:
    """An integer and a count of any integer type."""
    if not (types[0].is_int and types[1].is_int):
        raise ProgramError(f"needs integers, got {_names(types)}")
    return types[0]


def select(types: tuple[DType, ...]) -> DType:
    """A BOOL condition and two arms of one type."""
    if types[0] is not DType.BOOL:
        raise ProgramError(f"needs a BOOL condition, got {_names(types)}")
    return _shared(types[1:])


def explicit(_: tuple[DType, ...]) -> DType:
    """The type is part of the operation (cast) and cannot be inferred."""
    raise ProgramError("the result type must be given")


def reduction(kind: str, body: DType) -> DType:
    """Type of a `reduce` node: any and all are BOOL, the others keep the body's type."""
    if (kind in ("any", "all")) != (body is DType.BOOL):
        raise ProgramError(f"cannot reduce {body.value} by {kind}")
    return body


def _names(types: tuple[DType, ...]) -> str:
    return ", ".join(t.value for t in types)
