"""What bytecode proves of a function: what it reads, and the literals it computes with."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

_LITERAL = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
# Instructions that push one value, pop none and cannot be the end of a larger expression.
_PUSH_ONE = frozenset(
    "LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_BORROW LOAD_DEREF LOAD_CLASSDEREF".split()
)
_OPERATORS = frozenset({"BINARY_OP", "COMPARE_OP"})
_FILLER = frozenset({"CACHE", "EXTENDED_ARG", "PRECALL", "NOP"})
_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "DELETE_DEREF", "LOAD_BUILD_CLASS"})
_STATELESS_MODULES = ("torch", "math", "operator")
_VARIABLES = frozenset(
    "LOAD_DEREF LOAD_CLASSDEREF LOAD_GLOBAL LOAD_NAME LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_BORROW "
    "LOAD_FROM_DICT_OR_DEREF LOAD_FROM_DICT_OR_GLOBALS LOAD_FAST_AND_CLEAR".split()
)
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_STORES = frozenset({"STORE_FAST", "STORE_DEREF", "DELETE_FAST", "STORE_FAST_MAYBE_NULL"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
Chain = tuple[str, ...]
_MISSING = object()


@dataclass(frozen=True, eq=False)
class CodeFacts:
    """Facts of one code object, its nested functions included; compared by identity.

    global_names: names it may look up outside itself, sorted.
    chains: variable -> the attributes that are read from it: ("cfg", "window") for
        `self.cfg.window`; () where it is used as it is. Keyed by name alone, so that a variable of
        a nested function adds to one of the same name, never hides it.
    attribute_names: all that it may read of whatever object, strings in it included.
    pure_lookup: its behaviour is determined by cells, defaults, globals and attributes: it writes
        no global or captured variable and imports nothing but torch and math.
    """

    code: CodeType
    global_names: tuple[str, ...]
    chains: dict[str, tuple[Chain, ...]]
    attribute_names: frozenset[str]
    pure_lookup: bool


def code_facts(code: CodeType) -> CodeFacts:
    """Facts of `code`, which the result keeps alive, so that its identity stays valid."""
    names: set[str] = set()
    chains: dict[str, set[Chain]] = {}
    pure = _collect(code, names, chains, frozenset(code.co_freevars))
    ordered = {name: tuple(sorted(found)) for name, found in chains.items()}
    return CodeFacts(code, tuple(sorted(names)), ordered, frozenset(_words(code)), pure)


def _words(code: CodeType) -> Iterator[str]:
    """Names and strings of code and what is nested in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _words(constant)


def _collect(
    code: CodeType, names: set[str], chains: dict[str, set[Chain]], captured: frozenset[str]
) -> bool:
    pure = True
    steps = [i for i in dis.get_instructions(code) if i.opname not in _FILLER]
    cells = (*code.co_freevars, *code.co_cellvars)
    for place, step in enumerate(steps):
        name = step.opname
        if name.startswith("LOAD_FAST") and step.argval in cells:
            continue  # Python 3.13 hands the cell to a nested function this way, not its value
        if name in _GLOBALS:
            names.add(str(step.argval))
        if name in _VARIABLES:
            chains.setdefault(str(step.argval), set()).add(_chain(steps, place + 1))
        elif name.count("_FAST") == 2:  # one instruction for two variables
            first, second = (str(variable) for variable in step.argval)
            loads = name.endswith(("LOAD_FAST", "LOAD_FAST_BORROW"))
            chains.setdefault(first, set()).add(())
            chains.setdefault(second, set()).add(_chain(steps, place + 1) if loads else ())
        elif name in _STORES:
            chains.setdefault(str(step.argval), set()).add(())
            pure = pure and not (name == "STORE_DEREF" and step.argval in captured)
        elif name in _WRITES:
            pure = False
        elif name == "IMPORT_NAME":
            root = str(step.argval).split(".")[0]
            pure = pure and root in _STATELESS_MODULES
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            pure = _collect(constant, names, chains, captured) and pure
    return pure


def _chain(steps: list[dis.Instruction], place: int) -> Chain:
    """The attributes that are read one after the other from `place` on."""
    found: list[str] = []
    while place < len(steps) and steps[place].opname in _ATTRIBUTES:
        found.append(str(steps[place].argval))
        place += 1
    return tuple(found)


@functools.lru_cache(maxsize=512)
def _literal_operands(code: CodeType) -> dict[int, tuple[Any, Any]]:
    """Offset of each binary operator -> its (left, right) operand where a literal, else _MISSING.

    An operand is a literal if the instructions right before the operator load it as a constant and
    no jump can arrive between them.
    """
    found: dict[int, tuple[Any, Any]] = {}
    steps: list[dis.Instruction] = []
    targets: set[int] = set()
    arrives = False
    for step in dis.get_instructions(code):
        arrives = (
            arrives or step.is_jump_target
        )  # a prefix is the target of a jump to its operation
        if step.opname not in _FILLER:
            steps.append(step)
            if arrives:
                targets.add(step.offset)
            arrives = False
    for place, step in enumerate(steps):
        if step.opname not in _OPERATORS and not step.opname.startswith("BINARY_"):
            continue
        if place < 2 or step.offset in targets:
            continue
        last, before = steps[place - 1], steps[place - 2]
        if last.opname in _LITERAL:
            found[step.offset] = (_MISSING, last.argval)
        elif last.opname in _PUSH_ONE and last.offset not in targets and before.opname in _LITERAL:
            found[step.offset] = (before.argval, _MISSING)
    return found


def is_literal(code: CodeType, offset: int, value: int | float) -> bool:
    """Whether the operator that `code` is executing at `offset` has the literal `value` operand."""
    for literal in _literal_operands(code).get(offset, ()):
        if type(literal) is type(value) and repr(literal) == repr(value):
            return True
    return False
