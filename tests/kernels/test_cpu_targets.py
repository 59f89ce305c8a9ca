"""The CPU kernels compiled for other instruction sets than this machine's, and their building
blocks: vector widths 16, 8, 4 and 2, with and without fused multiply-add and bfloat16 pairs."""

from __future__ import annotations

import ctypes
import functools
import math
import platform
from collections.abc import Iterator

import pytest
import torch

from attnloom.backends.cpu import build, launch
from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TARGETS = {
    "native": None,  # with matrix tiles, where the CPU has them and the system allows them
    "vectors": ("-march=native",),
    "avx2": ("-mavx2", "-mfma"),
    "sse2": (),
}
on_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="flags are those of x86"
)


@pytest.fixture
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Kernels are compiled for TARGETS[request.param] and forgotten afterwards."""
    spec = functools.partial(build.KernelSpec, target=TARGETS[request.param])
    monkeypatch.setattr(build, "KernelSpec", spec)
    monkeypatch.setattr(launch, "_kernels", {})
    return request.param


@on_x86
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype"),
    [  # vectors of 8, 4 and 2 lanes; the rest differ by no more than the loads
        ("avx2", FP32),
        ("avx2", BF16),
        ("sse2", FP64),
        ("sse2", FP16),
        pytest.param("avx2", FP64, marks=pytest.mark.long),
        pytest.param("avx2", FP16, marks=pytest.mark.long),
        pytest.param("sse2", FP32, marks=pytest.mark.long),
        pytest.param("sse2", BF16, marks=pytest.mark.long),
    ],
    indirect=["target"],
    ids=str,
)
@pytest.mark.parametrize(("mod", "Q_LEN"), [("causal", 63), ("relative_bias", 70), ("causal", 9)])
@pytest.mark.usefixtures("target")
def test_narrow_vectors(mod: str, Q_LEN: int, dtype: torch.dtype) -> None:
    sizes = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=Q_LEN, KV_LEN=150, D=31, Dv=40)
    check_attention(Case(mod, sizes, dtype, block_size=16), attnloom_with(backend="cpu"))


def uses_matrix_tiles() -> bool:
    """Whether kernels of this machine multiply bfloat16 on matrix tiles."""
    text = '#define BF16_INPUTS 1\n#include "args.h"\nextern "C" int tiles() {{ return {}; }}\n'
    return bool(build.load_source(text.format("BF16_AMX")).tiles())


# Depths, widths and blocks that are no whole tiles of 16 and strips of 32.
RAGGED = {
    "causal": Sizes(B=2, Hq=4, Hkv=2, Q_LEN=70, KV_LEN=150, D=31, Dv=40),
    "window_with_sinks": Sizes(B=1, Hq=2, Hkv=2, Q_LEN=300, KV_LEN=300, D=96, Dv=16),
    "relative_bias": Sizes(B=1, Hq=4, Hkv=1, Q_LEN=129, KV_LEN=33, D=8, Dv=80),
    "dilated_by_head": Sizes(B=1, Hq=4, Hkv=4, Q_LEN=40, KV_LEN=270, D=130, Dv=48),
    "plain": Sizes(B=2, Hq=8, Hkv=2, Q_LEN=4, KV_LEN=90, D=72, Dv=24),  # decode, 16 rows
}


@on_x86
@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, (128, 32)], ids=str)
@pytest.mark.parametrize("mod", RAGGED)
@pytest.mark.parametrize("target", ["native", "vectors"], indirect=True)
def test_pairs_of_bfloat16(target: str, mod: str, block_size: int | tuple[int, int]) -> None:
    if target == "native" and not uses_matrix_tiles():
        pytest.skip("no matrix tiles here (AMX): the same kernels as for vectors")
    case = Case(mod, RAGGED[mod], BF16, block_size=block_size)
    check_attention(case, attnloom_with(backend="cpu"))


DRIVER = """
#define REAL_IS_DOUBLE {double}
#define HAS_SCORE 0
#include "softmax.h"
extern "C" void exponentials(const real* x, real* out, i64 count) {{
    for (i64 i = 0; i < count; i += W) vf_store(out + i, softmax_exp(vf_load(x + i)));
}}
extern "C" void sums(const real* x, real* out) {{
    vf v = vf_load(x);
    out[0] = W, out[1] = vf_hsum(v), out[2] = vf_hmax(v), out[3] = vf_hmin(v);
}}
extern "C" void halves(const float* x, u16* half, u16* brain, i64 count) {{
    for (i64 i = 0; i < count; i += W) {{
        store_as(half + i, f16_from_f32(load_as<v_f32>(x + i)));
        store_as(brain + i, bf16_from_f32(load_as<v_f32>(x + i)));
    }}
}}
extern "C" void widen(const u16* x, float* half, float* brain, i64 count) {{
    for (i64 i = 0; i < count; i += W) {{
        store_as(half + i, f32_from_f16(load_as<v_u16>(x + i)));
        store_as(brain + i, f32_from_bf16(load_as<v_u16>(x + i)));
    }}
}}
"""
targets = pytest.mark.parametrize(
    "flags",
    [TARGETS["native"], *(pytest.param(TARGETS[t], marks=on_x86) for t in ("avx2", "sse2"))],
)


def driver(dtype: torch.dtype, flags: tuple[str, ...] | None) -> ctypes.CDLL:
    return build.load_source(DRIVER.format(double=int(dtype is FP64)), flags)


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@targets
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_exponentials_are_as_good_as_their_rounded_argument(
    dtype: torch.dtype, flags: tuple[str, ...] | None
) -> None:
    smallest, largest = (-87, 88) if dtype is FP32 else (-708, 709)
    x = torch.linspace(smallest, largest, 1 << 16, dtype=dtype)
    out = torch.full_like(x, torch.nan)
    driver(dtype, flags).exponentials(pointer(x), pointer(out), ctypes.c_int64(x.numel()))
    exact = torch.exp(x.double())
    # Half a unit of x is |x| eps / 2 of e^x; log2(e) costs as much. Near zero two units remain.
    units = ((out.double() - exact) / exact).abs() / torch.finfo(dtype).eps
    assert (units - x.double().abs()).max() < 2


@targets
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_exponentials_at_the_edges(dtype: torch.dtype, flags: tuple[str, ...] | None) -> None:
    lowest = torch.finfo(dtype).min
    edges = [0.0, -torch.inf, lowest, torch.nan, -1e5, 1.0, -1.0, 20.0]
    x = torch.tensor(edges * 8, dtype=dtype)
    out = torch.full_like(x, 7)
    driver(dtype, flags).exponentials(pointer(x), pointer(out), ctypes.c_int64(x.numel()))
    expected = torch.tensor(
        [1.0, 0, 0, torch.nan, 0, math.e, 1 / math.e, math.exp(20)] * 8, dtype=dtype
    )
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0, equal_nan=True)
    assert out[0] == 1  # an only key has weight one exactly


@targets
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_horizontal_reductions(dtype: torch.dtype, flags: tuple[str, ...] | None) -> None:
    x = torch.arange(16, dtype=dtype).sub(5).square().flip(0)
    out = torch.zeros(4, dtype=dtype)
    driver(dtype, flags).sums(pointer(x), pointer(out))
    lanes = x[: int(out[0])]
    assert out[1:].tolist() == [lanes.sum(), lanes.max(), lanes.min()]


@targets
def test_every_half_is_widened_exactly(flags: tuple[str, ...] | None) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    half, brain = torch.empty(1 << 16), torch.empty(1 << 16)
    driver(FP32, flags).widen(
        pointer(bits), pointer(half), pointer(brain), ctypes.c_int64(bits.numel())
    )
    for widened, dtype in ((half, FP16), (brain, BF16)):
        torch.testing.assert_close(
            widened, bits.view(dtype).float(), rtol=0, atol=0, equal_nan=True
        )


@targets
def test_halves_are_rounded_as_torch_rounds(flags: tuple[str, ...] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), generator=generator)
    common = torch.randn(1 << 16, generator=generator)
    x = torch.cat([any_bits.to(torch.int32).view(FP32), common, common * 1e-6, common * 65504])
    half, brain = (torch.empty(x.numel(), dtype=torch.int16) for _ in range(2))
    driver(FP32, flags).halves(pointer(x), pointer(half), pointer(brain), ctypes.c_int64(x.numel()))
    for rounded, dtype in ((half, FP16), (brain, BF16)):
        torch.testing.assert_close(rounded.view(dtype), x.to(dtype), rtol=0, atol=0, equal_nan=True)
