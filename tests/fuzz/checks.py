"""What must hold of every random program, stage by stage.

trace      a traced mod gives what calling it gives, also when a second binding is recognised
passes     simplified programs are valid and mean the same
bounds     intervals of tiles contain every value
tiles      create_block_mask agrees with the dense mask, score by score and tile by tile
indices    debug_bounds finds every index inside its tensor, or says which is not
gradients  in float64, by the tiled backend, against autograd through the dense oracle
kernel     the compiled CPU kernel within the error budget of tests/harness
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

import attnloom
from attnloom.backends.reference import evaluate_lanes
from attnloom.errors import ShapeError
from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, Program
from attnloom.ir.passes.bounds import node_intervals
from attnloom.ir.passes.simplify import simplify
from attnloom.ir.verify import verify
from tests.fuzz.lanes import (
    Lanes,
    Precisions,
    assert_equal,
    distance,
    double_by_default,
    draw_captures,
    lanes,
    precisions,
)
from tests.fuzz.programs import FuzzProgram
from tests.harness.case import Case, Problem, draw_problem
from tests.harness.check import check_attention, run
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with, oracle
from tests.harness.table import Mod
from tests.masks.test_classify import assert_sorted, codes_of, tile_codes

_LANES, _OTHER_LANES = 600, 100
_OTHER_SIZES = Sizes(1, 2, 1, 9, 12, 4, 4)
_SINGLE, _DOUBLE = 2e-5, 1e-9  # relative; functions differ by some ulp between their versions
# A kernel's scores differ from the oracle's by this much, relative; see `steady`.
_SCORE_NOISE = 4e-6
_AXES = ("b", "h", "q", "kv")


@dataclass(frozen=True)
class FuzzCase(Case):
    """A harness case whose mods are a random program's."""

    program: FuzzProgram = field(default_factory=FuzzProgram)

    @property
    def row(self) -> Mod:
        program = self.program
        return Mod(
            "fuzz",
            lambda captures, _: program.build(captures),
            program.draw,
            program.learnable,
            program.mask_axes,
        )

    def __str__(self) -> str:
        return f"{super().__str__()}.block{self.block_size}.seed{self.seed}{self.program}"


def _kinds(program: FuzzProgram) -> list[str]:
    bodies = {"score": program.score, "mask": program.mask}
    return [kind for kind, body in bodies.items() if body is not None]


@functools.lru_cache(maxsize=8)
def _examined(case: FuzzCase, kind: str, binding: int = 0) -> tuple[Lanes, Precisions]:
    """A sample of the scores of a case and the mod's values there; binding 1 has other numbers,
    captured values and sizes."""
    sizes = case.sizes if binding == 0 else _OTHER_SIZES
    at = lanes(sizes, case.seed + binding, _LANES if binding == 0 else _OTHER_LANES)
    captures = draw_captures(case.program, sizes, case.seed + binding)
    return at, precisions(kind, case.program, captures, at, binding)


def check_trace(case: FuzzCase) -> None:
    """Direct and traced values agree in both precisions, for both bindings."""
    for binding in (0, 1):
        for kind in _kinds(case.program):
            at, found = _examined(case, kind, binding)
            what = f"{kind}_mod, binding {binding}"
            double, single = found.double, found.single
            assert_equal(f"{what}, float64", double.traced, double.direct, at, _DOUBLE)
            assert_equal(f"{what}, float32", single.traced, single.direct, at, _SINGLE, found.noise)


def check_passes(case: FuzzCase) -> None:
    """Simplified programs are valid and mean the same."""
    for kind in _kinds(case.program):
        at, found = _examined(case, kind)
        bound = found.double.bound
        wide = at | {"score": at["score"].double()}
        for exact in (True, False):
            simpler = verify(simplify(bound.program, exact))
            again = BoundProgram(simpler, bound.tensors, bound.numbers)
            value = interpret(again, wide)[0].expand(at["score"].shape).detach()
            what = f"{kind}_mod, simplified, exact={exact}"
            assert_equal(what, value, found.double.traced, at, 1e-12 if exact else _DOUBLE)


def check_bounds(case: FuzzCase) -> None:
    """The interval of every node contains its value at every score of a random tile."""
    s = case.sizes
    generator = torch.Generator().manual_seed(case.seed)

    def piece(length: int) -> torch.Tensor:
        start = int(torch.randint(0, length, (), generator=generator))
        return torch.arange(start, min(length, start + 5))

    for kind in _kinds(case.program):
        bound = _examined(case, kind)[1].single.bound
        ranges = {"b": s.B, "h": s.Hq, "q": s.Q_LEN, "kv": s.KV_LEN}
        _check_tile(bound, {name: piece(n) for name, n in ranges.items()}, generator)


