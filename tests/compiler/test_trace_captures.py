"""The fast path: when a mod is recognised, what is bound, and that nothing is ever mistaken."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType
from attnloom.stats import compile_stats
from attnloom.trace import captures
from attnloom.trace.tracer import trace_mask, trace_score

CPU = torch.device("cpu")
LIMIT: Any = 3
TENSOR = torch.Tensor


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    captures.clear()


def _score(mod: Any) -> BoundProgram:
    return trace_score(mod, DType.F32, CPU)


def _traces(call: Callable[[], Any]) -> int:
    before = compile_stats().traces
    call()
    return compile_stats().traces - before


def _value(bound: BoundProgram, q: int = 2, kv: int = 1, score: float = 1.5) -> float:
    inputs = {"b": 0, "h": 0, "q": q, "kv": kv}
    tensors = {name: torch.tensor([value]) for name, value in inputs.items()}
    return interpret(bound, {**tensors, "score": torch.tensor([score])})[0].item()


def _alibi(slopes: torch.Tensor, cap: float = 2.0, window: int = 3) -> Any:
    def mod(s, b, h, q, kv):
        kept = (q - kv).abs() <= window
        return torch.where(kept, cap * torch.tanh((s + slopes[h] * (kv - q)) / cap), -1e9)

    return mod


def test_a_known_mod_is_not_traced_again():
    mod = _alibi(torch.ones(2))
    assert _traces(lambda: _score(mod)) == 1
    assert _traces(lambda: _score(mod)) == 0
    assert _score(mod).program is _score(mod).program


def test_other_tensors_are_bound_without_a_trace():
    first = _score(_alibi(torch.ones(2)))
    slopes = torch.full((7,), 0.25)
    second: list[BoundProgram] = []
    assert _traces(lambda: second.append(_score(_alibi(slopes)))) == 0
    assert second[0].tensors[0] is slopes
    assert second[0].program is first.program


def test_the_second_value_of_a_number_shows_that_it_varies():
    slopes = torch.ones(2)
    counts = [_traces(lambda c=c: _score(_alibi(slopes, c))) for c in (2.0, 3.0, 4.0, 5.0)]
    assert counts == [1, 1, 0, 0]
    assert _score(_alibi(slopes, 6.5, 9)).numbers == (9, 6.5, 6.5, -1e9)
    assert _traces(lambda: _score(_alibi(slopes, 7.5, 11))) == 0


def test_equal_numbers_stay_apart():
    """Two captured numbers that are equal once must not be taken for one."""

    def make(a: float, c: float) -> Any:
        return lambda s, b, h, q, kv: s * a + c

    for a, c in ((2.0, 2.0), (3.0, 3.0), (3.0, 4.0), (5.0, 1.0)):
        assert _value(_score(make(a, c))) == 1.5 * a + c


@pytest.mark.parametrize(
    "make",
    [
        lambda n: lambda s, b, h, q, kv: sum((s for _ in range(n)), start=s * 0.0),
        lambda n: lambda s, b, h, q, kv: s * (n // 2),
        lambda n: lambda s, b, h, q, kv: s * n if n > 3 else s + n,
        lambda n: lambda s, b, h, q, kv: s**n,
        lambda n: lambda s, b, h, q, kv: s * (kv << n),
        lambda n: lambda s, b, h, q, kv: s * (2.5 - n),
        lambda n: lambda s, b, h, q, kv: s * len([None] * n),
        lambda n: lambda s, b, h, q, kv: s * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])[n - 2],
        lambda n: lambda s, b, h, q, kv: s * [10.0, 20.0, 30.0, 40.0, 50.0][n - 2],
        lambda n: lambda s, b, h, q, kv: s * (n if type(n) is int else 100),
        lambda n: lambda s, b, h, q, kv: s * (n if isinstance(n, int) else 100),
        lambda n: lambda s, b, h, q, kv: s * int(f"{n}"),
        lambda n: lambda s, b, h, q, kv: s * max(n, 4),
        lambda n: lambda s, b, h, q, kv: s * (n if q > kv else -n),
        lambda n: lambda s, b, h, q, kv: s.clamp(max=n) * torch.where(q > kv, n, n + 1),
        lambda n: lambda s, b, h, q, kv: torch.nn.functional.softplus(s, beta=n),
        lambda n: lambda s, b, h, q, kv: n,
    ],
)
def test_numbers_that_shape_the_program(make: Callable[[int], Any]) -> None:
    """Whatever a mod does with its number, every value gives what a fresh trace gives."""
    for n in (2, 3, 4, 5, 3, 2, 6, 4):
        cached = _value(_score(make(n)))
        templates = dict(captures._templates)
        captures.clear()
        fresh = _value(_score(make(n)))
        captures._templates.update(templates)
        assert cached == fresh


def test_types_and_signs_of_numbers_are_told_apart():
    def make(x: Any) -> Any:
        return lambda s, b, h, q, kv: torch.copysign(s * 0 + 5.0, x) + (kv // 2) * x

    values = [0.0, -0.0, 1, 1.0, True, float("inf"), float("-inf"), 0.0, -0.0]
    for x in values:
        expected = torch.copysign(torch.tensor(5.0), torch.tensor(float(x))) + 0 * x
        torch.testing.assert_close(torch.tensor(_value(_score(make(x)))), expected, equal_nan=True)


def test_requires_grad_and_grad_mode_are_part_of_the_key():
    slopes = torch.nn.Parameter(torch.ones(2))
    mod = _alibi(slopes)
    assert _score(mod).program.tensors[0].requires_grad
    with torch.no_grad():
        assert not _score(mod).program.tensors[0].requires_grad
    slopes.requires_grad_(False)
    assert not _score(mod).program.tensors[0].requires_grad


def test_a_parameter_that_changes_dtype_in_place_is_seen():
    layer = torch.nn.Linear(1, 2)

    def make(weight: torch.Tensor) -> Any:
        return lambda s, b, h, q, kv: s + weight[h, 0]

    mod = make(layer.weight)
    assert _score(mod).program.tensors[0].dtype is torch.float32
    layer.half()
    assert _score(mod).program.tensors[0].dtype is torch.float16


def test_globals_are_followed(monkeypatch: pytest.MonkeyPatch):
    mod = lambda b, h, q, kv: kv < LIMIT
    assert trace_mask(mod, CPU).numbers == (3,)
    monkeypatch.setitem(globals(), "LIMIT", 5)
    assert trace_mask(mod, CPU).numbers == (5,)
    tensor = torch.tensor(4)
    monkeypatch.setitem(globals(), "LIMIT", tensor)
    assert trace_mask(mod, CPU).tensors[0] is tensor


def test_helpers_are_followed():
    def make(helper: Any) -> Any:
        return lambda s, b, h, q, kv: helper(s) + 1

    def scaled(by: float) -> Any:
        return lambda s: s * by

    values = [_value(_score(make(scaled(by)))) for by in (2.0, 3.0, 4.0)]
    assert values == [4.0, 5.5, 7.0]
    assert _traces(lambda: _score(make(scaled(9.0)))) == 0
    assert _value(_score(make(lambda s: -s))) == -0.5


def test_a_mod_may_ask_whether_a_capture_is_a_tensor():
    """As token_tree and offset do (a tree of drafts is another one in every step)."""

    def make(by: Any) -> Any:
        return lambda s, b, h, q, kv: s + (by[b] if isinstance(by, TENSOR) else by)

    assert _value(_score(make(torch.tensor([4.0])))) == 5.5
    assert _traces(lambda: _score(make(torch.tensor([8.0])))) == 0
    assert _value(_score(make(torch.tensor([8.0])))) == 9.5
    assert _value(_score(make(2.0))) == 3.5
    assert _value(_score(make(torch.tensor([1.0])))) == 2.5


def test_helpers_may_reach_each_other():
    """Visiting what a mod depends on ends, and stays linear, whatever calls what."""

    def make(scale: float) -> Any:
        def down(x, n):
            return x * scale if n == 0 else up(x, n - 1)

        def up(x, n):
            return x + 1 if n == 0 else down(x, n - 1)

        return lambda s, b, h, q, kv: up(s, 3) + down(s, 0) + up(s, 0)

    values = [_value(_score(make(scale))) for scale in (2.0, 3.0, 4.0, 2.0)]
    assert values == [1.5 * scale * 2 + 2.5 for scale in (2.0, 3.0, 4.0, 2.0)]


def test_two_captures_may_be_one_object():
    def make(a: torch.Tensor, c: torch.Tensor) -> Any:
        return lambda s, b, h, q, kv: s + a[q] - c[kv]

    x, y = torch.arange(5.0), torch.arange(5.0) * 10
    assert len(_score(make(x, x)).tensors) == 1
    assert _value(_score(make(x, y))) == 1.5 + 2 - 10
    assert _value(_score(make(y, y))) == 1.5 + 20 - 10


def test_partials_bind_their_arguments():
    def mod(scale: float, table: torch.Tensor, s, b, h, q, kv, *, shift: int = 0):
        return s * scale + table[h] + shift

    for scale in (2.0, 3.0, 4.0):
        bound = _score(functools.partial(mod, scale, torch.ones(1), shift=7))
        assert _value(bound) == 1.5 * scale + 8
    assert _traces(lambda: _score(functools.partial(mod, 9.0, torch.ones(4), shift=8))) == 0


class _Holder:
    step = 1

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale
        self.table = torch.full((4,), scale)
        self.names = {"near": torch.zeros(3), "far": [torch.ones(4), 2]}
        self.computed_from = 1.0

    def mod(self, s, b, h, q, kv):
        return s * self.scale

    def deep(self, s, b, h, q, kv):
        return self.mod(s, b, h, q, kv) + self.table[q] * self.step

    def closure(self) -> Any:
        return lambda s, b, h, q, kv: s + self.table[q] * self.names["far"][1]

    @property
    def computed(self) -> float:
        return self.computed_from

    def by_property(self, s, b, h, q, kv):
        return s * self.computed

    def by_getattr(self, s, b, h, q, kv):
        return s * getattr(self, "computed_from")  # noqa: B009

    def by_itself(self, s, b, h, q, kv):
        return _scale_of(self) * s

    def counting(self, s, b, h, q, kv):
        self.computed_from += 1
        return s * self.computed_from

    def __call__(self, s, b, h, q, kv):
        return s - self.scale


def _scale_of(holder: _Holder) -> float:
    return holder.computed_from


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.arange(4.0))
        self.inner = torch.nn.Linear(1, 4)
        self.register_buffer("slopes", torch.ones(4))

    def mod(self, s, b, h, q, kv):
        return s + self.bias[q] + self.inner.weight[kv, 0] * self.slopes[h]


def test_attributes_of_objects_are_followed():
    """Also methods that methods call, class attributes, containers and closures over self."""
    for pick in (
        lambda o: o.mod, lambda o: o.deep, lambda o: o.closure(), lambda o: o,
        lambda o: functools.partial(o.deep),
    ):  # fmt: skip
        captures.clear()
        holder = _Holder()
        first = _value(_score(pick(holder)))
        assert _traces(lambda p=pick, o=holder: _score(p(o))) == 0
        assert _value(_score(pick(_Holder(3.0)))) != first
        assert _value(_score(pick(_Holder(2.0)))) == first


def test_changed_attributes_are_seen():
    holder = _Holder()
    values = [_value(_score(holder.deep))]
    holder.scale = 5.0
    values.append(_value(_score(holder.deep)))
    holder.step = 3
    values.append(_value(_score(holder.deep)))
    holder.table = torch.zeros(4)
    values.append(_value(_score(holder.deep)))
    holder.mod = lambda s, b, h, q, kv: s * 100  # type: ignore[method-assign]
    values.append(_value(_score(holder.deep)))
    assert values == [5.0, 9.5, 13.5, 7.5, 150.0]
    closure = holder.closure()
    assert _value(_score(closure)) == 1.5
    holder.names["far"][1] = 7
    holder.table += 1
    assert _value(_score(closure)) == 8.5


def test_parameters_and_buffers_of_modules_are_followed():
    layer, other = _Layer(), _Layer()
    bound = _score(layer.mod)
    assert {id(t) for t in bound.tensors} == {
        id(layer.bias), id(layer.inner.weight), id(layer.slopes)
    }  # fmt: skip
    second: list[BoundProgram] = []
    assert _traces(lambda: second.append(_score(other.mod))) == 0
    assert second[0].program is bound.program
    assert any(t is other.bias for t in second[0].tensors)
    other.bias.requires_grad_(False)
    assert _traces(lambda: _score(other.mod)) == 1


def test_objects_used_in_other_ways_are_traced_every_time():
    for name in ("by_property", "by_getattr", "by_itself", "counting"):
        holder = _Holder()
        before = _value(_score(getattr(holder, name)))
        holder.computed_from = 7.0
        assert _value(_score(getattr(holder, name))) != before
        assert _traces(lambda o=holder, n=name: _score(getattr(o, n))) == 1


def test_containers_that_hold_themselves_are_no_trap():
    loop: list[Any] = [2.0]
    loop.append(loop)
    assert _value(_score(lambda s, b, h, q, kv: s * loop[0])) == 3.0


def test_what_may_change_is_looked_at_every_time():
    holder, numbers, state = _Holder(), [2.0], {"scale": 2.0}
    clock = iter(range(100))

    def counted(s, b, h, q, kv):
        return s * next(clock)

    with_attribute = lambda s, b, h, q, kv: s * with_attribute.scale
    with_attribute.scale = 2.0  # type: ignore[attr-defined]
    mods = [
        holder.mod,
        lambda s, b, h, q, kv: s * numbers[0],
        lambda s, b, h, q, kv: s * state["scale"],
        with_attribute,
        counted,
    ]
    for mod in mods:
        before = _value(_score(mod))
        holder.scale = state["scale"] = numbers[0] = with_attribute.scale = 3.0  # type: ignore
        assert _value(_score(mod)) != before
        holder.scale = state["scale"] = numbers[0] = with_attribute.scale = 2.0  # type: ignore


def test_data_read_on_the_host_is_read_again():
    limit, log_slope = torch.tensor(3), torch.zeros(1)
    masked = lambda b, h, q, kv: kv < limit.item()
    branching = lambda b, h, q, kv: kv < 1 if limit > 3 else kv < 9
    derived = lambda s, b, h, q, kv: s * torch.exp(log_slope)[h]
    assert trace_mask(masked, CPU).numbers == (3,)
    assert _value(_score(derived)) == 1.5
    first = trace_mask(branching, CPU).program
    limit += 4
    log_slope += 1
    assert trace_mask(masked, CPU).numbers == (7,)
    assert _value(_score(derived)) == pytest.approx(1.5 * 2.7182818)
    assert trace_mask(branching, CPU).program != first


def test_sizes_that_a_mod_reads_are_compared():
    def make(table: torch.Tensor) -> Any:
        return lambda s, b, h, q, kv: s + table[torch.clamp(kv, max=table.shape[0] - 1)]

    for n in (3, 5, 3, 2):
        table = torch.arange(float(n))
        assert _value(_score(make(table)), kv=4) == 1.5 + min(4, n - 1)
    assert _traces(lambda: _score(make(torch.arange(5.0)))) == 0


def test_a_trace_of_rows_depends_on_their_lengths():
    def make(n: int, m: int) -> Any:
        u, v = torch.ones(2, n), torch.ones(2, m)
        return lambda s, b, h, q, kv: (u[h] * v[h]).sum()

    assert _value(_score(make(3, 3))) == 3
    assert _value(_score(make(1, 4))) == 4
    assert _value(_score(make(4, 4))) == 4
    with pytest.raises(TypeError, match="their lengths must agree"):
        _score(make(3, 4))
