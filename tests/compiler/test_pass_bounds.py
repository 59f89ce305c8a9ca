"""Intervals contain every value; common masks are decided on every uniform tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnloom.ir.builder import Builder, extract
from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType, Program, TensorSpec
from attnloom.ir.passes.bounds import bounds, fits_32_bits, node_intervals
from tests.compiler.programs import bind, positions, programs

_RANGES = st.tuples(st.integers(0, 40), st.integers(1, 6)).map(lambda t: range(t[0], t[0] + t[1]))


def _inside(value: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> bool:
    if value.dtype is torch.bool:
        return bool(((value | ~lo) & (hi | ~value)).all())
    if value.dtype.is_floating_point:
        value = value.double()
        nan = value.isnan() & (lo == -torch.inf) & (hi == torch.inf)
        return bool((nan | ((value >= lo) & (value <= hi))).all())
    return bool(((value >= lo) & (value <= hi)).all())


@settings(deadline=None, max_examples=150)
@given(programs(result=DType.F32), _RANGES, _RANGES, st.integers(0, 99), st.booleans())
def test_every_lane_is_inside(
    program: Program, rows: range, columns: range, seed: int, float64: bool
) -> None:
    bound = bind(program, seed)
    inputs = positions(rows=rows, columns=columns, seed=seed)
    ends = {name: (value.amin(), value.amax()) for name, value in inputs.items() if name != "score"}
    nodes = range(len(program.nodes))
    found = node_intervals(bound, ends, nodes=nodes)
    everything = BoundProgram(
        Program(program.nodes, tuple(nodes), program.tensors, program.numbers, program.reductions),
        bound.tensors,
        bound.numbers,
    )
    for index, value in enumerate(interpret(everything, inputs, float64=float64)):
        interval = found[index]
        assert _inside(value, interval.lo, interval.hi), (index, program.nodes[index], interval)


def _mask(name: str) -> tuple[Program, tuple[torch.Tensor, ...], tuple[int, ...]]:
    b = Builder([TensorSpec(torch.int64, 1)], [DType.I64])
    q, kv = b.input("q"), b.input("kv")
    number = b.number(0, DType.I64)
    distance = b.node("sub", q, kv)
    block = b.const(16, DType.I64)
    outputs = {
        "causal": lambda: b.node("ge", q, kv),
        "window": lambda: b.node("and", b.node("ge", q, kv), b.node("le", distance, number)),
        "band": lambda: b.node("le", b.node("abs", distance), number),
        "blocks": lambda: b.node("ge", b.node("floordiv", q, block), b.node("floordiv", kv, block)),
        "document": lambda: b.node("eq", b.load(0, q), b.load(0, kv)),
        "prefix": lambda: b.node("or", b.node("ge", q, kv), b.node("lt", kv, number)),
        "shifted": lambda: b.node("ge", b.node("add", q, number), kv),
        "float": lambda: b.node(
            "le",
            b.node("sub", b.cast(q, DType.F32), b.cast(kv, DType.F32)),
            b.cast(number, DType.F32),
        ),
    }
    program = b.finish(outputs[name]())
    documents = torch.arange(64).div(9, rounding_mode="floor")
    return program, (documents,), (13,)


@pytest.mark.parametrize(
    "name",
    ["causal", "window", "band", "blocks", "document", "prefix", "shifted", "float"],
)
@pytest.mark.parametrize("tile", [1, 4, 7, 16])
def test_uniform_tiles_are_decided(name: str, tile: int) -> None:
    program, tensors, numbers = _mask(name)
    bound = BoundProgram(program, tensors, numbers)
    lanes = torch.arange(64)
    dense = interpret(bound, {"q": lanes[:, None], "kv": lanes[None]})[0]
    starts = torch.arange(0, 64, tile)
    ends = (starts + tile - 1).clamp(max=63)
    rows, columns = (starts[:, None], ends[:, None]), (starts[None], ends[None])
    overrides = {}
    for index, node in enumerate(program.nodes):
        if node.op == "load":  # evaluated exactly on its axis, as a mask builder does
            part = BoundProgram(extract(program, index), tensors, numbers)
            axis = "q" if program.nodes[node.args[0]].attr == "q" else "kv"
            value = interpret(part, {axis: lanes})[0]
            pieces = value.split(tile)
            pair = [torch.stack([f(p) for p in pieces]) for f in (torch.amin, torch.amax)]
            shape = (-1, 1) if axis == "q" else (1, -1)
            overrides[index] = (pair[0].reshape(shape), pair[1].reshape(shape))
    lo, hi = bounds(bound, {"q": rows, "kv": columns}, overrides)
    for i, start in enumerate(starts.tolist()):
        for j, column in enumerate(starts.tolist()):
            tile_lanes = dense[start : start + tile, column : column + tile]
            assert lo[i, j].item() == tile_lanes.all().item(), (i, j)
            assert hi[i, j].item() == tile_lanes.any().item(), (i, j)


def test_nan_in_a_captured_tensor_decides_nothing() -> None:
    b = Builder([TensorSpec(torch.float32, 1)])
    loaded = b.load(0, b.node("sub", b.input("q"), b.input("kv")))
    less = b.finish(b.node("lt", loaded, b.const(10.0, DType.F32)))
    differs = b.finish(b.node("ne", loaded, b.const(10.0, DType.F32)))
    ends = {name: (torch.tensor(0), torch.tensor(5)) for name in ("q", "kv")}
    for program in (less, differs):
        with_nan = BoundProgram(program, (torch.tensor([1.0, float("nan")]),))
        lo, hi = bounds(with_nan, ends)
        assert (lo.item(), hi.item()) == (False, True)
        without = BoundProgram(program, (torch.tensor([1.0, 2.0]),))
        assert bounds(without, ends)[0].item() is True


def test_overrides_hide_what_is_below() -> None:
    b = Builder([TensorSpec(torch.int64, 1)])
    program = b.finish(b.node("gt", b.load(0, b.input("q")), b.const(3, DType.I64)))
    (load,) = [i for i, n in enumerate(program.nodes) if n.op == "load"]
    known = {load: (torch.tensor([0, 4]), torch.tensor([3, 9]))}
    lo, hi = bounds(BoundProgram(program, (torch.zeros(2).long(),)), {}, known)
    assert (lo.tolist(), hi.tolist()) == ([False, True], [False, True])


def test_a_missing_range_is_an_error() -> None:
    b = Builder()
    program = b.finish(b.node("ge", b.input("q"), b.input("kv")))
    with pytest.raises(KeyError, match="kv"):
        bounds(BoundProgram(program), {"q": (torch.tensor(0), torch.tensor(3))})


@pytest.mark.parametrize(
    ("factor", "length", "fits"),
    [(1, 2**20, True), (2**11, 2**20, True), (2**11 + 1, 2**20, False), (2**32, 1, False)],
)
def test_fits_32_bits(factor: int, length: int, fits: bool) -> None:
    b = Builder((), [DType.I64])
    product = b.node("mul", b.input("q"), b.number(0, DType.I64))
    program = b.finish(b.node("ge", product, b.input("kv")))
    ends = {"q": (0, length - 1), "kv": (0, length - 1)}
    assert fits_32_bits(BoundProgram(program, (), (factor,)), ends) is fits


def test_fits_32_bits_counts_captured_integers_as_29_bits() -> None:
    b = Builder([TensorSpec(torch.int64, 1)])
    loaded = b.load(0, b.input("q"))
    for factor, fits in ((2, True), (8, False)):
        program = b.finish(b.node("mul", loaded, b.const(factor, DType.I64)))
        bound = BoundProgram(program, (torch.tensor([1]),))
        assert fits_32_bits(bound, {"q": (0, 9)}) is fits
