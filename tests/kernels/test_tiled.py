"""The backend of tiled torch operators against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attnloom
from attnloom.backends.registry import AttentionCall, load
from attnloom.backends.tiled import tiles
from attnloom.plan.problem import KernelOptions
from tests.harness.agree import agrees, qkv
from tests.harness.case import LAYOUTS, Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with
from tests.harness.mods import MODS

SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=20, KV_LEN=37, D=8, Dv=12)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check(case: Case) -> None:
    check_attention(case, attnloom_with(backend="tiled"))


@pytest.mark.parametrize("mod", sorted(MODS))
def test_every_mod(mod: str) -> None:
    check(Case(mod, SIZES))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mod", ["causal", "relative_bias"])
def test_dtypes(mod: str, dtype: torch.dtype) -> None:
    check(Case(mod, SIZES, dtype))


@pytest.mark.parametrize(("Q_LEN", "KV_LEN"), [(1, 1), (1, 63), (63, 1), (130, 600)])
def test_lengths(Q_LEN: int, KV_LEN: int) -> None:
    for mod in ("plain", "causal_head_slope"):
        check(Case(mod, replace(SIZES, Q_LEN=Q_LEN, KV_LEN=KV_LEN)))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts(layout: str) -> None:
    check(Case("relative_bias", SIZES, layout=layout))


def test_one_batch_of_keys_for_all_queries() -> None:
    check(Case("causal", replace(SIZES, B=3), kv_batch=1))


@pytest.mark.parametrize("block_size", [(16, 16), (16, 128), (256, 32)])
def test_block_sizes(block_size: tuple[int, int]) -> None:
    check(Case("sliding_window", replace(SIZES, Q_LEN=140, KV_LEN=200), block_size=block_size))


def test_small_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MAX_ROWS", 16)
    monkeypatch.setattr(tiles, "MAX_KEYS", 16)
    monkeypatch.setattr(tiles, "MAX_SCORES", 1)
    for mod in ("causal", "document_relative_softcap"):
        check(Case(mod, replace(SIZES, B=1, Hq=2, Hkv=1, Q_LEN=34, KV_LEN=50)))


def test_gradient_of_an_element_with_a_fixed_index() -> None:
    """A constant index has no dimensions, which reshape() could not be told one by one."""
    table = qkv(1, 1, 3, 4)[0]
    agrees(
        *qkv(1, 2, 5, 4),
        lambda score, b, h, q_idx, kv_idx: score * table[0, 0, h, 2],
        captures=[table],
        kernel_options={"backend": "tiled"},
    )


def test_memory_is_linear_in_the_length() -> None:
    """2048 x 2048 scores would be 16 MiB; a tile of operators holds a few of 128 x 512."""
    largest = 0

    class Largest(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    q = torch.randn(1, 1, 2048, 8, requires_grad=True)
    mask = attnloom.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 2048, 2048, "cpu")
    with Largest():
        out = attnloom.flex_attention(q, q, q, block_mask=mask, kernel_options={"backend": "tiled"})
        out.sum().backward()
    assert largest <= 4 * tiles.MAX_ROWS * tiles.MAX_KEYS


def test_a_backward_recorded_a_graph_of_all_its_tiles() -> None:
    """Asked for by name, not through an operator; it held every score of a call in memory."""
    query, key, value = qkv(1, 2, 40, 8)
    call = AttentionCall(query, key, value, None, None, None, 0.35, KernelOptions())
    backend = load("tiled")
    found = backend.forward(call, False)
    given = backend.backward(call, found.out, found.lse, torch.ones_like(query), None)
    assert not any(t.requires_grad for t in (found.out, given.dq, given.dk, given.dv))
