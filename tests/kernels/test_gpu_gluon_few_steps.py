"""Two and three consumers at D=64 (gluon/few_steps.py), on a Hopper GPU against the oracle;
`pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import attnloom
from tests.harness.agree import agrees, qkv
from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with
from tests.kernels.hopper import ON_HOPPER

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=1000, KV_LEN=1000, D=64, Dv=64)

pytestmark = ON_HOPPER


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """What launches are remembered as, of this test alone."""
    from attnloom.backends.gluon import launch_forward

    ready: dict[Any, Any] = {}
    monkeypatch.setattr(launch_forward, "_ready", ready)
    yield ready


def consumers(ready: dict[Any, Any]) -> set[int]:
    return {found.form.consumers for found in ready.values()}


def check(case: Case, ready: dict[Any, Any], wanted: int) -> None:
    case = replace(case, block_size=128)
    check_attention(case, attnloom_with("cuda", backend="gluon"), backward=False)
    assert consumers(ready) == {wanted}


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("mod", ["causal", "sliding_window"])
def test_few_steps(mod: str, dtype: torch.dtype, chosen: dict[Any, Any]) -> None:
    check(Case(mod, SIZES, dtype), chosen, 2)


def test_without_a_mask(chosen: dict[Any, Any]) -> None:
    for Q_LEN, KV_LEN in ((128, 500), (250, 300), (500, 129), (1000, 63)):
        check(Case("plain", replace(SIZES, Q_LEN=Q_LEN, KV_LEN=KV_LEN), BF16), chosen, 2)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("mod", ["causal", "plain", "every_second_row"])
def test_many_steps(mod: str, dtype: torch.dtype, chosen: dict[Any, Any]) -> None:
    """Three consumers, over rows of blocks that a tile has in parts."""
    check(Case(mod, replace(SIZES, Q_LEN=2000, KV_LEN=2000), dtype), chosen, 3)


def test_narrower_heads_and_groups(chosen: dict[Any, Any]) -> None:
    for D, Dv, Hq, Hkv in ((40, 64, 4, 4), (64, 32, 8, 1), (48, 48, 6, 2)):
        check(Case("causal", replace(SIZES, D=D, Dv=Dv, Hq=Hq, Hkv=Hkv), BF16), chosen, 2)


def test_many_tiles_and_repeated_calls(chosen: dict[Any, Any]) -> None:
    """Programs draw several tiles each, and every launch leaves the counter at zero."""
    sizes = replace(SIZES, B=4, Hq=16, Hkv=4, Q_LEN=600, KV_LEN=600)
    for seed in range(3):
        check(Case("causal", sizes, BF16, seed=seed), chosen, 2)


def test_gradients(chosen: dict[Any, Any]) -> None:
    """The backward reads the row sums that two consumers left."""

    def causal(b, h, q, kv):
        return q >= kv

    with torch.device("cuda"):
        q, k, v = qkv(2, 4, 1000, 64, dtype=BF16)
        made = attnloom.create_block_mask(causal, None, None, 1000, 1000, "cuda")
        agrees(q, k, v, None, causal, block_mask=made, kernel_options={"backend": "gluon"})
    assert consumers(chosen) == {2}
