"""Rewrites a program into a cheaper one of the same meaning.

Exact, always done (equal bit for bit in the node's type, NaN payloads aside):
    constants       operations on constants; integer sums of several constants
    integers        x + 0, x * 1, x * 0, x - x, comparisons of x with itself; division and remainder
                    by a power of two become shift and mask
    floats          x - 0.0, x + (-0.0), x * 1, x * -1, x / 1, division by a power of two; signs:
                    -(-x), a - (-b), |-x|; powers with a constant exponent that torch specialises
    logic           not not, and / or / xor with constants and with itself, negated comparisons
                    (of floats only == and !=: the others differ for NaN)
    where           constant condition, equal arms, negated condition, arms under the same
                    condition, BOOL arms that are constant
    casts           after a cast that keeps every value; comparisons of a BOOL cast to a number
    sharing         operands of commutative operations are put in one order

Inexact, only when exact=False (off by a rounding or by the sign of a zero):
    x + 0.0, 0.0 - x; division by a value that varies along fewer positions than the dividend
    becomes multiplication by its reciprocal, which placement then hoists. Only where
    `tolerance.py` allows it: in a value that reaches a comparison or a rounding, an ulp can move a
    mask's edge or a position's bucket.

Not done, because a NaN, an infinity or a rounding would change: float x * 0, x - x, x / x,
reassociation, distribution, log of exp. Reductions are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from attnloom.ir.builder import Builder
from attnloom.ir.node import Axes, DType, Program
from attnloom.ir.passes.rewrite import Rewrite
from attnloom.ir.passes.tolerance import tolerant_nodes

_MAX_ROUNDS = 4  # one does nearly all; a rewrite late in a program may enable one earlier
_BOTH = Axes.Q | Axes.KV
_INVERSE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


def simplify(program: Program, exact: bool = True) -> Program:
    """The same outputs in the same order, computed with fewer and cheaper nodes.

    Args:
        program: valid; its binding slots are kept, also those no longer used.
        exact: leave out what changes a rounding or the sign of a zero.
    """
    for _ in range(_MAX_ROUNDS):
        simpler = _once(program, exact)
        if simpler.nodes == program.nodes:
            break
        program = simpler
    return program


def _once(program: Program, exact: bool) -> Program:
    rewrite = Rewrite(Builder.like(program), RULES)
    tolerant = (False,) * len(program.nodes) if exact else tolerant_nodes(program)
    new: list[int] = []
    for index, node in enumerate(program.nodes):
        rewrite.exact = not tolerant[index]
        new.append(rewrite.remake(node, tuple(new[a] for a in node.args)))
    return rewrite.build.finish(*(new[i] for i in program.outputs))


def _add(r: Rewrite, a: int, b: int) -> int | None:
    if r.is_value(b, -0.0 if r.is_float(b) else 0):
        return a
    if r.is_float(b):
        if r.is_value(b, 0.0) and not r.exact:
            return a
        for x, y in ((a, b), (b, a)):
            negated = r.operand(y, "neg")
            if negated is not None:
                return r.make("sub", x, negated)
        return None
    inner = r.node(a)
    if r.value(b) is not None and inner.op == "add" and r.value(inner.args[1]) is not None:
        return r.make("add", inner.args[0], r.make("add", inner.args[1], b))
    return None


def _sub(r: Rewrite, a: int, b: int) -> int | None:
    if r.is_value(b, 0.0 if r.is_float(b) else 0):
        return a
    negated = r.operand(b, "neg")
    if negated is not None:
        return r.make("add", a, negated)
    if not r.is_float(a):
        if a == b:
            return r.const(0, a)
        return r.make("neg", b) if r.is_value(a, 0) else None
    if r.is_value(a, -0.0) or (r.is_value(a, 0.0) and not r.exact):
        return r.make("neg", b)
    return None


def _mul(r: Rewrite, a: int, b: int) -> int | None:
    factor = r.value(b)
    if factor is not None:
        if factor == 1:
            return a
        if factor == -1:
            return r.make("neg", a)
        if factor == 0 and not r.is_float(b):
            return b
    left, right = r.operand(a, "neg"), r.operand(b, "neg")
    return r.make("mul", left, right) if left is not None and right is not None else None


def _div(r: Rewrite, a: int, b: int) -> int | None:
    divisor = r.value(b)
    if divisor is not None and _is_power_of_two(divisor):
        return r.make("mul", a, r.const(1.0 / float(divisor), b))
    if r.exact or r.value(a) is not None:
        return None
    varies, fixed = r.build.axes(a), r.build.axes(b)
    if fixed & _BOTH != _BOTH and fixed != varies and fixed & varies == fixed:
        return r.make("mul", a, r.make("reciprocal", b))
    return None


def _is_power_of_two(value: float) -> bool:
    """Within +-2^-64 .. 2^64, so that the reciprocal is exact and normal."""
    size = abs(value)
    return 2.0**-64 <= size <= 2.0**64 and float(size).hex().split("p")[0] == "0x1.0000000000000"


def _floordiv(r: Rewrite, a: int, b: int) -> int | None:
    divisor = r.value(b)
    if r.is_float(a) or divisor is None or divisor <= 0 or not _is_power_of_two(divisor):
        return None
    if divisor == 1:
        return a
    return r.make("shr", a, r.const(int(divisor).bit_length() - 1, a))


def _mod(r: Rewrite, a: int, b: int) -> int | None:
    divisor = r.value(b)
    if r.is_float(a) or divisor is None or divisor <= 0 or not _is_power_of_two(divisor):
        return None
    return r.make("and", a, r.const(int(divisor) - 1, a))


def _truncdiv(r: Rewrite, a: int, b: int) -> int | None:
    return a if r.value(b) == 1 and not r.is_float(a) else None


def _pow(r: Rewrite, a: int, b: int) -> int | None:
    exponent = r.value(b)
    if exponent is None:
        return None
    make = _POWERS.get(exponent)
    if make is None or (not r.is_float(a) and exponent not in (0, 1, 2, 3)):
        return None
    return make(r, a)


def _square(r: Rewrite, a: int) -> int:
    return r.make("mul", a, a)


_POWERS: dict[float, Callable[[Rewrite, int], int]] = {
    0: lambda r, a: r.const(1, a),
    1: lambda _, a: a,
    2: _square,
    3: lambda r, a: r.make("mul", _square(r, a), a),
    -1: lambda r, a: r.make("reciprocal", a),
    -2: lambda r, a: r.make("reciprocal", _square(r, a)),
    0.5: lambda r, a: r.make("sqrt", a),
    -0.5: lambda r, a: r.make("rsqrt", a),
}


def _neg(r: Rewrite, a: int) -> int | None:
    return r.operand(a, "neg")


def _abs(r: Rewrite, a: int) -> int | None:
    if r.node(a).op == "abs" and r.dtype(a).is_float:
        return a
    negated = r.operand(a, "neg")
    return r.make("abs", negated) if negated is not None and r.is_float(a) else None


def _rounding(r: Rewrite, a: int) -> int | None:
    return a if not r.is_float(a) or r.node(a).op in ("floor", "ceil", "round", "trunc") else None


def _idempotent(_: Rewrite, a: int, b: int) -> int | None:
    return a if a == b else None


def _and(r: Rewrite, a: int, b: int) -> int | None:
    mask = r.value(b)
    if mask is not None and mask == _ones(r, b):
        return a
    if a == b or (mask is not None and mask == 0):
        return b
    return r.const(0, a) if _opposite(r, a, b) else None


def _or(r: Rewrite, a: int, b: int) -> int | None:
    mask = r.value(b)
    if a == b or (mask is not None and mask == 0):
        return a
    if mask is not None and mask == _ones(r, b):
        return b
    return r.const(_ones(r, a), a) if _opposite(r, a, b) else None


def _xor(r: Rewrite, a: int, b: int) -> int | None:
    mask = r.value(b)
    if a == b:
        return r.const(0, a)
    if mask is not None and mask == 0:
        return a
    return r.make("not", a) if mask is not None and mask == _ones(r, b) else None


def _ones(r: Rewrite, i: int) -> int:
    return {DType.BOOL: 1, DType.U8: 255}.get(r.dtype(i), -1)


def _opposite(r: Rewrite, a: int, b: int) -> bool:
    left, right = r.node(a), r.node(b)
    inverse = left.args == right.args and _INVERSE.get(left.op) == right.op
    if inverse and (left.op in ("eq", "ne") or not r.is_float(left.args[0])):
        return True
    return r.operand(a, "not") == b or r.operand(b, "not") == a


def _not(r: Rewrite, a: int) -> int | None:
    inner = r.operand(a, "not")
    if inner is not None:
        return inner
    node = r.node(a)
    if node.op in ("eq", "ne") or (node.op in _INVERSE and not r.is_float(node.args[0])):
        return r.make(_INVERSE[node.op], *node.args)
    return None


def _compare(op: str, same: bool) -> Callable[[Rewrite, int, int], int | None]:
    """same: what `x op x` gives, unless x may be NaN."""

    def rule(r: Rewrite, a: int, b: int) -> int | None:
        if a == b and (not r.is_float(a) or op in ("lt", "gt")):
            return r.build.const(same, DType.BOOL)
        if a == b and op == "ne":
            return r.make("isnan", a)
        if op not in ("eq", "ne") or r.value(b) is None:
            return None
        flag = r.operand(a, "cast") if r.dtype(a) is not DType.BOOL else a
        if flag is None or r.dtype(flag) is not DType.BOOL or r.value(b) not in (0, 1):
            return None
        return flag if (r.value(b) == 1) == (op == "eq") else r.make("not", flag)

    return rule


def _where(r: Rewrite, c: int, a: int, b: int) -> int | None:
    condition = r.value(c)
    if condition is not None:
        return a if condition else b
    if a == b:
        return a
    negated = r.operand(c, "not")
    if negated is not None:
        return r.make("where", negated, b, a)
    for arm, keep in ((a, 1), (b, 2)):
        node = r.node(arm)
        if node.op == "where" and node.args[0] == c:
            arms = (node.args[keep], b) if keep == 1 else (a, node.args[keep])
            return r.make("where", c, *arms)
    return _where_bool(r, c, a, b) if r.dtype(a) is DType.BOOL else None


def _where_bool(r: Rewrite, c: int, a: int, b: int) -> int | None:
    for arm, other, true, false in ((a, b, "or", "and"), (b, a, "or", "and")):
        value = r.value(arm)
        if value is not None:
            # where(c, True, b) is c | b; where(c, a, True) is ~c | a; with False likewise, & for |
            positive = (arm == a) == bool(value)
            condition = c if positive else r.make("not", c)
            return r.make(true if value else false, condition, other)
    return None


RULES: dict[str, Callable[..., int | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "floordiv": _floordiv,
    "mod": _mod,
    "truncdiv": _truncdiv,
    "pow": _pow,
    "neg": _neg,
    "abs": _abs,
    "min": _idempotent,
    "max": _idempotent,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": _not,
    "where": _where,
    "floor": _rounding,
    "ceil": _rounding,
    "round": _rounding,
    "trunc": _rounding,
    "eq": _compare("eq", True),
    "ne": _compare("ne", False),
    "lt": _compare("lt", False),
    "le": _compare("le", True),
    "gt": _compare("gt", False),
    "ge": _compare("ge", True),
}
