"""Derivative rules, one an operation, by torch's conventions at kinks.

A rule is given the operation's operands and its result as nodes of a gradient program, and the
adjoint of the result; it returns the adjoint of each operand, None where there is none. Nodes that
turn out unused are dropped later, so a rule computes all adjoints at once.

    min, max    at a tie each operand takes half
    abs, sign   0 at 0
    rounding, comparisons, integers     no derivative
    mod, fmod   b's derivative is minus the quotient, rounded as the operation rounds it
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnloom.ir.builder import Builder

LN_2 = math.log(2.0)
TWO_OVER_SQRT_PI = 2.0 / math.sqrt(math.pi)

Adjoints = tuple[int | None, ...]


class Adjoint:
    """One application of a rule: operands `args`, result `out`, its adjoint `grad`."""

    def __init__(self, build: Builder, args: tuple[int, ...], out: int, grad: int) -> None:
        self.build, self.args, self.out, self.grad = build, args, out, grad
        self.dtype = build.dtype(out)

    def __call__(self, op: str, *args: int | float) -> int:
        """A node; floats among the operands become constants of the result's type."""
        return self.build.node(op, *(self._node(a) for a in args))

    def _node(self, value: int | float) -> int:
        return self.build.const(value, self.dtype) if isinstance(value, float) else value


Rule = Callable[[Adjoint], Adjoints]


def none(_: Adjoint) -> Adjoints:
    """Constant almost everywhere, or no float result."""
    return (None, None, None)


def chain(factor: Callable[[Adjoint, int], int]) -> Rule:
    """Unary: adjoint of x is grad * factor(x)."""
    return lambda d: (d("mul", d.grad, factor(d, d.args[0])),)


def over(divisor: Callable[[Adjoint, int], int]) -> Rule:
    """Unary: adjoint of x is grad / divisor(x)."""
    return lambda d: (d("div", d.grad, divisor(d, d.args[0])),)


def add(d: Adjoint) -> Adjoints:
    return d.grad, d.grad


def sub(d: Adjoint) -> Adjoints:
    return d.grad, d("neg", d.grad)


def mul(d: Adjoint) -> Adjoints:
    a, b = d.args
    return d("mul", d.grad, b), d("mul", d.grad, a)


def div(d: Adjoint) -> Adjoints:
    a, b = d.args
    return d("div", d.grad, b), d("neg", d("mul", d.grad, d("div", d("div", a, b), b)))


def remainder(quotient: str) -> Rule:
    """a - b * quotient(a, b), the quotient held constant."""

    def rule(d: Adjoint) -> Adjoints:
        return d.grad, d("neg", d("mul", d.grad, d(quotient, *d.args)))

    return rule


def power(d: Adjoint) -> Adjoints:
    base, exponent = d.args
    slope = d("mul", d.grad, d("mul", exponent, d("pow", base, d("sub", exponent, 1.0))))
    d_base = d("where", d("eq", exponent, 0.0), 0.0, slope)
    flat = d("and", d("eq", base, 0.0), d("ge", exponent, 0.0))
    growth = d("mul", d.grad, d("mul", d.out, d("log", base)))
    return d_base, d("where", flat, 0.0, growth)


def extremum(loses: str) -> Rule:
    """min or max: an operand has no adjoint where it `loses` against the other, half at a tie."""

    def rule(d: Adjoint) -> Adjoints:
        a, b = d.args
        shared = d("where", d("eq", a, b), d("mul", d.grad, 0.5), d.grad)
        return d("where", d(loses, a, b), 0.0, shared), d("where", d(loses, b, a), 0.0, shared)

    return rule


def where(d: Adjoint) -> Adjoints:
    condition = d.args[0]
    return None, d("where", condition, d.grad, 0.0), d("where", condition, 0.0, d.grad)


def cast(d: Adjoint) -> Adjoints:
    source = d.build.dtype(d.args[0])
    return (d.build.cast(d.grad, source) if source.is_float else None,)


def atan2(d: Adjoint) -> Adjoints:
    a, b = d.args
    scaled = d("div", d.grad, d("add", d("mul", a, a), d("mul", b, b)))
    return d("mul", scaled, b), d("neg", d("mul", scaled, a))


def copysign(d: Adjoint) -> Adjoints:
    a, _ = d.args
    ratio = d("where", d("eq", a, 0.0), 0.0, d("div", d.out, a))
    return d("mul", d.grad, ratio), None


def _square_plus(d: Adjoint, x: int, constant: float) -> int:
    return d("add", d("mul", x, x), constant)


def _one_minus_square(d: Adjoint, x: int) -> int:
    return d("sub", 1.0, d("mul", x, x))


def _gaussian(d: Adjoint, x: int, sign: float) -> int:
    return d("mul", sign * TWO_OVER_SQRT_PI, d("exp", d("neg", d("mul", x, x))))


def negate(d: Adjoint) -> Adjoints:
    return (d("neg", d.grad),)


absolute = chain(lambda d, x: d("sign", x))
exp = chain(lambda d, _: d.out)
exp2 = chain(lambda d, _: d("mul", d.out, LN_2))
expm1 = chain(lambda d, _: d("add", d.out, 1.0))
log = over(lambda _, x: x)
log2 = over(lambda d, x: d("mul", x, LN_2))
log1p = over(lambda d, x: d("add", x, 1.0))
sqrt = over(lambda d, _: d("mul", d.out, 2.0))
rsqrt = chain(lambda d, _: d("mul", -0.5, d("mul", d.out, d("mul", d.out, d.out))))
sin = chain(lambda d, x: d("cos", x))
cos = chain(lambda d, x: d("neg", d("sin", x)))
tan = chain(lambda d, _: _square_plus(d, d.out, 1.0))
asin = chain(lambda d, x: d("rsqrt", _one_minus_square(d, x)))
acos = chain(lambda d, x: d("neg", d("rsqrt", _one_minus_square(d, x))))
atan = over(lambda d, x: _square_plus(d, x, 1.0))
sinh = chain(lambda d, x: d("cosh", x))
cosh = chain(lambda d, x: d("sinh", x))
tanh = chain(lambda d, _: _one_minus_square(d, d.out))
asinh = chain(lambda d, x: d("rsqrt", _square_plus(d, x, 1.0)))
acosh = chain(lambda d, x: d("rsqrt", _square_plus(d, x, -1.0)))
atanh = over(_one_minus_square)
sigmoid = chain(lambda d, _: d("mul", d.out, d("sub", 1.0, d.out)))
erf = chain(lambda d, x: _gaussian(d, x, 1.0))
erfc = chain(lambda d, x: _gaussian(d, x, -1.0))
reciprocal = chain(lambda d, _: d("neg", d("mul", d.out, d.out)))
