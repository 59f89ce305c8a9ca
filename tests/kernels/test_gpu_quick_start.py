"""Quick forms on a Hopper GPU: the bits of the usual ones, also while those are compiled;
`pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attnloom import AuxRequest, create_block_mask, flex_attention
from tests.kernels.hopper import ON_HOPPER

pytestmark = ON_HOPPER

BF16, FP16 = torch.bfloat16, torch.float16
Q_LEN, KV_LEN = 1900, 2100


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel is on disk, and no call was seen."""
    from attnloom.backends.gluon import first_call, launch_forward
    from attnloom.backends.triton import beside

    monkeypatch.setenv("ATTNLOOM_QUICK_START", "1")
    monkeypatch.setattr(launch_forward, "_ready", {})
    monkeypatch.setattr(first_call, "_under_way", {})
    met: list[bool] = []
    there = lambda *args: bool(met) or met.append(args[-1] is not None)
    monkeypatch.setattr(first_call, "_is_there", there)
    beside._met.clear()
    yield
    _finish()


def _finish() -> None:
    """The usual form is there from now on."""
    from attnloom.backends.gluon import first_call

    for job in list(first_call._under_way.values()):
        job.wait()


def _consumers() -> set[tuple[int, int]]:
    from attnloom.backends.gluon import launch_forward

    forms = [ready.form for ready in launch_forward._ready.values()]  # type: ignore[union-attr]
    return {(form.warps, form.consumers) for form in forms}


def draw(D: int, Dv: int, dtype: torch.dtype, heads: tuple[int, int] = (8, 2)) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(D)
    shapes = [(3, heads[0], Q_LEN, D), (3, heads[1], KV_LEN, D), (3, heads[1], KV_LEN, Dv)]
    return [torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for shape in shapes]


def causal(b, h, q, kv):
    return q >= kv


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 300)


def some_rows(b, h, q, kv):
    return (q // 200 % 2 == 1) & (kv < 700 + 100 * b)


def documents(b, h, q, kv):
    return (q >= kv) & (IDS[b, q] == IDS[b, kv])


def softcap(score, b, h, q, kv):
    return 20 * torch.tanh(score / 20)


def alibi(score, b, h, q, kv):
    return score + torch.exp2(-(h + 1.0)) * (kv - q)


if torch.cuda.is_available():
    IDS = torch.arange(KV_LEN, device="cuda").expand(3, -1) // 400

MASKS: dict[str, Callable[..., Any] | None] = {
    "full": None, "causal": causal, "window": window, "some rows": some_rows,
    "documents": documents,
}  # fmt: skip
SCORES: dict[str, Callable[..., Any] | None] = {"plain": None, "softcap": softcap, "alibi": alibi}
DIMS = [(64, 64), (96, 96), (72, 40), (128, 128), (192, 192), (136, 160), (256, 256), (64, 128)]
CASES = [(D, Dv, mask, score) for D, Dv in DIMS for mask in ("full", "causal") for score in SCORES]
CASES += [(D, D, mask, "plain") for D in (64, 128, 192) for mask in ("window", "some rows")]
CASES += [(D, D, "documents", score) for D in (64, 128) for score in ("plain", "softcap")]


@pytest.mark.parametrize(("D", "Dv", "mask", "score"), CASES)
def test_the_bits_of_the_usual_form(
    D: int, Dv: int, mask: str, score: str, nothing_known: None
) -> None:
    dtype = FP16 if (D + len(mask)) % 3 == 0 else BF16
    x = draw(D, Dv, dtype)
    mask_mod = MASKS[mask]
    blocks = mask_mod and create_block_mask(mask_mod, 3, None, Q_LEN, KV_LEN, device="cuda")

    def call() -> tuple[torch.Tensor, ...]:
        out, aux = flex_attention(
            *x, SCORES[score], blocks, enable_gqa=True, kernel_options={"backend": "gluon"},
            return_aux=AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip
        return out, aux.lse, aux.max_scores

    with pytest.MonkeyPatch.context() as patch:
        # blocks of one consumer have no quick form
        patch.setattr("attnloom.backends.gluon.launch_forward.finer", lambda call: call)
        first = call()
        assert _consumers() == {(8, 1)}
        for _ in range(3):
            for mine, theirs in zip(call(), first, strict=True):
                assert torch.equal(mine, theirs)
        _finish()
        later = call()
        assert all(warps == 4 for warps, _ in _consumers())
    for mine, theirs in zip(later, first, strict=True):
        assert torch.equal(mine, theirs)


def test_a_graph_recorded_while_the_usual_form_is_compiled(nothing_known: None) -> None:
    x = draw(128, 128, BF16)
    mask = create_block_mask(causal, None, None, Q_LEN, KV_LEN, device="cuda")

    def call() -> torch.Tensor:
        return flex_attention(*x, softcap, mask, scale=0.0871, enable_gqa=True)  # type: ignore

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = call()
    torch.cuda.current_stream().wait_stream(side)
    assert _consumers() == {(8, 1)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    assert _consumers() == {(4, 2)}
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, first)