def _check_tile(
    bound: BoundProgram, ranges: dict[str, torch.Tensor], generator: torch.Generator
) -> None:
    inputs = {
        name: x.reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, x) in enumerate(ranges.items())
    }
    shape = tuple(len(x) for x in ranges.values())
    ends = {name: (x.amin(), x.amax()) for name, x in inputs.items()}
    program = bound.program
    everything = Program(
        program.nodes,
        tuple(range(len(program.nodes))),
        program.tensors,
        program.numbers,
        program.reductions,
    )
    found = node_intervals(bound, ends, nodes=range(len(program.nodes)))
    inputs["score"] = torch.randn(shape, generator=generator).to(_score_dtype(program))
    results = interpret(BoundProgram(everything, bound.tensors, bound.numbers), inputs)
    for index, value in enumerate(results):
        interval = found[index]
        inside = _inside(value.detach(), interval.lo, interval.hi)
        assert inside, f"node {index}, {program.nodes[index]}, leaves its interval {interval}"


def _score_dtype(program: Program) -> torch.dtype:
    for node in program.nodes:
        if node.op == "input" and node.attr == "score":
            return node.dtype.torch
    return torch.float32


def _inside(value: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> bool:
    if value.dtype is torch.bool:
        return bool(((value | ~lo) & (hi | ~value)).all())
    if value.dtype.is_floating_point:
        value = value.double()
        nan = value.isnan() & (lo == -torch.inf) & (hi == torch.inf)
        return bool((nan | ((value >= lo) & (value <= hi))).all())
    return bool(((value >= lo) & (value <= hi)).all())


def check_tiles(case: FuzzCase) -> None:
    """A BlockMask lists exactly the tiles of the dense mask, and keeps exactly its scores."""
    program, s = case.program, case.sizes
    if program.mask is None:
        return
    captures = draw_captures(program, s, case.seed)
    at = lanes(s, case.seed, s.B * s.Hq * s.Q_LEN * s.KV_LEN)
    if bool(precisions("mask", program, captures, at).noise.any()):
        return  # an edge that roundings move has no right place
    mod = program.build(captures)[1]
    assert mod is not None
    shape = (s.B, s.Hq, s.Q_LEN, s.KV_LEN)
    kept = evaluate_lanes(mod, at["b"], at["h"], at["q"], at["kv"]).reshape(shape)
    axes = program.mask_axes
    batch, heads = s.B if "b" in axes else None, s.Hq if "h" in axes else None
    mask = attnloom.create_block_mask(
        mod, batch, heads, s.Q_LEN, s.KV_LEN, device="cpu", BLOCK_SIZE=case.block_size
    )
    assert_sorted(mask.lists())
    codes = codes_of(mask.lists(), s.B, s.Hq)
    assert torch.equal(codes, tile_codes(kept, *mask.BLOCK_SIZE)), "tiles differ from the mask's"
    assert torch.equal(mask.to_mask().expand(shape), kept), "kept scores differ"


def check_indices(case: FuzzCase) -> None:
    """debug_bounds passes, or names an index that leaves its tensor: no other error, and none
    where no index does."""
    problem = draw_problem(replace(case, dtype=torch.float32))
    s = case.sizes
    inputs = {
        name: torch.arange(size).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, size) in enumerate(zip(_AXES, (s.B, s.Hq, s.Q_LEN, s.KV_LEN), strict=True))
    }
    try:
        attnloom_with(backend="tiled", debug_bounds=True)(problem)
    except ShapeError:
        captures = {name: x.detach() for name, x in problem.captures.items()}
        few = lanes(s, case.seed, 1)
        programs = [
            precisions(kind, case.program, captures, few).single.bound
            for kind in _kinds(case.program)
        ]
        assert any(_leaves_a_tensor(bound, inputs) for bound in programs), "all indices are inside"


def _leaves_a_tensor(bound: BoundProgram, inputs: dict[str, torch.Tensor]) -> bool:
    """Whether a load has an index outside its tensor at any score, asked for or not."""
    program = bound.program
    loads = [node for node in program.nodes if node.op == "load"]
    wanted = tuple(dict.fromkeys(arg for node in loads for arg in node.args))
    scores = torch.zeros(()).to(_score_dtype(program)).expand(*(x.numel() for x in inputs.values()))
    found = interpret(
        replace(bound, program=replace(program, outputs=wanted)), inputs | {"score": scores}
    )
    values = dict(zip(wanted, found, strict=True))
    return any(
        bool(((values[arg] < -size) | (values[arg] >= size)).any())
        for node in loads
        for arg, size in zip(node.args, bound.tensors[int(str(node.attr))].shape, strict=True)
    )


