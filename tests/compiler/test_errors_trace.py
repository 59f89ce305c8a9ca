"""Texts of trace errors. Each names the mod, the place, the operation and what to write instead."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from attnloom.errors import AttnloomError, TraceError
from attnloom.ir.node import DType
from attnloom.trace.tracer import trace_mask, trace_score

CPU = torch.device("cpu")
FILE = "test_errors_trace.py"
table = torch.ones(4, 4)
long_row = torch.ones(4, 300)
learned = torch.ones(4, requires_grad=True)


def _message(mod: Any, kind: str = "score_mod") -> str:
    with pytest.raises(TraceError) as caught:
        if kind == "score_mod":
            trace_score(mod, DType.F32, CPU)
        else:
            trace_mask(mod, CPU)
    return str(caught.value)


def test_the_whole_text():
    def rel_bias(score, b, h, q_idx, kv_idx):
        ordered = torch.sort(score)
        return ordered[0]

    line = rel_bias.__code__.co_firstlineno + 1
    assert _message(rel_bias) == (
        f"score_mod 'test_the_whole_text.rel_bias' ({FILE}:{line}) calls torch.sort on a traced "
        "value; a mod is evaluated one score at a time, so there is nothing to sort. Sort outside "
        "and capture the result.\n    ordered = torch.sort(score)"
    )
    assert issubclass(TraceError, AttnloomError)
    assert issubclass(TraceError, TypeError)


def _helper(x):
    return x.item()


def test_the_place_is_where_it_happens():
    """In a helper, the line of the helper; the name stays the mod's."""
    line = _helper.__code__.co_firstlineno + 1
    text = _message(functools.partial(lambda w, s, b, h, q, kv: _helper(s * w), 2.0))
    assert text.startswith(
        f"score_mod 'test_the_place_is_where_it_happens.<lambda>' ({FILE}:{line}) calls Tensor.item"
    )
    assert text.endswith("\n    return x.item()")


def _add_in_place(s, b, h, q, kv):
    s += 1
    return s


def _multiply_in_place(s, b, h, q, kv):
    return s.mul_(2)


def _forget_return(s, b, h, q, kv):
    s * 2


def _assert_traced(s, b, h, q, kv):
    assert q >= 0
    return s


def _no_grad(s, b, h, q, kv):
    with torch.no_grad():
        return s * learned[h]


def _assign(s, b, h, q, kv):
    table[q, kv] = s
    return s


def _in_eval(s, b, h, q, kv):
    return torch.vmap(lambda x: x + s)(table)


