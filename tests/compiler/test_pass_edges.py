"""What counts as an edge of a mask (ir/passes/edges.py). That edges mean what comparisons do is in
tests/kernels/interpreted/test_mask_edges.py, as kernels compute them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnloom.ir.node import Axes, Program
from attnloom.ir.passes.edges import Edge, Extremum, Form, Join, Value, edges
from attnloom.ir.passes.simplify import simplify
from attnloom.trace.tracer import trace_mask
from tests.kernels.edge_masks import BATCHES, DOCUMENTS, ENDS, FAR, HUGE, LIMITS, PREFIX, WORDS

REACH = 1 << 21
CLAMPED = "~"
WINDOW = 1024


def root_of(mask: Any, along: Axes, narrow: tuple[int, ...] = ()) -> str:
    """The form of a mask's output, as text; "" if it has none."""
    program = simplify(trace_mask(mask, torch.device("cpu")).program)
    form = edges(program, along, REACH, frozenset(narrow)).get(program.outputs[0])
    return "" if form is None else _text(program, form)


def _text(program: Program, form: Form) -> str:
    if isinstance(form, Edge):
        return f"{form.side} {_value(program, form.value)}"
    parts = (_text(program, p) if not isinstance(p, int) else "other" for p in form.parts)
    return f" {form.how} ".join(parts)


def _value(program: Program, value: Value) -> str:
    if isinstance(value, Extremum):
        return f"{value.how}({', '.join(_value(program, v) for v in value.values)})"
    found = ""
    for factor, i in value.terms:
        node = program.nodes[i]
        name = str(node.attr) if node.op == "input" else node.op
        found += f"{factor:+d} {name}{CLAMPED if i == value.clamped else ''} "
    return f"{found}{value.constant:+d}"


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < WINDOW)


@pytest.mark.parametrize(
    ("mask", "keys", "queries"),
    [
        (lambda b, h, q, kv: q >= kv, "le +1 q +0", "ge +1 kv +0"),
        (window, "le +1 q +0 and ge +1 q -1 number~ +1", "ge +1 kv +0 and le +1 kv +1 number~ -1"),
        (lambda b, h, q, kv: (kv < BATCHES[b]) | (kv <= q), "le max(+1 cast~ -1, +1 q +0)", None),
        (lambda b, h, q, kv: (kv < ENDS[q]) & (kv <= q), "le min(+1 load -1, +1 q +0)", None),
        (lambda b, h, q, kv: ~((kv < 20) | (kv < q - 9)), "ge max(+20, +1 sub +0)", None),
        (lambda b, h, q, kv: 2 * q - kv == 3, "eq +1 mul -3", ""),
        (lambda b, h, q, kv: q - kv + q > 5, "le +2 q -6", ""),
        (lambda b, h, q, kv: (q // 2 < kv) & (kv != h), "ge +1 shr +1 and ne +1 h +0", None),
        (lambda b, h, q, kv: (DOCUMENTS[q] == DOCUMENTS[kv]) & (q >= kv), None, None),
        (lambda b, h, q, kv: q // 2 == kv // 2, "", ""),
        (lambda b, h, q, kv: (q - kv) % 3 == 0, "", ""),
        (lambda b, h, q, kv: abs(q - kv) < 5, "", ""),
        (lambda b, h, q, kv: q.float() >= kv, "", ""),
        (lambda b, h, q, kv: kv.to(torch.int16) >= 0, "", ""),
    ],
)  # fmt: skip
def test_edges(mask: Any, keys: str | None, queries: str | None) -> None:
    for along, wanted in ((Axes.KV, keys), (Axes.Q, queries)):
        if wanted is not None:
            assert root_of(mask, along, (0,)) == wanted


def test_what_may_wrap_has_no_edge() -> None:
    assert root_of(lambda b, h, q, kv: kv <= HUGE[b], Axes.KV) == "le +1 load~ +0"
    assert root_of(lambda b, h, q, kv: kv + HUGE[b] <= q, Axes.KV) == ""
    assert root_of(lambda b, h, q, kv: kv + PREFIX[b] <= q, Axes.KV) == ""
    assert root_of(lambda b, h, q, kv: kv + PREFIX[b] <= q, Axes.KV, (0,)) != ""
    assert root_of(lambda b, h, q, kv: -kv <= LIMITS[b], Axes.KV) == "ge -1 load~ +0"
    one = torch.tensor(1, dtype=torch.int32)
    assert root_of(lambda b, h, q, kv: kv.to(torch.int32) + WORDS[b] < one, Axes.KV) == ""


def test_at_most_one_value_is_clamped() -> None:
    """Two that are far could cancel each other."""
    assert root_of(lambda b, h, q, kv: kv + WORDS[b] <= q, Axes.KV) != ""
    assert root_of(lambda b, h, q, kv: kv + WORDS[b] <= q + WORDS[1 - b], Axes.KV) == ""
    assert root_of(lambda b, h, q, kv: kv - q + FAR < WORDS[b], Axes.KV) == ""
    assert root_of(lambda b, h, q, kv: kv + WORDS[b] + WORDS[b] <= q, Axes.KV) == ""


def test_edges_within_other_conditions_are_found() -> None:
    mask = lambda b, h, q, kv: torch.where(q < 9, kv < 3, q >= kv) ^ (DOCUMENTS[kv] == 1)
    program = simplify(trace_mask(mask, torch.device("cpu")).program)
    found = edges(program, Axes.KV, REACH, frozenset())
    assert sum(isinstance(form, Edge) for form in found.values()) >= 2
    assert not any(isinstance(form, Join) for i, form in found.items() if i == program.outputs[0])