def check_gradients(case: FuzzCase) -> None:
    """out, lse and every gradient, in float64 throughout, with no kernel but torch's."""
    with double_by_default():
        problem = draw_problem(replace(case, dtype=torch.float64))
        if not steady(problem, 1e-12):
            return
        truth = run(problem.copy(torch.float64), oracle, True)
        mine = run(problem.copy(torch.float64), attnloom_with(backend="tiled"), True)
    for name, expected in truth.items():
        assert_close(name, mine[name], expected, 1e-7)


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Equal up to `tolerance` relative to the largest element, and as finite."""
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(got), finite), f"{name}: not as finite as the oracle's"
    if bool(finite.any()):
        error = float((got - expected)[finite].abs().max())
        size = max(1.0, float(expected[finite].abs().max()))
        assert error <= tolerance * size, f"{name}: off by {error:.3e}, the largest is {size:.3e}"


def check_kernel(case: FuzzCase) -> None:
    """The compiled kernel, forward and backward, within the harness's budget; exact_math half the
    time. A float64 problem is float64 throughout: of two float32 sines none is right to 1e-16."""
    wide = case.dtype is torch.float64
    with double_by_default() if wide else contextlib.nullcontext():
        if steady(draw_problem(case), _SCORE_NOISE):
            check_attention(case, attnloom_with(backend="cpu", exact_math=case.seed % 2 == 1))


def steady(problem: Problem, score_noise: float) -> bool:
    """Whether no score, gradient or mask of a problem hangs on a rounding.

    Values of both precisions must agree, also under noise on the scores, and so must derivatives.
    """
    program, s = problem.case.program, problem.case.sizes  # type: ignore[attr-defined]
    at = lanes(s, problem.case.seed, s.B * s.Hq * s.Q_LEN * s.KV_LEN)
    group = s.Hq // s.Hkv
    key = problem.key.detach().float().repeat_interleave(group, 1).expand(s.B, -1, -1, -1)
    scores = problem.query.detach().float() @ key.transpose(-2, -1) / math.sqrt(s.D)
    at["score"] = scores[at["b"], at["h"], at["q"], at["kv"]]
    captures = {k: v.detach() for k, v in problem.captures.items()}
    for kind in _kinds(program):
        found = precisions(kind, program, captures, at)
        if kind == "mask":
            if bool(found.noise.any()):
                return False
            continue
        values = found.double.direct
        size = values.abs().nan_to_num(posinf=0.0)
        decided = torch.isfinite(values) | (values == -math.inf)
        if not bool(((found.noise <= 1e-4 * (1 + size)) & decided).all()):
            return False
        slopes = [_slope(found, at, noise) for noise in (0.0, score_noise, -score_noise)]
        limit = 1e-3 * (1 + slopes[0].abs().nan_to_num(posinf=0.0))
        if not all(bool((distance(other, slopes[0]) <= limit).all()) for other in slopes[1:]):
            return False
    return True


def _slope(found: Precisions, at: Lanes, noise: float) -> torch.Tensor:
    """dmod/dscore in float64 at scores moved by a relative noise, and the value itself."""
    score = (at["score"].double() * (1 + noise)).requires_grad_()
    value = interpret(found.double.bound, at | {"score": score})[0].expand(score.shape)
    if not value.requires_grad:
        return value.detach()
    (slope,) = torch.autograd.grad(value.sum(), score, allow_unused=True)
    return value.detach() if slope is None else torch.stack([slope, value.detach()])


Check = Callable[[FuzzCase], None]
# In the order of the pipeline, so that the first failure names the stage at fault.
CHECKS: dict[str, Check] = {
    "trace": check_trace,
    "passes": check_passes,
    "bounds": check_bounds,
    "tiles": check_tiles,
    "indices": check_indices,
    "gradients": check_gradients,
    "kernel": check_kernel,
}
QUICK = tuple(name for name in CHECKS if name not in ("gradients", "kernel"))


def check(case: FuzzCase, names: tuple[str, ...]) -> None:
    """Run these checks.

    Raises:
        AssertionError: one does not hold; the text holds the check, the case and the source.
    """
    for name in names:
        try:
            CHECKS[name](case)
        except Exception as error:
            raise AssertionError(
                f"check '{name}' of {case}\n{type(error).__name__}: {error}"
            ) from error
