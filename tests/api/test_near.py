"""Calls that are told by the form of their inputs: which are, which are not, and what they give."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from attnloom import AuxRequest, create_block_mask, flex_attention
from attnloom.api import near, repeats
from attnloom.errors import DtypeError, OptionError, TraceError, UnsupportedError
from attnloom.trace import forms
from tests.api.mods import causal, normal

S = 24
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True, params=["guards", "attributes"])
def _nothing_is_remembered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's guards, and without them."""
    if request.param == "attributes":
        monkeypatch.setattr(forms, "_Guards", None)
    monkeypatch.setattr(repeats, "_buckets", {})
    monkeypatch.setattr(repeats, "_met", set())
    monkeypatch.setattr(near, "_calls", {})


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An entry for each call: whether its form told what it is."""
    calls: list[bool] = []
    run = near.run

    def counted(*args: Any) -> Any:
        out = run(*args)
        calls.append(out is not None)
        return out

    monkeypatch.setattr(near, "run", counted)
    return calls


def inputs(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    return tuple(normal(1, 2, S, 8, seed=seed + i).to(dtype) for i in range(3))


def warm(attend: Callable[[Tensors], Any], tensors: Tensors) -> None:
    for _ in range(4):
        attend(tensors)


def alibi(slopes: torch.Tensor) -> Any:
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def test_guards_of_torch_are_at_hand() -> None:
    """Without them calls take longer: the private name has moved."""
    from torch._C._dynamo.guards import TensorGuards

    assert TensorGuards is not None


def test_the_fourth_call_is_told_by_its_form(told: list[bool]) -> None:
    mask = create_block_mask(causal, None, None, S, S, device="cpu", BLOCK_SIZE=16)
    for seed in range(6):
        q, k, v = inputs(seed)
        out = flex_attention(q, k, v, alibi(torch.tensor([0.5, 0.25]) * seed), mask)
        want = flex_attention(
            q, k, v, alibi(torch.tensor([0.5, 0.25]) * seed), mask,
            kernel_options={"backend": "reference"},
        )  # fmt: skip
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert told[::2] == [False] * 3 + [True] * 3
    assert not any(told[1::2])


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Other(torch.Tensor):
    pass


def _negated(x: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-x)


def _dual(x: torch.Tensor) -> torch.Tensor:
    return forward_ad.make_dual(x, torch.ones_like(x))


# What is done to query, key and value of a call that was seen without it.
FORMS: dict[str, Callable[..., Any]] = {
    "parameter": lambda q, k, v: (torch.nn.Parameter(q), k, v),
    "learns": lambda q, k, v: (q, k.clone().requires_grad_(), v),
    "longer": lambda q, k, v: (torch.cat([q, q], 2), k, v),
    "strides": lambda q, k, v: (q, k, v.mT.contiguous().mT),
    "float64": lambda q, k, v: (q.double(), k.double(), v.double()),
    "bfloat16": lambda q, k, v: (q.bfloat16(), k.bfloat16(), v.bfloat16()),
    "negated": lambda q, k, v: (_negated(q), k, v),
    "subclass": lambda q, k, v: (q.as_subclass(_Other), k, v),
}


@pytest.mark.parametrize("name", FORMS)
def test_inputs_of_another_form(name: str, told: list[bool]) -> None:
    tensors = inputs()
    warm(lambda t: flex_attention(*t), tensors)
    assert told[-1]
    others = FORMS[name](*tensors)
    out = flex_attention(*others)
    assert not told[-1]
    plain = [t.detach().as_subclass(torch.Tensor).resolve_neg() for t in others]
    want = flex_attention(*plain, kernel_options={"backend": "reference"})
    torch.testing.assert_close(
        out.detach().as_subclass(torch.Tensor), want, rtol=1e-2, atol=1e-2, check_dtype=True
    )
    assert out.requires_grad == any(t.requires_grad for t in others)


@contextlib.contextmanager
def _real(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# Under what a call runs that was seen outside.
MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dispatch mode": _Mode,
    "default dtype": lambda: _real(torch.float64),
    "deterministic": _deterministic,
    "dual level": forward_ad.dual_level,
}


@pytest.mark.parametrize("name", MODES)
def test_calls_under_other_modes(name: str, told: list[bool]) -> None:
    tensors = inputs()
    warm(lambda t: flex_attention(*t), tensors)
    want = flex_attention(*tensors)
    assert told[-1]
    with MODES[name]():
        out = flex_attention(*tensors)
    assert not told[-1]
    assert out.dtype == (torch.bfloat16 if name == "autocast" else torch.float32)
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)
    assert flex_attention(*tensors) is not None and told[-1]


def test_autocast_to_another_dtype(told: list[bool]) -> None:
    """Inputs that autocast to bfloat16 leaves as they are, autocast to float16 converts."""
    tensors = inputs(dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16) * 2:
        with torch.autocast("cpu", dtype):
            for _ in range(5):
                assert flex_attention(*tensors).dtype is dtype
    assert not any(told)


@pytest.mark.parametrize("name", ["vmap", "grad", "jvp"])
def test_calls_under_transforms(name: str, told: list[bool]) -> None:
    tensors = inputs()
    warm(lambda t: flex_attention(*t), tensors)
    q, k, v = tensors
    told.clear()
    if name == "vmap":
        out = torch.vmap(lambda x: flex_attention(x, k, v))(q[None])[0]
        torch.testing.assert_close(out, flex_attention(q, k, v))
    elif name == "grad":
        found = torch.func.grad(lambda x: flex_attention(x, k, v).square().sum())(q)
        x = q.clone().requires_grad_()
        (want,) = torch.autograd.grad(flex_attention(x, k, v).square().sum(), x)
        torch.testing.assert_close(found, want)
    else:
        _, tangent = torch.func.jvp(lambda x: flex_attention(x, k, v), (q,), (q,))
        assert float(tangent.abs().max()) > 0
    assert not told[0]


def test_a_tangent_is_not_lost(told: list[bool]) -> None:
    q, k, v = inputs()
    with forward_ad.dual_level():
        for _ in range(5):
            out = forward_ad.unpack_dual(flex_attention(_dual(q), k, v))
            assert out.tangent is not None
    assert not any(told)


def test_gradients_of_calls_that_are_told_by_their_form(told: list[bool]) -> None:
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    for seed in range(6):
        q, k, v = (t.requires_grad_() for t in inputs(seed))
        given = (q, k, v, slopes)
        found = torch.autograd.grad(flex_attention(q, k, v, alibi(slopes)).square().sum(), given)
        slow = flex_attention(q, k, v, alibi(slopes), kernel_options={"backend": "reference"})
        for a, b in zip(found, torch.autograd.grad(slow.square().sum(), given), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert told[-2]


def test_a_captured_tensor_alone_learns(told: list[bool]) -> None:
    for _ in range(6):
        slopes = torch.tensor([0.5, 0.25], requires_grad=True)
        out = flex_attention(*inputs(), alibi(slopes))
        (grad,) = torch.autograd.grad(out[..., 0].square().sum(), slopes)
        assert float(grad.abs().max()) > 0
    assert told[-1]


@pytest.mark.parametrize("scale", [0.5, 1, None])
def test_other_scales(scale: Any, told: list[bool]) -> None:
    tensors = inputs()
    warm(lambda t: flex_attention(*t, scale=1.0), tensors)
    assert told[-1]
    out = flex_attention(*tensors, scale=scale)
    assert not told[-1]
    want = flex_attention(*tensors, scale=scale, kernel_options={"backend": "reference"})
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_options_and_what_is_returned(told: list[bool]) -> None:
    tensors = inputs()
    options: Any = {"backend": "tiled", "exact_math": True}
    warm(lambda t: flex_attention(*t, kernel_options=dict(options)), tensors)
    assert told[-1]
    out = flex_attention(*tensors)
    assert not told[-1]
    for wrong in ({"exact_math": 1}, {"exact_math": torch.ones(2)}):
        with pytest.raises(OptionError, match="'exact_math'"):
            flex_attention(*tensors, kernel_options=options | wrong)
    with pytest.raises(OptionError, match="kernel_options"):
        flex_attention(*tensors, kernel_options=5)  # type: ignore[arg-type]
    told.clear()
    again, aux = flex_attention(*tensors, return_aux=AuxRequest(lse=True, max_scores=True))
    torch.testing.assert_close(again, out)
    assert not told and aux.lse is not None and aux.max_scores is not None


def test_more_forms_than_there_is_room_for(told: list[bool]) -> None:
    for _ in range(8):
        for length in range(1, 20):
            q, k, v = (t[:, :, :length].contiguous() for t in inputs())
            want = flex_attention(q, k, v, kernel_options={"backend": "reference"})
            torch.testing.assert_close(flex_attention(q, k, v), want, rtol=1e-5, atol=1e-5)
    assert all(len(calls) <= near._MOST_FORMS for calls in near._calls.values())


def test_a_mask_that_is_gone_leaves_nothing_behind() -> None:
    tensors = inputs()
    masks = [create_block_mask(causal, None, None, S, S, device="cpu", BLOCK_SIZE=16)]
    warm(lambda t: flex_attention(*t, None, masks[0]), tensors)
    ((call,),) = near._calls.values()
    assert call.bucket() is not None
    masks.clear()
    gc.collect()
    assert call.bucket() is None


def test_threads_at_once() -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        q, k, v = inputs(seed)
        want = flex_attention(q, k, v, kernel_options={"backend": "reference"})
        for _ in range(50):
            out = flex_attention(q, k, v)
            if not torch.allclose(out, want, rtol=1e-4, atol=1e-4):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("place", [0, 2, "captured"])
def test_a_nested_tensor_ended_the_process(place: Any, told: list[bool]) -> None:
    """torch's guards ask for its sizes, which it has not, where nobody catches what is thrown."""
    q, k, v = inputs()
    bias = [torch.ones(S)]
    mod = lambda score, b, h, q_idx, kv_idx: score + bias[0][q_idx]
    warm(lambda t: flex_attention(*t, mod), (q, k, v))
    assert told[-1]
    nested = torch.nested.nested_tensor([torch.randn(2, S, 8)])
    given: list[torch.Tensor] = [q, k, v]
    if place == "captured":
        bias[0] = nested
    else:
        given[place] = nested
    with pytest.raises((UnsupportedError, TraceError)):
        flex_attention(*given, mod)


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_tracers_see_the_operator(pre_dispatch: bool) -> None:
    """torch keeps its own modes out of the keys that guards compare."""
    tensors = inputs()
    warm(lambda t: flex_attention(*t), tensors)
    graph = make_fx(lambda *t: flex_attention(*t), pre_dispatch=pre_dispatch)(*tensors)
    assert "attnloom" in graph.code
    torch.testing.assert_close(graph(*tensors), flex_attention(*tensors))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(flex_attention(*tensors), FakeTensor)


