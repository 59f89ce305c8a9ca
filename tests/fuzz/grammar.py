"""What random mods are made of: captured tensors, numbers, and typed text templates.

A template is Python text with a place for each operand. Types of values:

    F  a float    I  an integer    B  a bool    every one of them depends on something traced

Float templates stay finite and differentiable almost everywhere, so that gradients can be compared
without exceptions; WILD ones may be NaN or infinite, and enter masks only. Where a float decides
something (a comparison, a rounding), odd constants keep results off the edge on which a rounding
would fall either way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.harness.draw import Draw, Sizes


@dataclass(frozen=True)
class Capture:
    """A captured tensor. draw: (sizes, draw) -> tensor; learnable ones get a gradient."""

    draw: Callable[[Sizes, Draw], torch.Tensor]
    learnable: bool = False


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """Equal values, the last dimension not contiguous."""
    return x.t().contiguous().t()


CAPTURES: dict[str, Capture] = {
    "gain": Capture(lambda s, d: d.normal(), True),
    "slope": Capture(lambda s, d: d.normal(s.Hq), True),
    "bias_q": Capture(lambda s, d: d.normal(s.Q_LEN), True),
    "bias_k": Capture(lambda s, d: d.normal(2 * s.KV_LEN)[::2], True),
    "rel": Capture(lambda s, d: d.normal(7), True),
    "pair": Capture(lambda s, d: _transposed(d.normal(s.Hq, 9)), True),
    "full": Capture(lambda s, d: d.normal(s.Q_LEN, s.KV_LEN), True),
    "dense": Capture(lambda s, d: d.normal(s.B, s.Hq, s.Q_LEN, s.KV_LEN), True),
    "rows": Capture(lambda s, d: d.normal(s.Hq, 5), True),
    "feats_q": Capture(lambda s, d: d.normal(s.Q_LEN, 4), True),
    "feats_k": Capture(lambda s, d: d.normal(s.KV_LEN, 4), True),
    "half": Capture(lambda s, d: d.normal(s.KV_LEN, dtype=torch.float16)),
    "frozen": Capture(lambda s, d: d.normal(s.B, 3)),
    "doc": Capture(lambda s, d: torch.stack([d.documents(s.reach, 4) for _ in range(s.B)]).long()),
    "ids": Capture(lambda s, d: d.integers(-5, 6, s.KV_LEN, dtype=torch.int32)),
    "codes": Capture(lambda s, d: d.integers(-3, 20, s.B, 3)),
    "small": Capture(lambda s, d: d.integers(-120, 120, 6, dtype=torch.int8)),
    "flags": Capture(lambda s, d: d.flags(0.6, s.Q_LEN)),
    "grid": Capture(lambda s, d: d.flags(0.6, 4, 6)),
}
# Numbers that a mod closes over, by name; a second binding of the mod gets the second value.
NUMBERS: dict[str, tuple[int | float, int | float]] = {
    "window": (11, 5),
    "stride": (3, 4),
    "cap": (2.5, 1.75),
    "shift": (-0.625, 0.3125),
}

_UNARY = "sin cos tanh sigmoid erf erfc atan asinh abs neg sign floor ceil round trunc".split()
_FUNCTIONAL = "relu silu gelu softplus elu leaky_relu softsign logsigmoid hardtanh relu6 mish"

# (template, types of its operands)
Template = tuple[str, str]
LEAVES: dict[str, tuple[str, ...]] = {
    "F": (
        "slope[h]",
        "bias_q[q_idx]",
        "bias_k[kv_idx]",
        "full[q_idx, kv_idx]",
        "dense[b, h, q_idx, kv_idx]",
        "dense[b][h][q_idx, kv_idx]",
        "(half[kv_idx] * slope[h])",
        "frozen[b, 1]",
        "rows[h, 2]",
        "rows[h].amax()",
        "rows[h].mean()",
        "(feats_q[q_idx] * feats_k[kv_idx]).sum()",
        "(feats_q[q_idx] @ feats_k[kv_idx])",
        "((q_idx - kv_idx) * 0.125)",
        "(gain * slope[h])",
        "(torch.exp(gain * 0.5) * bias_k[kv_idx])",
    ),
    "I": (
        "q_idx",
        "kv_idx",
        "h",
        "b",
        "(q_idx - kv_idx)",
        "doc[b, q_idx]",
        "doc[b, kv_idx]",
        "ids[kv_idx]",
        "codes[b].amin()",
        "codes[b, 1]",
    ),
    "B": (
        "(q_idx >= kv_idx)",
        "(doc[b, q_idx] == doc[b, kv_idx])",
        "(q_idx - kv_idx < window)",
        "flags[q_idx]",
        "(ids[kv_idx] > 0)",
        "grid[h, kv_idx]",
    ),
}
SCORE_LEAVES = ("score", "score", "(score * gain)", "(score - shift)")

TEMPLATES: dict[str, tuple[Template, ...]] = {
    "F": (
        ("({0} + {1})", "FF"),
        ("({0} - {1})", "FF"),
        ("({0} * {1})", "FF"),
        ("({0} / ({1}.abs() + 0.5))", "FF"),
        ("({0} * cap)", "F"),
        ("({0} + shift)", "F"),
        ("(1.0 - {0})", "F"),
        ("(1.5 / ({0} ** 2 + 0.75))", "F"),
        ("torch.where({2}, {0}, {1})", "FFB"),
        ("torch.where({1}, {0}, 0.25)", "FB"),
        ("{0}.masked_fill({1}, -0.5)", "FB"),
        ("torch.maximum({0}, {1})", "FF"),
        ("torch.minimum({0}, {1})", "FF"),
        ("rel[{0}]", "I"),
        ("pair[h, {0}]", "I"),
        ("({0} * 0.0625)", "I"),
        ("({0}.float() * 0.5 - slope[h])", "B"),
        ("(({0} % 7).float() * slope[h])", "I"),
        *((f"torch.{name}({{0}})", "F") for name in _UNARY),
        *((f"F.{name}({{0}})", "F") for name in _FUNCTIONAL.split()),
        ("F.gelu({0}, approximate='tanh')", "F"),
        ("torch.exp(torch.tanh({0}))", "F"),
        ("torch.exp2(torch.sin({0}))", "F"),
        ("torch.expm1(torch.cos({0}))", "F"),
        ("torch.log({0}.abs() + 0.25)", "F"),
        ("torch.log2({0}.abs() + 0.25)", "F"),
        ("torch.log10({0}.abs() + 0.25)", "F"),
        ("torch.log1p({0}.abs())", "F"),
        ("torch.sqrt({0}.abs() + 0.25)", "F"),
        ("torch.rsqrt({0}.abs() + 0.25)", "F"),
        ("torch.reciprocal({0}.abs() + 0.5)", "F"),
        ("torch.square({0})", "F"),
        ("torch.asin(0.9 * torch.sin({0}))", "F"),
        ("torch.acos(0.9 * torch.tanh({0}))", "F"),
        ("torch.atanh(0.9 * torch.sin({0}))", "F"),
        ("torch.acosh({0}.abs() + 1.25)", "F"),
        ("torch.tan(torch.sin({0}))", "F"),
        ("torch.sinh(torch.tanh({0}))", "F"),
        ("torch.cosh(torch.tanh({0}))", "F"),
        ("torch.atan2({0}, {1}.abs() + 0.25)", "FF"),
        ("torch.hypot({0}, {1}.abs() + 0.5)", "FF"),
        ("torch.logaddexp({0}, {1})", "FF"),
        ("torch.copysign({0}, {1} + 0.0371)", "FF"),
        ("torch.lerp({0} * gain, {1} + gain, torch.sigmoid({2} - gain))", "FFF"),
        ("torch.addcmul({0}, {1}, {2}, value=0.5)", "FFF"),
        ("torch.clamp({0}, -1.2, 1.7)", "F"),
        ("torch.clamp({0}, min=-0.3)", "F"),
        ("({0} % 1.37)", "F"),
        ("torch.fmod({0}, 2.71)", "F"),
        ("torch.div({0}, 0.77, rounding_mode='trunc')", "F"),
        ("torch.frac({0})", "F"),
        ("({0} ** 3)", "F"),
        ("(({0}.abs() + 0.5) ** 0.7)", "F"),
        ("(({0}.abs() + 0.5) ** torch.tanh({1}))", "FF"),
        ("torch.nan_to_num({0})", "F"),
        ("(rows[h] * {0}).sum()", "F"),
        ("(rows[h] - {0}).abs().amin()", "F"),
        ("torch.tanh(rows[h] + {0}).prod()", "F"),
        ("(torch.sigmoid({0}) * feats_k[kv_idx]).sum()", "F"),
    ),
    "I": (
        ("({0} + {1})", "II"),
        ("({0} - {1})", "II"),
        ("({0} * 3)", "I"),
        ("({0} + window)", "I"),
        ("({0} // stride)", "I"),
        ("({0} % stride)", "I"),
        ("({0} // 8)", "I"),
        ("({0} % 8)", "I"),
        ("({0} // -3)", "I"),
        ("({0} // ({1}.abs() + 1))", "II"),
        ("torch.fmod({0}, 5)", "I"),
        ("torch.div({0}, 3, rounding_mode='trunc')", "I"),
        ("(-{0})", "I"),
        ("{0}.abs()", "I"),
        ("torch.sign({0})", "I"),
        ("torch.maximum({0}, {1})", "II"),
        ("torch.minimum({0}, {1})", "II"),
        ("torch.clamp({0}, -4, 19)", "I"),
        ("torch.where({2}, {0}, {1})", "IIB"),
        ("({0} & 5)", "I"),
        ("({0} | 2)", "I"),
        ("({0} ^ {1})", "II"),
        ("(~{0})", "I"),
        ("({0} >> 1)", "I"),
        ("({0} << 2)", "I"),
        ("({0} * {1})", "II"),
        ("({0} ** 2)", "I"),
        ("{0}.long()", "B"),
        ("{0}.int()", "I"),
        ("torch.floor(torch.clamp({0}, -30.1, 30.1) + 0.0371).long()", "F"),
        ("torch.round(torch.tanh({0}) * 7.3).int()", "F"),
        ("doc[b, {0}]", "I"),
        ("small[{0}].long()", "I"),
        ("(codes[b] * {0}).sum()", "I"),
        ("({0}.long() * 70000)", "I"),
        ("({0}.long() * 5000000000)", "I"),
    ),
    "B": (
        ("({0} >= {1})", "II"),
        ("({0} == {1})", "II"),
        ("({0} != {1})", "II"),
        ("({0} < window)", "I"),
        ("(({0} - {1}).abs() <= stride)", "II"),
        ("({0} & {1})", "BB"),
        ("({0} | {1})", "BB"),
        ("({0} ^ {1})", "BB"),
        ("(~{0})", "B"),
        ("({0} == {1})", "BB"),
        ("torch.logical_and({0}, {1})", "BB"),
        ("torch.logical_not({0})", "B"),
        ("({0} > {1} + 0.0371)", "FF"),
        ("({0} <= 0.0371)", "F"),
        ("({0} // 0.83 > 1.5)", "F"),
        ("torch.where({0}, {1}, {2})", "BBB"),
        ("grid[{0}, {1}]", "II"),
        ("({0} % 2 == 0)", "I"),
        ("(codes[b] == {0}).any()", "I"),
        ("(rows[h] > {0} - 0.371).all()", "F"),
        ("torch.isfinite({0})", "F"),
        ("{0}.bool()", "I"),
    ),
}
# What a score_mod makes of its last float, {0}: moderate, or hidden where a condition {1} is false.
RESULTS = (
    "{0}",
    "score + torch.tanh({0})",
    "3 * torch.sin({0})",
    "torch.where({1}, score + torch.tanh({0}), -float('inf'))",
    "score.masked_fill(~{1}, float('-inf')) + torch.tanh({0})",
)
WILD: tuple[Template, ...] = (
    ("(torch.log({0}) > -0.371)", "F"),
    ("(torch.sqrt({0}) < 1.0371)", "F"),
    ("torch.isnan(torch.asin({0}))", "F"),
    ("torch.isinf(torch.exp({0} * 50.0))", "F"),
    ("(torch.acosh({0}) <= 0.371)", "F"),
    ("(1.0 / (q_idx - kv_idx) > {0})", "F"),
    ("((q_idx - kv_idx) * float('inf') >= {0})", "F"),
)
# Each asks for the truth of a traced value, so that the mod runs once for each answer.
FORKS: dict[str, tuple[Template, ...]] = {
    "F": (
        ("({0} if {2} else {1})", "FFB"),
        ("max({0}, {1})", "FF"),
        ("min({0}, {1})", "FF"),
    ),
    "I": (
        ("({0} if {2} else {1})", "IIB"),
        ("max({0}, {1})", "II"),
    ),
    "B": (
        ("({0} and {1})", "BB"),
        ("({0} or {1})", "BB"),
        ("({0} if {2} else {1})", "BBB"),
    ),
}