SCORE_ERRORS: list[tuple[Any, str]] = [
    (_add_in_place, "calls `+=` or Tensor.add_ on a traced value; a traced value cannot be "
     "changed. Write `x = x + y` instead of `x += y`."),
    (_multiply_in_place, "calls `*=` or Tensor.mul_ on a traced value; a traced value cannot be "
     "changed. Write `x = x * y` instead of `x *= y`."),
    (lambda s, b, h, q, kv: s.clamp_(0, 1), "calls Tensor.clamp_ on a traced value; a traced value "
     "cannot be changed in place. Use `x = x.clamp(...)`."),
    (lambda s, b, h, q, kv: torch.exp(s, out=s), "calls torch.exp with out=; a traced value cannot "
     "be changed in place. Use the result."),
    (lambda s, b, h, q, kv: torch.nn.functional.relu(s, inplace=True), "calls "
     "torch.nn.functional.relu with inplace=; a traced value cannot be changed in place."),
    (_assign, "assigns to an element of a tensor; captured tensors and traced values are read-only "
     "in a mod. Use torch.where."),
    (lambda s, b, h, q, kv: s + table.add_(1)[q, kv], "changes a captured tensor by `+=` or "
     "Tensor.add_; a mod must not have side effects. Change it outside."),
    (_forget_return, "returns None; did you forget `return`?"),
    (lambda s, b, h, q, kv: (s, q), "returns a tuple; it must return the changed score, a scalar."),
    (lambda s, b, h, q, kv: q >= kv, "returns a bool; pass it as a mask_mod to create_block_mask, "
     'or return torch.where(condition, score, float("-inf")).'),
    (lambda s, b, h, q, kv: s + table[q], "returns a tensor of shape [4]; a mod is evaluated one "
     "score at a time and returns the changed score, a scalar. Index it down to a scalar, or "
     "reduce it."),
    (lambda s, b, h, q, kv: float(s), "calls float() or a function of `math` on a traced value; "
     "its value exists only inside the kernel. Use `.float()` instead of `float()`, and "
     "torch.sqrt, torch.floor, ... instead of math's."),
    (lambda s, b, h, q, kv: math.sqrt(s), "calls float() or a function of `math` on a traced"),
    (lambda s, b, h, q, kv: s + int(q), "calls int() on a traced value; its value exists only "
     "inside the kernel. Use `.long()` instead of `int()`."),
    (lambda s, b, h, q, kv: s + sum(range(q)), "uses a traced value in range() or as the index of "
     "a list; its value exists only inside the kernel. To index a list with it, stack the list "
     "into one tensor outside and capture that; `range()` needs a number that is known outside."),
    (lambda s, b, h, q, kv: s + table[0, kv:q].sum(), "slices a tensor from or to a traced "
     "position; how long a slice is must be known before the call. Sum over a range by two "
     "elements of a captured running sum, sums[stop] - sums[start]; take one element by an index."),
    (lambda s, b, h, q, kv: s * [1.0, 2.0][h], "uses a traced value in range() or as the index of"),
    (lambda s, b, h, q, kv: s + np.ones(4)[q], "gives a traced value to numpy; its value exists "
     "only inside the kernel. Use torch functions, and capture numpy arrays as tensors "
     "(torch.as_tensor(array))."),
    (lambda s, b, h, q, kv: np.exp(s), "gives a traced value to numpy"),
    (lambda s, b, h, q, kv: s + torch.rand(()), "calls torch.rand; kernels recompute a mod in the "
     "backward, so that it must give the same value every time. Draw the numbers outside and "
     "capture them: noise[b, h, q_idx, kv_idx]."),
    (lambda s, b, h, q, kv: torch.nn.functional.dropout(s), "calls torch.nn.functional.dropout on "
     "a traced value; kernels recompute a mod"),
    (lambda s, b, h, q, kv: torch.rand_like(s), "calls torch.rand_like on a traced value; kernels"),
    (lambda s, b, h, q, kv: torch.softmax(s, 0), "calls torch.softmax on a traced value; the "
     "softmax over keys is attention's own; a mod only changes one score."),
    (lambda s, b, h, q, kv: torch.stack([s, s]).sum(), "calls torch.stack on a traced value; a mod "
     "is evaluated one score at a time, so there is nothing to arrange."),
    (lambda s, b, h, q, kv: torch.cumsum(table[q], 0)[0], "calls torch.cumsum on a traced value; a "
     "mod is evaluated one score at a time, so there is nothing to accumulate."),
    (lambda s, b, h, q, kv: torch.masked_select(s, q > kv), "calls torch.masked_select on a traced "
     "value; the size of its result depends on data. Use torch.where."),
    (lambda s, b, h, q, kv: torch.special.bessel_j0(s), "calls torch.special.bessel_j0 on a traced "
     "value; attnloom has no fused form of it. Write it with elementwise functions, or compute it "
     "outside and capture the result."),
    (lambda s, b, h, q, kv: s + table[s, 0], "indexes dimension 0 with a float32; indices must be "
     "integers. Use .long(), after torch.floor or torch.round if meant."),
    (lambda s, b, h, q, kv: s + table[q > kv, 0], "indexes dimension 0 with a bool; torch reads "
     "bool and uint8 indices as masks. Use .long() to index by value."),
    (lambda s, b, h, q, kv: s + table[q, kv, h], "indexes a tensor of 2 dimensions with 3 indices; "
     "use one index for each dimension at most."),
    (lambda s, b, h, q, kv: s + table[7, kv], "indexes dimension 0 of length 4 with 7; valid are "
     "-4 to 3."),
    (lambda s, b, h, q, kv: s + table[[0, 1], q], "indexes dimension 0 with a list ([0, 1]); do "
     "this part of the indexing outside the mod and capture the result."),
    (lambda s, b, h, q, kv: s + table[q][1:3].sum(), "takes [1:3] of a traced row; do this part of "
     "the indexing outside the mod and capture the result."),
    (lambda s, b, h, q, kv: s + long_row[q].sum(), "reduces 300 elements (shape [300]); a "
     "reduction runs once a score and may have 256 elements at most. Reduce outside, or fold the "
     "sum into the query and key as extra head dimensions."),
    (lambda s, b, h, q, kv: s + table[q].max(0).values, "calls torch.max with a dimension, which "
     "also returns indices; use torch.amax(x, dim)."),
    (lambda s, b, h, q, kv: s if table[q] else 0, "asks for the truth of a vector [4]; use .any() "
     "or .all() on it."),
    (lambda s, b, h, q, kv: s + (table[q] * long_row[kv]).sum(), "combines vectors of shapes [4] "
     "and [300]; their lengths must agree."),
    (lambda s, b, h, q, kv: s + -(q > kv), "calls `-` on a bool; kernels do arithmetic on numbers. "
     "Cast with .int() first."),
    (lambda s, b, h, q, kv: s & 1, "calls `&` on a float; bits exist in integers and bools."),
    (lambda s, b, h, q, kv: s + 1j, "computes with a complex (1j); a mod computes with tensors and "
     "numbers."),
    (lambda s, b, h, q, kv: s + torch.ones(4, dtype=torch.complex64)[q], "uses captured tensor [4] "
     "complex64, whose dtype kernels cannot load; convert it outside, for example with .float() or "
     ".int()."),
    (lambda s, b, h, q, kv: s.detach(), "detaches a value that carries a gradient; kernels "
     "differentiate the whole mod. Detach the captured tensor outside instead."),
    (_no_grad, "computes under another grad mode than its caller's (torch.no_grad() in the mod); "
     "kernels differentiate the whole mod."),
    (lambda s, b, h, q, kv: s.backward(), "calls Tensor.backward on a traced value; gradients flow "
     "through a mod by themselves; call backward on the loss."),
    (_assert_traced, "asserts a traced condition; kernels cannot raise. Check it outside."),
    (_in_eval, "gives a traced value to aten.expand.default, which attnloom cannot see into"),
    (lambda s, b, h, q, kv: s.to("meta"), "moves a traced value to meta; it lives on cpu."),
    (lambda s, b, h, q, kv: s.to(torch.complex64), "converts to torch.complex64; kernels compute "
     "in bool, int8 to int64, float32, float64."),
    (lambda s, b, h, q, kv: s + 2**80 * q, "computes with 1208925819614629174706176; integers in a "
     "mod must fit in 64 bits."),
    (lambda b, h, q, kv: q, "has the signature (b, h, q, kv); it is called as score_mod(score, b, "
     "h, q_idx, kv_idx) (too many positional arguments). With four parameters it looks like a "
     "mask_mod: pass block_mask=create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) instead. If it "
     "changes scores, add the parameter `score` in front."),
    (lambda s, q, kv: s, "(too many positional arguments). Change its parameters, or bind the "
     "others with functools.partial."),
    (lambda s, b, h, q, kv: s * {0: 1.0, 1: 2.0}[h], "looks a traced value up in a dictionary; its "
     "value exists only inside the kernel. Stack the entries into one tensor outside, capture that "
     "and index it."),
    # an IndexError with advice that had nothing to do with it
    (lambda s, b, h, q, kv: s + table[9, 0], "indexes dimension 0 of length 4 with 9; valid are -4 "
     "to 3."),
    (lambda s, b, h, q, kv: s + table[0][-7], "indexes dimension 0 of length 4 with -7; valid are"),
    (lambda s, b, h, q, kv: s + table[0, 0, 0], "indexes a tensor of 2 dimensions with 3 indices"),
    # "a traced value has no attribute": it is a number on one path
    (lambda s, b, h, q, kv: s + max(q - kv, 0).float(), "raises AttributeError: 'int' object has "
     "no attribute 'float'; on one path of the mod it is a Python number and no tensor: "
     "`max(x, 0)`, `min`, `and`, `or` and `if` give one of their sides as it is. Use "
     "x.clamp(min=0), torch.maximum or torch.where, which give tensors."),
    (lambda s, b, h, q, kv: s + torch.sqrt(max(s, 0.0)), "must be Tensor, not float; on one path"),
    (lambda s, b, h, q, kv: s + (2).float(), "has no attribute 'float'; it is a Python number "
     "there and no tensor. Compute with it as a number, or make it one with "
     "torch.full_like(score, number)."),
    (lambda s, b, h, q, kv: s + round(q / 4), "calls round() on a traced value; use torch.round."),
    (lambda s, b, h, q, kv: s + torch.nn.functional.linear(table[q], table[0]), "calls "
     "torch.nn.functional.linear on a traced value; it is not among the small reductions. Apply it "
     "to the whole table outside the mod, and index the result."),
    (lambda s, b, h, q, kv: s + torch.norm(table[q]), "calls torch.norm on a traced value; it is "
     "not among the small reductions. Write it with sums of a row: `(a * a).sum().sqrt()`."),
    (lambda s, b, h, q, kv: torch.nn.functional.gelu(s, approximate="fast"), "calls gelu "
     "with approximate='fast'; torch has none and tanh."),
    (lambda s, b, h, q, kv: torch.div(s, 2, rounding_mode="up"), "divides with rounding_mode='up'; "
     "torch has None, 'floor' and 'trunc'."),
]  # fmt: skip


