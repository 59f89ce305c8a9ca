"""Every operation as the Triton emitter writes it, against torch by way of the reference
backend."""

from __future__ import annotations

import pytest
import torch

import attnloom

UNARY = {
    "exp": lambda s: torch.exp(s * 0.5),
    "exp2": torch.exp2,
    "expm1": lambda s: torch.expm1(s * 0.1),
    "log": lambda s: torch.log(s.abs() + 0.1),
    "log2": lambda s: torch.log2(s.abs() + 0.1),
    "log1p": lambda s: torch.log1p(s.abs() * 0.01),
    "sqrt": lambda s: torch.sqrt(s.abs()),
    "rsqrt": lambda s: torch.rsqrt(s.abs() + 0.5),
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": lambda s: torch.tan(s * 0.1),
    "asin": lambda s: torch.asin(torch.tanh(s) * 0.9),
    "acos": lambda s: torch.acos(torch.tanh(s) * 0.9),
    "atan": torch.atan,
    "sinh": lambda s: torch.sinh(s * 0.5),
    "cosh": lambda s: torch.cosh(s * 0.5),
    "tanh": torch.tanh,
    "asinh": torch.asinh,
    "acosh": lambda s: torch.acosh(s.abs() + 1.5),
    "atanh": lambda s: torch.atanh(torch.tanh(s) * 0.9),
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "sign": torch.sign,
    "reciprocal": lambda s: torch.reciprocal(s.abs() + 1),
    "relu": torch.relu,
    "isnan": lambda s: torch.where(torch.isnan(s), 1.0, s),
    "isinf": lambda s: torch.where(torch.isinf(s), 1.0, s),
    "isfinite": lambda s: torch.where(torch.isfinite(s), s, 0.0),
}
BINARY = {
    "atan2": lambda s, q, k: torch.atan2(s, s + 1.5),
    "pow": lambda s, q, k: torch.pow(s.abs() + 0.1, 1.7),
    "copysign": lambda s, q, k: torch.copysign(s, q - k - 0.5),
    "float mod": lambda s, q, k: s % 0.75,
    "float fmod": lambda s, q, k: torch.fmod(s, 0.75),
    "float floordiv": lambda s, q, k: s // 0.75,
    "minimum": lambda s, q, k: torch.minimum(s, s * 0.5 + 0.1),
    "maximum": lambda s, q, k: torch.maximum(s, s * 0.5 + 0.1),
    "floordiv": lambda s, q, k: s + ((q - k) // 3) * 0.25,
    "truncdiv": lambda s, q, k: s + torch.div(q - k, 3, rounding_mode="trunc") * 0.25,
    "mod": lambda s, q, k: s + ((q - k) % 3) * 0.25,
    "mod of a negative": lambda s, q, k: s + ((q - k) % -3) * 0.25,
    "fmod": lambda s, q, k: s + torch.fmod(q - k, 3) * 0.25,
    "integer pow": lambda s, q, k: s + ((q % 3) ** 2) * 0.25,
    "shifts": lambda s, q, k: s + ((q << 1) - (k >> 1)) * 0.125,
    "bits": lambda s, q, k: s + ((q & 5) | (k ^ 3)) * 0.125,
    "not": lambda s, q, k: torch.where(~(q >= k), s, s * 2),
    "logic": lambda s, q, k: torch.where(((q > 3) & (k < 9)) | (q == k), s, -s),
    "integer extrema": lambda s, q, k: s + torch.minimum(torch.maximum(q, k), q + 2) * 0.125,
    "cast": lambda s, q, k: s + s.to(torch.int32) * 0.5 + (q - k).to(torch.uint8) * 0.001,
}


def same_as_reference(score_mod, dtype=torch.float32, **options) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=draw).to(dtype) for n in (12, 20, 20))
    mine, expected = (
        attnloom.flex_attention(q, k, v, score_mod, kernel_options={"backend": backend, **extra})
        for backend, extra in (("triton", options), ("reference", {}))
    )
    tolerance = 2e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(mine, expected.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    function = UNARY[name]
    same_as_reference(lambda score, b, h, q_idx, kv_idx: function(score))


@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str) -> None:
    function = BINARY[name]
    same_as_reference(lambda score, b, h, q_idx, kv_idx: function(score, q_idx, kv_idx))


@pytest.mark.parametrize(
    "name", ["exp", "expm1", "log1p", "sinh", "tanh", "sigmoid", "erf", "sqrt"]
)
def test_exact_and_double(name: str) -> None:
    function = UNARY[name]
    same_as_reference(lambda score, b, h, q_idx, kv_idx: function(score), exact_math=True)
    same_as_reference(lambda score, b, h, q_idx, kv_idx: function(score), torch.float64)


def test_positions_past_32_bits() -> None:
    """What is computed from positions goes to 64 bits where 32 do not hold it."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + ((q_idx * 3_000_000_000 + kv_idx) % 7) * 0.125

    same_as_reference(score_mod)


def test_numbers_are_arguments() -> None:
    """Another value of a number, also one past 32 bits, needs no other kernel."""
    for number in (3, -3, 5_000_000_000):
        same_as_reference(
            lambda score, b, h, q_idx, kv_idx, n=number: score + ((q_idx - kv_idx) % n % 11) * 0.1
        )


def test_empty_capture() -> None:
    """No lane is live where a captured tensor without elements is read."""
    table = torch.zeros(0)
    q = torch.randn(1, 1, 5, 16)
    mask = attnloom.create_block_mask(lambda b, h, q, k: (q < 0) & (table[q] > 0), 1, 1, 5, 5)
    out = attnloom.flex_attention(q, q, q, block_mask=mask, kernel_options={"backend": "triton"})
    assert torch.equal(out, torch.zeros_like(out))
