"""Repeated calls on the CPU that learn, and mods that capture: other addresses alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from attnloom import AuxRequest, create_block_mask, flex_attention, mods
from attnloom.api import near, repeats
from attnloom.backends.cpu import launch
from attnloom.backends.cpu.again import BackwardAgain, ForwardAgain
from attnloom.backends.cpu.toolchain import available
from tests.harness.threads import at_once

pytestmark = pytest.mark.skipif(available() is None, reason="needs a C++ compiler")

S = 200
CAUSAL = create_block_mask(mods.causal_mask, None, None, S, S)
IDS = torch.arange(S) // 37
DOCUMENTS = create_block_mask(lambda b, h, i, j: IDS[i] == IDS[j], None, None, S, S)
Tensors = list[torch.Tensor]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[bool]]]:
    """For each phase an entry for each call that was asked to be short: whether it was."""
    monkeypatch.setattr(repeats, "_buckets", {})
    monkeypatch.setattr(near, "_calls", {})
    monkeypatch.setattr(repeats, "_met", set())
    asked: dict[str, list[bool]] = {"forward": [], "backward": []}

    def count(phase: str, cls: type) -> None:
        call = cls.__call__

        def counting(self: object, *given: object) -> object:
            result = call(self, *given)
            asked[phase].append(result is not None)
            return result

        monkeypatch.setattr(cls, "__call__", counting)

    count("forward", ForwardAgain)
    count("backward", BackwardAgain)
    yield asked


def inputs(seed: int, dtype: torch.dtype = torch.float32, heads: int = 2) -> Tensors:
    """query, key, value, dout and dlse."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(1, heads, S, 32), (1, 2, S, 32), (1, 2, S, 32), (1, heads, S, 32), (1, heads, S)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def biased(seed: int) -> Callable[..., torch.Tensor]:
    bias = torch.randn(S, generator=torch.Generator().manual_seed(100 + seed))
    return lambda s, b, h, i, j: s + bias[j] * (h + 1)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: int) -> torch.Tensor:
    return flex_attention(q, k, v)


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "full": plain,
    "causal": lambda q, k, v, seed: flex_attention(q, k, v, None, CAUSAL),
    "softcap": lambda q, k, v, seed: flex_attention(q, k, v, mods.softcap(20.0), CAUSAL),
    "a bias that is another one each time": lambda q, k, v, seed: flex_attention(
        q, k, v, biased(seed), CAUSAL
    ),
    "documents": lambda q, k, v, seed: flex_attention(q, k, v, None, DOCUMENTS),
    "heads in groups": lambda q, k, v, seed: flex_attention(
        torch.cat((q, q), 1)[:, :4], k, v, None, CAUSAL, enable_gqa=True
    ),
}


