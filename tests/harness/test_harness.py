"""The harness must be seen to fail on planted bugs, and to pass an honest implementation."""

from __future__ import annotations

import pytest
import torch

from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import one_thread
from tests.harness.memory import peak_growth
from tests.harness.planted import Bugs, tiled

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = Sizes(B=1, Hq=4, Hkv=2, Q_LEN=50, KV_LEN=50, D=16, Dv=24)
ONE_QUERY = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=1, KV_LEN=130, D=128, Dv=128)
LONG = Sizes(B=1, Hq=2, Hkv=2, Q_LEN=64, KV_LEN=1000, D=16, Dv=16)

PLANTED = {
    "scale off by 1%": (Bugs(score_gain=1.01), "plain", SIZES, r"(out|lse|dq): "),
    "out off by 1%": (Bugs(out_gain=1.01), "plain", SIZES, r"out: .*gain"),
    "window off by one": (Bugs(key_shift=1), "sliding_window", SIZES, r"out: max error"),
    "causal off by one": (Bugs(key_shift=1), "causal", SIZES, r"out: "),
    "one tile skipped": (Bugs(skipped_tile=2), "plain", SIZES, r"out: max error"),
    "captured gradient halved": (Bugs(capture_gain=0.5), "head_slope", SIZES, r"d_slope: "),
    "captured gradient missing": (Bugs(capture_gain=0.0), "relative_bias", SIZES, r"d_bias: "),
    "captured gradient off by 5%": (Bugs(capture_gain=1.05), "full_bias", SIZES, r"d_bias: "),
    "key gradient off by 1%": (Bugs(key_gain=1.01), "plain", SIZES, r"dk: .*gain"),
    "key gradient of one query off by 1%": (Bugs(key_gain=1.01), "plain", ONE_QUERY, r"dk: "),
    "lse in base 2": (Bugs(lse_base_2=True), "plain", SIZES, r"lse: max error"),
}


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_caught(bug: str, dtype: torch.dtype) -> None:
    bugs, mod, sizes, complaint = PLANTED[bug]
    with pytest.raises(AssertionError, match=complaint):
        check_attention(Case(mod, sizes, dtype), tiled(bugs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_accumulator_is_caught(dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match="out: "):
        check_attention(Case("plain", LONG, dtype), tiled(Bugs(accumulator=torch.bfloat16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_unwritten_element_is_caught(dtype: torch.dtype) -> None:
    """An implementation that leaves the last row of its output buffer as it found it."""

    def implementation(problem):
        out, lse, max_scores = tiled(Bugs())(problem)
        buffer = torch.empty_like(out)
        buffer[:, :, :-1] = out[:, :, :-1]
        return buffer, lse, max_scores

    with pytest.raises(AssertionError, match="not as finite as the oracle"):
        check_attention(Case("plain", SIZES, dtype), implementation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "mod",
    ["plain", "sliding_window", "head_slope", "relative_bias", "temperature", "left_padding",
     "prefix_or", "document_relative_softcap", "nothing"],
)  # fmt: skip
def test_honest_implementation_passes(mod: str, dtype: torch.dtype) -> None:
    check_attention(Case(mod, SIZES, dtype), tiled(Bugs()))


@pytest.mark.parametrize("seed", range(10))
def test_one_rounding_of_whole_rows_was_taken_for_a_gain(seed: int) -> None:
    """The query sees one key: the gradients of 8 scores, rounded, are a gain of dk of 0.002."""
    check_attention(Case("mods.alibi", ONE_QUERY, torch.bfloat16, seed=seed), tiled(Bugs()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_honest_long_rows_pass(dtype: torch.dtype) -> None:
    check_attention(Case("plain", LONG, dtype), tiled(Bugs()))


def test_peak_growth_sees_what_is_freed_again() -> None:
    torch.ones(1 << 25)  # an earlier, higher peak must not hide the next one
    with peak_growth() as peak:
        torch.ones(1 << 24)
    assert 60 << 20 < peak.bytes < 100 << 20
