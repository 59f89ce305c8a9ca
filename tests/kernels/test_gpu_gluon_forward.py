"""The Gluon forward on a Hopper GPU against the oracle; `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnloom import AuxRequest, UnsupportedError, flex_attention
from tests.harness.agree import close
from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with
from tests.harness.mods import MODS
from tests.kernels.hopper import ON_HOPPER

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = (BF16, FP16)
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=300, KV_LEN=400, D=64, Dv=64)

pytestmark = ON_HOPPER


def check(case: Case, **options) -> None:
    case = replace(case, block_size=case.block_size if case.block_size != 32 else 128)
    check_attention(case, attnloom_with("cuda", backend="gluon", **options), backward=False)


# at D = 64 a tile has rows of several blocks of the mask, and its consumers take turns; at D = 128
# products overlap with exponentials
WIDE = ["plain", "causal", "relative_distance", "softcap", "document_unsorted_per_batch", "alibi"]
WIDE += ["key_padding", "bool_table_mask", "document_relative_softcap", "full_bias"]


@pytest.mark.parametrize("mod", sorted(MODS))
def test_every_mod(mod: str) -> None:
    check(Case(mod, SIZES, BF16))


@pytest.mark.parametrize("mod", WIDE)
def test_wider_heads(mod: str) -> None:
    dtype = FP16 if WIDE.index(mod) % 2 else BF16
    check(Case(mod, replace(SIZES, D=128, Dv=128), dtype))


@pytest.mark.parametrize("mod", ["relative_bias", "softcap", "document"])
def test_half(mod: str) -> None:
    check(Case(mod, SIZES, FP16))


HEAD_DIMS = [(8, 8), (16, 64), (72, 40), (96, 96), (128, 64), (64, 128), (192, 128), (64, 200)]
HEAD_DIMS += [(256, 256), (256, 64), (136, 256), (136, 192), (192, 144)]


@pytest.mark.parametrize(("D", "Dv"), HEAD_DIMS)
def test_head_dims(D: int, Dv: int) -> None:
    mod = "plain" if HEAD_DIMS.index((D, Dv)) % 2 else "causal_head_slope"
    check(Case(mod, replace(SIZES, D=D, Dv=Dv), FP16 if D % 16 else BF16))


@pytest.mark.parametrize(
    "mod", ["plain", "causal", "document", "softcap", "alibi", "every_second_row"]
)
def test_three_panels(mod: str) -> None:
    check(Case(mod, replace(SIZES, D=192, Dv=192), FP16 if mod == "plain" else BF16))


# p . v in one product of 96 or 192 columns, of which some are not there
AT_ONCE = [(80, 80), (96, 96), (72, 96), (136, 136), (160, 160), (192, 192), (144, 192)]
AT_ONCE_MODS = ["plain", "causal", "sliding_window", "every_second_row", "dilated_by_head"]
AT_ONCE_MODS += ["left_padding", "document", "window_with_sinks"]


@pytest.mark.parametrize("mod", AT_ONCE_MODS)
@pytest.mark.parametrize(("D", "Dv"), AT_ONCE)
def test_products_of_96_and_192_columns(D: int, Dv: int, mod: str) -> None:
    """Blocks of 64 keys and of 64 queries have forms, or lists, of their own."""
    sizes = replace(SIZES, Q_LEN=900, KV_LEN=1100, D=D, Dv=Dv)
    keys = 64 if D > 128 else 128  # of a block at least
    for dtype, block_size in ((BF16, 128), (FP16, 128), (BF16, (128, keys)), (BF16, (64, 128))):
        check(Case(mod, sizes, dtype, block_size=block_size))
        if mod == "plain":
            check(Case(mod, replace(sizes, KV_LEN=1024), dtype))


LENGTHS = [(1, 1), (1, 63), (63, 1), (64, 128), (129, 257), (17, 1000), (1000, 17), (1000, 1000)]
LENGTHS += [(192, 384), (193, 129), (384, 256)]


@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mod", ["plain", "sliding_window"])
def test_lengths(mod: str, D: int) -> None:
    """Two kernels, with and without a last tile of keys that overhangs; all lengths share them."""
    for Q_LEN, KV_LEN in LENGTHS:
        check(Case(mod, replace(SIZES, Q_LEN=Q_LEN, KV_LEN=KV_LEN, D=D, Dv=D), BF16))


def test_transposed_layout() -> None:
    check(Case("relative_bias", SIZES, BF16, layout="transposed"))


@pytest.mark.parametrize("block_size", [256, 1024, (64, 128), (512, 128)], ids=str)
@pytest.mark.parametrize("mod", ["window_with_sinks", "dilated_by_head"])
def test_block_sizes(mod: str, block_size: int | tuple[int, int]) -> None:
    check(Case(mod, replace(SIZES, Q_LEN=700, KV_LEN=900), BF16, block_size=block_size))


@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mod", ["left_padding", "nothing", "every_second_row"])
def test_rows_without_keys(mod: str, D: int) -> None:
    check(Case(mod, replace(SIZES, D=D, Dv=D), BF16))


def test_head_groups() -> None:
    for Hq, Hkv in ((1, 1), (3, 3), (8, 1), (6, 2), (12, 4)):
        check(Case("causal_head_slope", replace(SIZES, Hq=Hq, Hkv=Hkv), BF16))


def test_key_batch_of_one_is_broadcast() -> None:
    check(Case("causal", replace(SIZES, B=3), BF16, kv_batch=1))


@pytest.mark.parametrize("mod", ["causal", "softcap"])
def test_scale(mod: str) -> None:
    for scale in (0.0, 1.0, -0.3):
        check(Case(mod, SIZES, BF16, scale=scale))


@pytest.mark.parametrize("mod", ["causal", "relative_distance"])
def test_large_scores(mod: str) -> None:
    for dtype in DTYPES:
        check(Case(mod, SIZES, dtype, magnitude=30.0))


# 64 and 96: packed weights; 96 to 192: queries in registers; 192 and 256: the output is multiplied
# a step later
FORMS = [(64, 64), (80, 80), (96, 72), (72, 96), (128, 128), (160, 136), (144, 192), (192, 192)]
FORMS += [(256, 256)]


@pytest.mark.parametrize(("D", "Dv"), FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_grow_from_key_to_key(D: int, Dv: int, dtype: torch.dtype) -> None:
    """Maxima of rows that grow by less than a power of eight in most steps, and by more in some."""
    sizes = replace(SIZES, Q_LEN=500, KV_LEN=1000, D=D, Dv=Dv)
    for magnitude in (1.0, 5.0, 30.0):
        for mod in ("plain", "causal"):
            check(Case(mod, sizes, dtype, magnitude=magnitude))


@pytest.mark.parametrize(("D", "Dv"), FORMS)
def test_the_largest_score_of_a_row_is_exact(D: int, Dv: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, 700, n, generator=generator, device="cuda", dtype=BF16) * 3
        for n in (D, D, Dv)
    )
    options = {"backend": "gluon"}
    request = AuxRequest(lse=True, max_scores=True)
    out, aux = flex_attention(q, k, v, return_aux=request, kernel_options=options)
    plain, only = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), kernel_options=options)
    scores = q.double() @ k.double().mT * D**-0.5
    torch.testing.assert_close(aux.max_scores.double(), scores.amax(-1), rtol=1e-5, atol=1e-4)
    for lse in (aux.lse, only.lse):
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)
    wanted = scores.softmax(-1) @ v.double()
    close(out, wanted, BF16)
    close(plain, wanted, BF16)


@pytest.mark.parametrize("mod", ["softcap", "rbf_bias"])
def test_exact_math(mod: str) -> None:
    check(Case(mod, SIZES, BF16), exact_math=True)


def test_more_tiles_than_processors_and_repeated_calls() -> None:
    """Programs draw several tiles each, and every launch leaves the counter at zero."""
    sizes = replace(SIZES, B=4, Hq=16, Hkv=4, Q_LEN=700, KV_LEN=700)
    for seed in range(3):
        check(Case("causal", sizes, BF16, seed=seed))
        check(Case("document", replace(sizes, D=128, Dv=128), BF16, seed=seed))
        check(Case("plain", replace(sizes, Q_LEN=1500), BF16, seed=seed))
        for D in (96, 192, 256):
            check(Case("causal", replace(sizes, D=D, Dv=D), BF16, seed=seed))
        check(Case("causal", replace(sizes, D=128, Dv=128), BF16, seed=seed))


def test_launches_inside_a_cuda_graph() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, 700, 64, generator=generator, device="cuda", dtype=BF16) for _ in range(3)
    )
    want = flex_attention(q, k, v, kernel_options={"backend": "gluon"})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flex_attention(q, k, v, kernel_options={"backend": "gluon"})
    for _ in range(3):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)


def test_a_chosen_backend_refuses_what_tma_cannot_read() -> None:
    q, k, v = (torch.zeros(1, 2, 64, 67, device="cuda", dtype=BF16)[..., :64] for _ in range(3))
    with pytest.raises(UnsupportedError, match="TMA cannot read query"):
        flex_attention(q, k, v, kernel_options={"backend": "gluon"})
    assert flex_attention(q, k, v).shape == q.shape
