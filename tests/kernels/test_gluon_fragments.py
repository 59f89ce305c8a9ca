"""Every mod of the tables becomes functions that Gluon's front end takes, with the layouts of the
contract in backends/gluon/fragments.py; values are compared on the device (test_gpu_gluon_*)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels.gluon_triton import needs_gluon

needs_gluon(also=True)
from triton._C.libtriton import ir  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from attnloom.backends.gluon import emit, fragments  # noqa: E402
from attnloom.backends.triton.arguments import bind  # noqa: E402
from attnloom.backends.triton.config import KernelConfig  # noqa: E402
from attnloom.backends.triton.emit import Target  # noqa: E402
from attnloom.ir.node import Axes, BoundProgram, DType  # noqa: E402
from attnloom.ir.passes.simplify import simplify  # noqa: E402
from attnloom.trace.tracer import trace_mask, trace_score  # noqa: E402
from benchmarks.signatures import type_of  # noqa: E402
from tests.compiler import trace_masks, trace_rows, trace_scores  # noqa: E402, F401  fill the table
from tests.compiler.trace_table import MASK_MODS, SCORE_MODS  # noqa: E402
from tests.kernels.cross_compile import TARGETS  # noqa: E402

CPU = torch.device("cpu")


@dataclass(frozen=True, repr=False)
class ProbeConfig(KernelConfig):
    QX: int
    IS_SCORE: bool
    F_HEAD: JITFunction
    F_ROW: JITFunction
    F_COLUMN: JITFunction
    F_BODY: JITFunction
    F_PIECES: JITFunction | None
    F_EDGES: JITFunction | None

    __hash__ = KernelConfig.__hash__


@gluon.jit
def probe(out, args, cfg: gl.constexpr):
    """One tile of scores through a fragment."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    q = gl.arange(0, 64, gl.SliceLayout(cfg.QX, L))
    k = gl.arange(0, 64, gl.SliceLayout(1 - cfg.QX, L))
    b, h = gl.program_id(0), gl.program_id(1)
    head = cfg.F_HEAD(args, b, h)
    row = cfg.F_ROW(args, head, b, h, q)
    column = cfg.F_COLUMN(args, head, b, h, k)
    places = out + gl.expand_dims(q, cfg.QX) * 64 + gl.expand_dims(k, 1 - cfg.QX)
    s = gl.load(places)
    if cfg.IS_SCORE:
        pieces = cfg.F_PIECES(args, head, b, h, b * 64, h * 64, 64, cfg.QX)
        s = cfg.F_BODY(args, head, row, column, b, h, q, k, pieces, s, cfg.QX)
    else:
        place = gl.arange(0, 64, gl.SliceLayout(0, L))
        if cfg.QX == 1:
            edges = cfg.F_EDGES(args, head, row, b, h, q, 0, b, True)
        else:
            edges = cfg.F_EDGES(args, head, column, b, h, k, 0, b, True)
        keep = cfg.F_BODY(args, head, row, column, edges, b, h, q, k, place, cfg.QX, True)
        s = gl.where(keep, s, float("-inf"))
    gl.store(places, s)


def front_end(fragment: fragments.Fragment, bound: BoundProgram, QX: int, is_score: bool) -> Any:
    """The probe's module as Gluon's front end makes it; raises where it refuses."""
    parts = (fragment.head, fragment.row, fragment.column, fragment.body)
    parts += (fragment.pieces, fragment.edges)
    arguments = (torch.empty(64, 64), bind(bound), ProbeConfig(QX, is_score, *parts))
    signature = {n: type_of(a) for n, a in zip(probe.arg_names, arguments, strict=True)}
    signature["cfg"] = "constexpr"
    source = GluonASTSource(probe, signature, {(2,): arguments[2]})
    target = TARGETS["sm_90"][0]
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": 4})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(),
        context,
    )  # fmt: skip


@pytest.mark.parametrize(("QX", "wide"), [(1, False), (0, True)])
@pytest.mark.parametrize("name", list(SCORE_MODS))
def test_score(name: str, QX: int, wide: bool) -> None:
    bound = trace_score(SCORE_MODS[name](), DType.F32, CPU)
    bound = BoundProgram(simplify(bound.program, False), bound.tensors, bound.numbers)
    fragment = fragments.score_fragment(bound.program, Target(True, wide, False))
    assert "tt.func" in str(front_end(fragment, bound, QX, True))


@pytest.mark.parametrize(("QX", "wide"), [(1, False), (0, False), (0, True)])
@pytest.mark.parametrize("name", list(MASK_MODS))
def test_mask(name: str, QX: int, wide: bool) -> None:
    bound = trace_mask(MASK_MODS[name](), CPU)
    bound = BoundProgram(simplify(bound.program), bound.tensors, bound.numbers)
    target, along = Target(True, wide, False, near=not wide), Axes.KV if QX else Axes.Q
    fragment = fragments.mask_fragment(bound.program, target, along)
    assert "tt.func" in str(front_end(fragment, bound, QX, False))