@pytest.mark.parametrize(("mod", "expected"), SCORE_ERRORS)
def test_score_errors(mod: Any, expected: str) -> None:
    text = _message(mod)
    assert text.startswith("score_mod '")
    assert f"({FILE}:" in text
    assert expected in text


def _endless(b, h, q, kv):
    while kv > 0:
        kv = kv - 1
    return kv == 0


def _too_many(b, h, q, kv):
    return sum(1 if q == i else 0 for i in range(7)) == 1


MASK_ERRORS: list[tuple[Any, str]] = [
    (_endless, "branches on traced values in more than 64 ways; every combination of `if`, `and`, "
     "`or`, `min` and `max` is traced as its own path. Use torch.where, `&`, `|`, torch.minimum "
     "and torch.maximum, which do not branch."),
    (_too_many, "branches on traced values in more than 64 ways"),
    (lambda b, h, q, kv: q - kv, "returns int64; a mask_mod must return a bool. Compare "
     "explicitly, for example `!= 0`."),
    (lambda b, h, q, kv: table[q, kv], "returns float32; a mask_mod must return a bool."),
    (lambda b, h, q, kv: "yes", "returns a str; it must return one bool."),
    (lambda b, h, q, kv: None, "returns None; did you forget `return`?"),
    (lambda q, kv: q > kv, "it is called as mask_mod(b, h, q_idx, kv_idx)"),
    (lambda b, h, q, kv: table[q] > 0, "returns a tensor of shape [4]; a mod is evaluated one "
     "score at a time and returns one bool."),
]  # fmt: skip