def gradients(call: Callable[..., torch.Tensor], seed: int, dtype: torch.dtype) -> Tensors:
    q, k, v, dout, _ = inputs(seed, dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = call(*leaves, seed)
    dout = torch.cat((dout, dout), 1)[:, : out.size(1)]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_repeated_calls_give_what_first_ones_do(
    name: str, dtype: torch.dtype, short: dict[str, list[bool]]
) -> None:
    repeated = [gradients(CALLS[name], seed, dtype) for seed in range(5)]
    assert any(short["forward"]) and any(short["backward"])
    for seed in range(5):
        repeats.clear()
        for got, want in zip(repeated[seed], gradients(CALLS[name], seed, dtype), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", CALLS)
def test_captured_tensors_in_inference(name: str, short: dict[str, list[bool]]) -> None:
    def call(seed: int) -> torch.Tensor:
        with torch.no_grad():
            return CALLS[name](*inputs(seed)[:3], seed)

    repeated = [call(seed) for seed in range(5)]
    assert any(short["forward"])
    for seed in range(5):
        repeats.clear()
        assert torch.equal(call(seed), repeated[seed])


def test_dlse_strides_and_dtypes_of_gradients(short: dict[str, list[bool]]) -> None:
    """Each form of what comes in has arguments of its own; one that is converted has none."""
    q, k, v, dout, dlse = inputs(0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    transposed = dout.transpose(1, 2).contiguous().transpose(1, 2)
    across = dout.mT.contiguous().mT
    forms = [(dout, None), (dout, dlse), (transposed, None), (across, dlse)]

    def run(given: torch.Tensor, of_lse: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        out, aux = flex_attention(*leaves, block_mask=CAUSAL, return_aux=AuxRequest(lse=True))
        if of_lse is None:
            return torch.autograd.grad(out, leaves, given)
        return torch.autograd.grad((out, aux.lse), leaves, (given, of_lse))

    first = [run(*form) for form in forms]
    asked = []
    for _ in range(3):
        for form, want in zip(forms, first, strict=True):
            before = len(short["backward"])
            for got, expected in zip(run(*form), want, strict=True):
                assert torch.equal(got, expected)
            asked.append(len(short["backward"]) - before)
    assert asked[-4:] == [1, 1, 1, 0]


LEARNED: dict[str, tuple[torch.Size, Callable[..., Callable[..., torch.Tensor]]]] = {
    "by head": (torch.Size([2]), lambda w: lambda s, b, h, i, j: s + w[h] * (i - j)),
    "by distance": (torch.Size([2 * S]), lambda w: lambda s, b, h, i, j: s + w[i - j + S]),
    "by score": (torch.Size([2, S, S]), lambda w: lambda s, b, h, i, j: s + w[h, i, j]),
    "two, one of which learns": (
        torch.Size([S]), lambda w: lambda s, b, h, i, j: s + BIASES[j] * w[i],
    ),
}  # fmt: skip
BIASES = torch.randn(S, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LEARNED)
def test_captured_tensors_that_learn(
    name: str, dtype: torch.dtype, short: dict[str, list[bool]]
) -> None:
    """Gradients of a call are no part of the next one's."""
    size, mod = LEARNED[name]

    def call(seed: int) -> tuple[torch.Tensor, ...]:
        q, k, v, dout, _ = inputs(seed)
        learned = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
        leaves = [x.requires_grad_() for x in (q, k, v, learned)]
        out = flex_attention(q, k, v, mod(learned), CAUSAL)
        return torch.autograd.grad(out, leaves, dout)

    repeated = [call(seed) for seed in range(5)]
    assert any(short["backward"])
    for seed in range(5):
        repeats.clear()
        for got, want in zip(repeated[seed], call(seed), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("learns", [False, True])
def test_captured_integers_that_outgrow_their_lanes(
    learns: bool, short: dict[str, list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels say so as they load them; the ordinary way then has wide ones."""
    monkeypatch.setattr(launch, "_wide", set())
    q, k, v, dout, _ = inputs(0)
    q.requires_grad_(learns)
    ages = torch.arange(S)

    def run(order: int) -> torch.Tensor:
        ages.copy_(torch.arange(S) + order)
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + (ages[i] - ages[j]) / S)
        return torch.autograd.grad(out, q, dout)[0] if learns else out

    want = run(0)
    for order in (0, 0, 0, 1 << 40, 1 << 40, 0):
        torch.testing.assert_close(run(order), want, rtol=1e-5, atol=1e-6)
    for phase in ("forward", "backward")[: 1 + learns]:
        first = short[phase].index(False)
        assert first > 0 and not any(short[phase][first:])


def test_threads_that_share_a_call_do_not_share_its_arguments() -> None:
    def step(seed: int) -> Tensors:
        return gradients(CALLS["a bias that is another one each time"], seed, torch.float32)

    want = [step(seed) for seed in range(4)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(30):
            for got, expected in zip(step(seed), want[seed], strict=True):
                if not torch.equal(got, expected):
                    wrong.append(seed)

    at_once(work, range(4))
    assert not wrong
