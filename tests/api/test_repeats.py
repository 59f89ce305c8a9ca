"""Calls that are like an earlier one take its launch; calls that only look like it do not."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attnloom import BlockMask, create_block_mask, flex_attention
from attnloom.api import near, planning, repeats
from attnloom.errors import ModError, OptionError, ShapeError
from attnloom.trace import forms
from tests.api.mods import causal, normal

Attend = Callable[[], torch.Tensor]
S = 24
WINDOW = 4


@pytest.fixture(autouse=True, params=["guards", "attributes"])
def _nothing_is_remembered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's guards, and without them."""
    if request.param == "attributes":
        monkeypatch.setattr(forms, "_Guards", None)
    monkeypatch.setattr(repeats, "_buckets", {})
    monkeypatch.setattr(near, "_calls", {})
    monkeypatch.setattr(repeats, "_met", set())


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each call that was planned."""
    calls: list[int] = []
    plan = planning.plan_launch

    def counted(*args: Any) -> Any:
        calls.append(1)
        return plan(*args)

    monkeypatch.setattr("attnloom.api.pipeline.plan_launch", counted)
    return calls


def inputs(seed: int = 0, heads: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(normal(1, heads, S, 8, seed=seed + i) for i in range(3))


def attend(*args: Any, backend: str = "tiled", **named: Any) -> torch.Tensor:
    return flex_attention(*args, kernel_options={"backend": backend}, **named)


def assert_right(*args: Any, **named: Any) -> None:
    """Five times, so that the last calls are repeated ones: found by their key, then by form."""
    want = attend(*args, backend="reference", **named)
    for _ in range(5):
        torch.testing.assert_close(attend(*args, **named), want, rtol=1e-5, atol=1e-5)


def mask_of(mask_mod: Any = causal) -> BlockMask:
    return create_block_mask(mask_mod, None, None, S, S, device="cpu", BLOCK_SIZE=16)


def test_a_repeated_call_is_not_planned_again(planned: list[int]) -> None:
    slopes, mask = torch.tensor([0.5, 0.25]), mask_of()

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    for seed in range(4):
        assert_right(*inputs(seed), alibi, mask)
    assert len(planned) == 2


def test_a_new_closure_of_the_same_code_is_the_same_mod(planned: list[int]) -> None:
    def bias(table: torch.Tensor) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx]

    for seed in range(4):
        assert_right(*inputs(), bias(normal(2, S, seed=seed)))
    assert len(planned) == 2


def _with_cell() -> tuple[Any, Callable[[Any], None]]:
    value: Any = None

    def mod(score, b, h, q_idx, kv_idx):
        return score + value * q_idx

    def put(new: Any) -> None:
        nonlocal value
        value = new

    return mod, put


@pytest.mark.parametrize(
    "values",
    [(1, 2, 1), (1, True, 1.0), (0.0, -0.0, 0.5), (2.5, 2.5 + 1e-12), (1.0, float("inf"))],
    ids=str,
)
def test_a_captured_number_that_changes(values: tuple[Any, ...]) -> None:
    mod, put = _with_cell()
    for value in values:
        put(value)
        want = attend(*inputs(), mod, backend="reference")
        for _ in range(3):
            found = attend(*inputs(), mod)
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_captured_number_becomes_a_tensor() -> None:
    def table(value: Any) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score * value + value

    for value in (2.0, torch.tensor(3.0), torch.tensor(4), 5.0):
        assert_right(*inputs(), table(value))


def test_a_global_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOW))
    assert_right(*inputs(), None, mask)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "WINDOW", 2)
        narrow = mask_of(mask.mask_mod)
        assert_right(*inputs(), None, narrow)
        with pytest.raises(ModError, match="'WINDOW' was 4 and is 2 now"):
            attend(*inputs(), None, mask)
    assert_right(*inputs(), None, mask)


def test_code_and_defaults_that_change() -> None:
    def mod(score, b, h, q_idx, kv_idx, factor=2.0):
        return score * factor

    def other(score, b, h, q_idx, kv_idx, factor=2.0):
        return score - q_idx * factor

    assert_right(*inputs(), mod)
    mod.__defaults__ = (3.0,)
    assert_right(*inputs(), mod)
    mod.__code__ = other.__code__
    assert_right(*inputs(), mod)


def test_two_tensors_become_one() -> None:
    def mod(a: torch.Tensor, c: torch.Tensor) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score * a[h] + c[h]

    one, two = torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0])
    for pair in ((one, two), (one, one), (two, one), (two, two)):
        assert_right(*inputs(), mod(*pair))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.resize_(3),
        lambda t: t.mul_(2),
        lambda t: setattr(t, "data", torch.tensor([1.5, 2.5], dtype=torch.float64)),
        lambda t: setattr(t, "data", torch.tensor([1.0, 9.0, 4.0])[::2]),
    ],
    ids=["resized", "multiplied", "double", "strided"],
)
def test_a_captured_tensor_that_changes(change: Callable[[torch.Tensor], Any]) -> None:
    slopes = torch.tensor([0.5, 0.25])

    def mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * kv_idx

    assert_right(*inputs(), mod)
    change(slopes)
    assert_right(*inputs(), mod)


def test_a_captured_tensor_that_begins_to_want_a_gradient() -> None:
    slopes = torch.tensor([0.5, 0.25])

    def mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * kv_idx

    for _ in range(3):
        assert not attend(*inputs(), mod).requires_grad
    slopes.requires_grad_()
    for _ in range(3):
        (grad,) = torch.autograd.grad(attend(*inputs(), mod)[..., 0].square().sum(), slopes)
        assert float(grad.abs().max()) > 0
        with torch.no_grad():
            assert not attend(*inputs(), mod).requires_grad
    slopes.requires_grad_(False)
    assert not attend(*inputs(), mod).requires_grad


def test_a_mod_that_reads_values_on_the_host() -> None:
    threshold = torch.tensor(3)

    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx > int(threshold.item()), score * 2, score)

    for value in (3, 10, 3, 0):
        threshold.fill_(value)
        assert_right(*inputs(), mod)


class Bias(torch.nn.Module):
    """A mod as a method, or a closure over the module."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.table = torch.nn.Parameter(normal(2, S), requires_grad=False)
        self.inner = torch.nn.Linear(1, 1).requires_grad_(False)

    def method(self, score, b, h, q_idx, kv_idx):
        return score * self.factor + self.table[h, q_idx]

    def closure(self) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score * self.factor + self.inner.bias[h * 0]