def test_zeros_of_either_sign_are_other_scales() -> None:
    tensors = inputs()
    mod = lambda score, b, h, q, kv: torch.where(1 / score < 0, 0.1 * q * kv, -0.1 * kv)
    outs = []
    for scale in (0.0, 0.0, 0.0, 0.0, 0.0, -0.0):
        outs.append(flex_attention(*tensors, mod, scale=scale))
    want = flex_attention(*tensors, mod, scale=-0.0, kernel_options={"backend": "reference"})
    torch.testing.assert_close(outs[-1], want)
    assert not torch.allclose(outs[-1], outs[0])


@pytest.mark.parametrize("calls", [0, 1, 6])
def test_an_attribute_of_a_captured_tensor_that_changes(calls: int) -> None:
    tensors = inputs()
    table = torch.randn(S)
    table.slope = 1.0  # type: ignore[attr-defined]
    mod = lambda score, b, h, q_idx, kv_idx: score * table.slope + table[q_idx]  # type: ignore[attr-defined]
    for _ in range(calls):
        flex_attention(*tensors, mod)
    table.slope = 4.0  # type: ignore[attr-defined]
    want = flex_attention(*tensors, mod, kernel_options={"backend": "reference"})
    torch.testing.assert_close(flex_attention(*tensors, mod), want, rtol=1e-5, atol=1e-5)