@pytest.mark.parametrize(("mod", "expected"), MASK_ERRORS)
def test_mask_errors(mod: Any, expected: str) -> None:
    text = _message(mod, "mask_mod")
    assert text.startswith("mask_mod '")
    assert expected in text


def test_something_that_is_no_function():
    assert _message(0.5) == (
        "a score_mod must be a function score_mod(score, b, h, q_idx, kv_idx), got float 0.5; "
        "define one, or pass None."
    )


def test_a_capture_on_another_device_is_named():
    slopes = torch.ones(2, device="meta")
    text = _message(lambda s, b, h, q, kv: s * slopes[h])
    assert (
        "uses captured tensor 'slopes' [2] float32 on meta while the inputs are on cpu; kernels "
        "read captured tensors in place. Move it with .to('cpu')." in text
    )


def test_sparse_captures_are_refused():
    sparse = torch.eye(3).to_sparse()
    text = _message(lambda s, b, h, q, kv: s * sparse[q, kv])
    assert "'sparse' [3, 3] float32, which is not a plain strided tensor" in text


def test_a_traced_value_that_leaves_its_mod():
    kept = []

    def mod(s, b, h, q, kv):
        kept.append(s)
        return s

    trace_score(mod, DType.F32, CPU)
    with pytest.raises(TraceError, match="lets a traced value out, which then meets add"):
        torch.add(kept[0], 1)


def test_errors_of_the_mod_itself_pass_through():
    """What is no mistake of tracing keeps its type and text."""

    def mod(s, b, h, q, kv):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace_score(mod, DType.F32, CPU)


def test_an_error_is_not_remembered():
    """A mod that failed once works once its captures are right."""
    state = torch.ones(2, device="meta")

    def make(slopes: torch.Tensor) -> Any:
        return lambda s, b, h, q, kv: s * slopes[h]

    _message(make(state))
    assert trace_score(make(torch.ones(2)), DType.F32, CPU).tensors