def test_methods_and_attributes(planned: list[int]) -> None:
    module, other = Bias(), Bias()
    other.table = torch.nn.Parameter(normal(2, S, seed=3), requires_grad=False)
    for mod in (module.method, other.method, module.method, module.closure(), module.closure()):
        assert_right(*inputs(), mod)
    assert len(planned) == 4
    changes: list[Callable[[], Any]] = [
        lambda: setattr(module, "factor", 3.0),
        lambda: setattr(module, "factor", 3),
        lambda: setattr(module, "table", torch.nn.Parameter(normal(2, S + 1), requires_grad=False)),
        lambda: setattr(module, "inner", other.inner),
        lambda: setattr(module.inner, "bias", torch.nn.Parameter(normal(1), requires_grad=False)),
        lambda: setattr(Bias, "factor", property(lambda self: 7.0)),
    ]
    for change in changes:
        change()
        assert_right(*inputs(), module.method)
        assert_right(*inputs(), module.closure())
    del Bias.factor  # type: ignore[attr-defined]


def test_lists_and_partials(planned: list[int]) -> None:
    factors = [2.0, 3.0]

    def by_list(score, b, h, q_idx, kv_idx):
        return score * factors[0] + factors[1]

    def scaled(score, b, h, q_idx, kv_idx, factor, table):
        return score * factor + table[h]

    for value in (2.0, 5.0, 2.0):
        factors[1] = value
        assert_right(*inputs(), by_list)
        table = torch.full((2,), value)
        assert_right(*inputs(), functools.partial(scaled, factor=value, table=table))
    assert len(planned) == 2 * (1 + 2)
    assert_right(*inputs(), functools.partial(scaled, table=torch.ones(2), factor=2.0))
    assert_right(*inputs(), functools.partial(scaled, table=torch.ones(3), factor=2.0))


def test_callables_of_other_kinds_are_left_to_the_ordinary_way(planned: list[int]) -> None:
    class Caller:
        def __call__(self, score, b, h, q_idx, kv_idx):
            return score * 2 + h

    class Owner:
        mod = functools.partialmethod(lambda self, score, b, h, q_idx, kv_idx: score + h)

    def with_dict(score, b, h, q_idx, kv_idx, table={"a": 2.0}):  # noqa: B006
        return score * table["a"]

    def calls_builtin(score, b, h, q_idx, kv_idx):
        return bound(score) + h

    bound = torch.abs
    mods = (Caller(), Owner().mod, with_dict, calls_builtin)
    for mod in mods:
        assert_right(*inputs(), mod)
    assert len(planned) == 3 * 5 + 2


