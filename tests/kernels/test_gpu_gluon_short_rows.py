"""Tiles of 64 for masks whose rows have few blocks (gluon/short_rows.py), on a Hopper GPU against
the oracle; `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import attnloom
from attnloom.backends.reference import reference_attention
from tests.harness.agree import agrees, close, qkv
from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with
from tests.kernels.hopper import ON_HOPPER

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=300, KV_LEN=400, D=128, Dv=128)

pytestmark = ON_HOPPER


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """What launches are remembered as, of this test alone; the device is the GPU."""
    from attnloom.backends.gluon import launch_forward

    ready: dict[Any, Any] = {}
    monkeypatch.setattr(launch_forward, "_ready", ready)
    before = torch.get_default_device()
    torch.set_default_device("cuda")
    yield ready
    torch.set_default_device(before)


def programs(ready: dict[Any, Any]) -> set[int]:
    return {found.form.programs for found in ready.values()}


def check(case: Case, ready: dict[Any, Any]) -> None:
    torch.set_default_device("cpu")
    case = replace(case, block_size=64)
    check_attention(case, attnloom_with("cuda", backend="gluon"), backward=False)
    assert programs(ready) == {2}


NARROW = replace(SIZES, D=64, Dv=64)


@pytest.mark.parametrize("sizes", [SIZES, NARROW], ids=["128", "64"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("mod", ["document", "document_unsorted_per_batch"])
def test_documents(mod: str, dtype: torch.dtype, sizes: Sizes, chosen: dict[Any, Any]) -> None:
    check(Case(mod, sizes, dtype), chosen)


LENGTHS = [(1, 1), (1, 63), (63, 1), (64, 128), (129, 257), (17, 700), (700, 17), (700, 700)]


@pytest.mark.parametrize("sizes", [SIZES, NARROW], ids=["128", "64"])
def test_lengths(sizes: Sizes, chosen: dict[Any, Any]) -> None:
    for Q_LEN, KV_LEN in LENGTHS:
        check(Case("document", replace(sizes, Q_LEN=Q_LEN, KV_LEN=KV_LEN), BF16), chosen)


@pytest.mark.parametrize(("D", "Dv"), [(96, 96), (128, 64), (64, 128), (72, 40), (16, 64), (48, 8)])
def test_narrower_heads(D: int, Dv: int, chosen: dict[Any, Any]) -> None:
    check(Case("document", replace(SIZES, D=D, Dv=Dv), FP16), chosen)


def test_head_groups(chosen: dict[Any, Any]) -> None:
    for Hq, Hkv in ((1, 1), (3, 3), (8, 1), (12, 4)):
        check(Case("document", replace(SIZES, Hq=Hq, Hkv=Hkv), BF16), chosen)
        check(Case("document", replace(NARROW, Hq=Hq, Hkv=Hkv), FP16), chosen)


def test_large_scores(chosen: dict[Any, Any]) -> None:
    check(Case("document_unsorted_per_batch", SIZES, FP16, magnitude=30.0), chosen)
    check(Case("document_unsorted_per_batch", NARROW, FP16, magnitude=30.0), chosen)


def test_many_tiles_and_repeated_calls(chosen: dict[Any, Any]) -> None:
    """Programs draw several tiles each, and every launch leaves the counter at zero."""
    sizes = replace(SIZES, B=4, Hq=16, Hkv=4, Q_LEN=700, KV_LEN=700)
    for seed in range(3):
        check(Case("document", sizes, BF16, seed=seed), chosen)
        check(Case("document", replace(sizes, D=64, Dv=64), BF16, seed=seed), chosen)


S = 1500
IDS = torch.arange(S, dtype=torch.int32) // 130
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.02])


def documents(b, h, q, kv):
    return (q >= kv) & (IDS[q] == IDS[kv])


def by_head(b, h, q, kv):
    return (IDS[q] == IDS[kv]) & ((q >= kv) | (h % 2 == 0))


def with_empty_rows(b, h, q, kv):
    """Whole blocks of queries, and single queries of others, see nothing."""
    return documents(b, h, q, kv) & (q % 3 != 1) & ((q < 400) | (q >= 900))


def near(b, h, q, kv):
    return (q >= kv) & (q - kv < 256)


def softcap(score, b, h, q, kv):
    return 3 * torch.tanh(score / 3)


def alibi(score, b, h, q, kv):
    return score - SLOPES[h] * (q - kv)


def check_given(
    D: int, mask: Any, block: int, ready: dict[Any, Any], monkeypatch: Any, score: Any = None
) -> None:
    """Blocks of 128 become smaller in the forward; gradients are of the given ones, and of blocks
    of 64 the portable kernels'."""
    for name in ("IDS", "SLOPES"):
        monkeypatch.setitem(globals(), name, globals()[name].cuda())
    made = attnloom.create_block_mask(mask, None, 4, S, S, "cuda", BLOCK_SIZE=block)
    q, k, v = qkv(2, 4, S, D, dtype=BF16)
    if block == 64:
        q, k, v = q.detach(), k.detach(), v.detach()
    agrees(q, k, v, score, mask, block_mask=made, kernel_options={"backend": "gluon"})
    assert programs(ready) == {2}


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("mask", [documents, by_head, with_empty_rows])
def test_given_blocks(
    D: int, mask: Any, block: int, chosen: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_given(D, mask, block, chosen, monkeypatch)


@pytest.mark.parametrize("block", [64, 128])
def test_short_windows(block: int, chosen: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check_given(128, near, block, chosen, monkeypatch)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("score", [softcap, alibi])
@pytest.mark.parametrize("mask", [documents, with_empty_rows])
def test_score_mods(
    D: int, score: Any, mask: Any, chosen: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_given(D, mask, 64, chosen, monkeypatch, score)


def test_ids_that_change_inside_blocks_that_the_caller_chose(chosen: dict[Any, Any]) -> None:
    """Smaller blocks follow from the ids, in calls that repeat earlier ones as well. A graph asks
    nobody when it is replayed, and keeps the given blocks."""
    ids = torch.arange(S, dtype=torch.int32) // 130

    def mask_mod(b, h, q, kv):
        return ids[q] == ids[kv]

    place = torch.arange(-(-S // 128))
    near = (place[:, None] - place).abs() < 3
    mask = attnloom.BlockMask.from_block_bool(near, None, 128, mask_mod, (S, S))
    q, k, v = (t.detach() for t in qkv(2, 4, S, 128, dtype=BF16))

    def run() -> torch.Tensor:
        return attnloom.flex_attention(
            q, k, v, block_mask=mask, kernel_options={"backend": "gluon"}
        )

    def wanted() -> torch.Tensor:
        return reference_attention(q, k, v, None, mask_mod, None)[0]

    for _ in range(4):
        close(run(), wanted(), BF16)
    assert programs(chosen) == {2}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for shift in (0, 64, 100):
        ids.copy_((torch.arange(S) + shift) // 130)
        graph.replay()
        close(captured, wanted(), BF16)
        for _ in range(4):
            close(run(), wanted(), BF16)