TABLES = {
    "bfloat16": torch.zeros(2, 4, 64, 64, dtype=torch.bfloat16),
    "float32": torch.zeros(2, 4, 64, 64),
    "bool": torch.zeros(2, 4, 64, 64, dtype=torch.bool),
    "int64": torch.zeros(2, 4, 64, 64, dtype=torch.int64),
    "float64": torch.zeros(2, 4, 64, 64, dtype=torch.float64),
}


def bound_score(score_mod: Any) -> BoundProgram:
    bound = trace_score(score_mod, DType.F32, CPU)
    return BoundProgram(simplify(bound.program, False), bound.tensors, bound.numbers)


@pytest.mark.parametrize(("inside", "lines"), [("i", False), ("-", False), ("-", True)])
@pytest.mark.parametrize(("QX", "wide"), [(1, False), (0, True)])
@pytest.mark.parametrize("name", TABLES)
def test_an_element_for_each_score_comes_in_pieces(
    name: str, QX: int, wide: bool, inside: str, lines: bool
) -> None:
    table = TABLES[name]
    bound = bound_score(lambda s, b, h, q, kv: s + table[b, h, q, kv])
    layouts = (f"--v--v-{inside}v-{inside}1m",)
    target = Target(True, wide, False, layouts=layouts, lines=lines)
    fragment = fragments.score_fragment(bound.program, target)
    made = str(front_end(fragment, bound, QX, True))
    assert made.count("ttg.local_load" if lines else "ttg.convert_layout") == 1
    assert "#ttg.linear" in made


BIAS = torch.zeros(2, 4, 64, 64)
ORDER = torch.zeros(64, dtype=torch.int64)
WHOLE = ("--v--v-ivmi1m",)


@pytest.mark.parametrize(
    ("score_mod", "layouts", "pieces"),
    [
        (lambda s, b, h, q, kv: s + BIAS[b, h, q, kv], WHOLE, 1),
        (lambda s, b, h, q, kv: s + BIAS[b, h % 2, q + h, kv], ("--v--v--vmi1m",), 1),
        (lambda s, b, h, q, kv: s * BIAS[b, h, q, kv] + BIAS[1 - b, h, q, kv], WHOLE, 2),
        (lambda s, b, h, q, kv: s + BIAS[b, h, q, kv], (), 0),
        (lambda s, b, h, q, kv: s + BIAS[b, h, q, kv], ("--v--v-i-mi1m",), 0),
        (lambda s, b, h, q, kv: s + BIAS[b, h, q, kv], ("--v--v-iv--1-",), 0),
        (lambda s, b, h, q, kv: s + BIAS[b, h, q, kv], ("--v--v-ivmivm",), 0),
        (lambda s, b, h, q, kv: s + BIAS[b, h, kv, q], ("--v--v-1mi-vm",), 0),
        (lambda s, b, h, q, kv: s + BIAS[b, h, q, kv // 2], ("--v--v-ivm-1m",), 0),
        (lambda s, b, h, q, kv: s + BIAS[b, h, ORDER[q], kv], ("ni1m", "--v--v--vmi1m"), 0),
        (lambda s, b, h, q, kv: s + BIAS[b, h, q - kv, kv], ("--v--v--vmi1m",), 0),
    ],
    ids=[
        "whole tiles", "computed indices", "two loads", "no layouts", "rows that start anywhere",
        "rows that end anywhere", "strides along keys", "transposed", "half as many", "a look-up",
        "diagonals",
    ],
)  # fmt: skip
def test_what_comes_in_pieces(score_mod: Any, layouts: tuple[str, ...], pieces: int) -> None:
    bound = bound_score(score_mod)
    fragment = fragments.score_fragment(bound.program, Target(True, layouts=layouts))
    made = str(front_end(fragment, bound, 0, True))
    assert len(re.findall(r"tt\.call @\S*\bpieces\.spread", made)) == pieces


def test_only_what_no_other_head_reads_is_streamed() -> None:
    target = Target(True, layouts=("--v--v-ivmi1m",), streamed=True)
    for score_mod, streamed in (
        (lambda s, b, h, q, kv: s + BIAS[b, h, q, kv], True),
        (lambda s, b, h, q, kv: s + BIAS[0, h, q, kv], False),
        (lambda s, b, h, q, kv: s + BIAS[b, 0, q, kv], False),
    ):
        text = emit.emit_score(bound_score(score_mod).program, target)
        assert "score_piece" in text
        assert ("evict_first" in text) == streamed