def test_inputs_of_another_form(planned: list[int]) -> None:
    q, k, v = inputs()
    forms = [
        (q, k, v),
        (q.mT.contiguous().mT, k, v),
        (q, k.double(), v),
        (q[:, :, :20], k, v),
        (q, k[:, :1].expand(-1, 2, -1, -1), v),
    ]
    for form in forms:
        assert_right(*form)
    assert len(planned) == 2 * len(forms)


def test_mistakes_are_found_after_a_right_call() -> None:
    q, k, v = inputs()
    mask = mask_of()
    assert_right(q, k, v, None, mask)
    with pytest.raises(ShapeError, match="query has length 20"):
        attend(q[:, :, :20], k, v, None, mask)
    with pytest.raises(OptionError, match="enable_gqa"):
        attend(q, k, v, None, mask, enable_gqa="yes")
    with pytest.raises(OptionError, match="scale"):
        attend(q, k, v, None, mask, scale=float("nan"))
    with pytest.raises(OptionError, match="'deterministic'"):
        flex_attention(q, k, v, None, mask, kernel_options={"backend": "tiled", "deterministic": 1})


def test_options_that_are_equal_as_keys_only() -> None:
    q, k, v = inputs()
    options: dict[str, Any] = {"backend": "tiled", "exact_math": True}
    for _ in range(3):
        flex_attention(q, k, v, kernel_options=options)
    with pytest.raises(OptionError, match="'exact_math'"):
        flex_attention(q, k, v, kernel_options=options | {"exact_math": 1})


def test_a_mask_whose_tensor_changed_is_refused_again_and_again() -> None:
    documents = torch.arange(S) // 7
    mask = mask_of(lambda b, h, q, kv: documents[q] == documents[kv])
    assert_right(*inputs(), None, mask)
    documents += 0
    for _ in range(2):
        with pytest.raises(ModError, match="was changed in place"):
            attend(*inputs(), None, mask)


def test_a_mask_that_gets_other_lists_or_another_mod() -> None:
    q, k, v = inputs()
    mask = mask_of()
    assert_right(q, k, v, None, mask)
    mask.mask_mod = lambda b, h, q_idx, kv_idx: q_idx > kv_idx
    assert_right(q, k, v, None, mask)
    mask.seq_lengths = (20, 20)
    with pytest.raises(ShapeError):
        attend(q, k, v, None, mask)
    short = tuple(t[:, :, :20] for t in (q, k, v))
    assert_right(*short, None, mask)


def test_a_mask_that_is_gone_leaves_nothing_behind() -> None:
    mask = mask_of()
    for _ in range(3):
        attend(*inputs(), None, mask)
    entries = weakref.ref(mask.lists().entries)
    assert len(repeats._buckets) == 1
    from attnloom.masking import reuse

    reuse.forget()
    del mask
    gc.collect()
    assert not repeats._buckets
    assert entries() is None


def test_captured_tensors_and_mods_are_not_kept() -> None:
    def run() -> tuple[weakref.ref[Any], ...]:
        slopes = torch.tensor([0.5, 0.25])

        def mod(score, b, h, q_idx, kv_idx):
            return score + slopes[h] * kv_idx

        for _ in range(3):
            attend(*inputs(), mod)
        return weakref.ref(slopes), weakref.ref(mod)

    slopes, mod = run()
    gc.collect()
    assert repeats._buckets
    assert slopes() is None and mod() is None


def test_numbers_that_never_return_are_given_up(planned: list[int]) -> None:
    mod, put = _with_cell()
    for step in range(100):
        put(step + 0.5)
        attend(*inputs(), mod)
    (bucket,) = repeats._buckets.values()
    assert bucket.misses == 99 and len(bucket.seen) == repeats._VARIANTS
    assert len(planned) == 100


def test_lengths_that_grow_leave_nothing_behind() -> None:
    q, k, v = inputs()
    for length in range(1, S):
        attend(q[:, :, :1], k[:, :, :length], v[:, :, :length])
    assert not repeats._buckets


def test_deterministic_mode_is_part_of_a_call(
    planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for deterministic in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
        for _ in range(3):
            attend(*inputs())
    assert len(planned) == 4