def test_an_attribute_that_a_captured_tensor_gets_later() -> None:
    tensors = inputs()
    table = torch.randn(S)
    mod = lambda score, b, h, q_idx, kv_idx: score * getattr(table, "slope", 1.0) + table[q_idx]
    for _ in range(5):
        flex_attention(*tensors, mod)
    table.slope = 4.0  # type: ignore[attr-defined]
    want = flex_attention(*tensors, mod, kernel_options={"backend": "reference"})
    torch.testing.assert_close(flex_attention(*tensors, mod), want, rtol=1e-5, atol=1e-5)


def test_a_parameter_in_place_of_a_captured_tensor() -> None:
    tensors = inputs()
    held = [torch.ones(S)]

    def mod(score, b, h, q_idx, kv_idx):
        return score * (4 if isinstance(held[0], torch.nn.Parameter) else 1) + held[0][q_idx]

    for _ in range(5):
        flex_attention(*tensors, mod)
    held[0] = torch.nn.Parameter(torch.ones(S), requires_grad=False)
    want = flex_attention(*tensors, mod, kernel_options={"backend": "reference"})
    torch.testing.assert_close(flex_attention(*tensors, mod), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("calls", [0, 5])
def test_memory_that_was_given_back(calls: int) -> None:
    tensors = inputs()
    for _ in range(calls):
        flex_attention(*tensors)
    tensors[1].untyped_storage().resize_(0)
    with pytest.raises(OptionError, match=r"key of shape .* has no memory"):
        flex_attention(*tensors)


@pytest.mark.parametrize("calls", [0, 5])
def test_zeros_without_memory(calls: int) -> None:
    q, k, v = inputs()
    for _ in range(calls):
        flex_attention(q, k, v)
    out = flex_attention(torch._efficientzerotensor(q.shape), k, v)
    torch.testing.assert_close(out, flex_attention(torch.zeros_like(q), k, v))
    q.requires_grad_()
    out = flex_attention(q, k, v)
    (grad,) = torch.autograd.grad(out, q, torch._efficientzerotensor(out.shape))
    assert not grad.any()


@pytest.mark.parametrize("calls", [0, 5])
def test_hooks_that_give_back_another_dtype(calls: int) -> None:
    q, k, v = (t.requires_grad_() for t in inputs())
    for _ in range(calls):
        flex_attention(q, k, v).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.bfloat16(), lambda x: x):
        out = flex_attention(q, k, v)
    with pytest.raises(DtypeError, match="saved_tensors_hooks"):
        out.sum().backward()


def test_hooks_that_give_back_other_strides() -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x

    found = []
    for hooks in (None, other):
        q, k, v = (t.requires_grad_() for t in inputs())
        with torch.autograd.graph.saved_tensors_hooks(hooks or (lambda x: x), lambda x: x):
            out = flex_attention(q, k, v)
        out.square().sum().backward()
        found.append((q.grad, k.grad, v.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_an_attribute_of_a_mod_that_is_called_extent() -> None:
    """A note of attnloom's own had that name: a number there was taken for limits."""
    tensors = inputs()

    def mod(score, b, h, q_idx, kv_idx):
        return score * mod.extent  # type: ignore[attr-defined]

    for value in (1.0, 1.0, 1.0, 1.0, 3.0):
        mod.extent = value  # type: ignore[attr-defined]
        out = flex_attention(*tensors, mod)
    want = flex_attention(*tensors, mod, kernel_options={"backend": "reference"})
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
