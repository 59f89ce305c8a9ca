"""Random programs through every stage of the compiler, and the grammar that they come from."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from attnloom.api import bounds_check
from attnloom.backends.cpu import emit_ops
from attnloom.ir import op_derivatives as grads
from attnloom.ir import op_intervals as spans
from attnloom.ir.ops import OPS
from attnloom.ir.passes import simplify
from attnloom.trace import lowerings
from attnloom.trace.torch_ops import LOWERINGS
from tests.fuzz import lanes
from tests.fuzz.checks import CHECKS, FuzzCase, check
from tests.fuzz.explore import CI_SHARES, explore
from tests.fuzz.grammar import CAPTURES, FORKS, LEAVES, SCORE_LEAVES, TEMPLATES, WILD
from tests.fuzz.programs import FuzzProgram
from tests.harness.draw import Sizes

PER_PART = 50
PARTS = [
    *range(3),
    *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 5)),
    *(pytest.param(i, marks=pytest.mark.long) for i in range(5, 20)),
]
SIZES = Sizes(1, 2, 1, 7, 9, 4, 4)
_SAMPLE = {"F": "slope[h]", "I": "(q_idx - kv_idx)", "B": "(q_idx >= kv_idx)"}


@pytest.mark.parametrize("part", PARTS)
def test_random_programs(part: int) -> None:
    explore(CI_SHARES, part, PER_PART)


def _each_template() -> list[FuzzProgram]:
    """One program for each leaf and template, on the plainest operands."""
    found = [FuzzProgram(score=(f"return {text}",)) for text in (*SCORE_LEAVES, *LEAVES["F"])]
    for table in (TEMPLATES, FORKS, {"B": WILD}):
        for kind, templates in table.items():
            for text, operands in templates:
                value = text.format(*(_SAMPLE[o] for o in operands))
                body = (
                    f"return {value}" if kind == "F" else f"return torch.where({value}, score, 0.5)"
                )
                if kind == "I":
                    body = f"return score + {value}"
                found.append(FuzzProgram(score=(body,)))
    return found


def test_grammar_reaches_every_operation() -> None:
    reached = set()
    for program in _each_template():
        captures = lanes.draw_captures(program, SIZES, 0)
        at = lanes.lanes(SIZES, 0, 20)
        bound = lanes.values("score", program.build(captures)[0], at).bound
        reached |= {node.op for node in bound.program.nodes}
    assert set(OPS) - reached == set()


def test_grammar_reaches_every_capture() -> None:
    text = str((LEAVES, TEMPLATES, SCORE_LEAVES))
    assert all(re.search(rf"\b{name}\b", text) for name in CAPTURES)


def _planted(threshold: float) -> FuzzCase:
    """A sound case. A literal operand is part of the structure: with one of its own, a test meets
    no cache of another."""
    program = FuzzProgram(
        score=(
            "f0 = (slope[h] - bias_q[q_idx])",
            f"return score + torch.where(f0 > {threshold}, f0, 1.0)",
        ),
        mask=(
            "i0 = q_idx - kv_idx",
            "return (i0 < window) & (doc[b, q_idx] == doc[b, kv_idx])",
        ),
    )
    shape = Sizes(2, 2, 1, 31, 40, 8, 8)
    return FuzzCase("fuzz", shape, block_size=16, program=program)


def test_sound_program_passes_every_check() -> None:
    check(_planted(0.0371), tuple(CHECKS))


def _trace_bug(patch: pytest.MonkeyPatch) -> None:
    for name in ("sub", "__sub__"):
        patch.setitem(LOWERINGS, name, lowerings.add("-", "sub", swap=True))


def _kernel_bug(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(emit_ops.FLOAT_OPS, "sub", "({1} - {0})")


def _index_bug(patch: pytest.MonkeyPatch) -> None:
    found = bounds_check._evaluate
    patch.setattr(bounds_check, "_evaluate", lambda *args: [v + 1000 for v in found(*args)])


# Check -> a bug of its stage: a difference taken the wrong way round.
BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "trace": _trace_bug,
    "passes": lambda patch: patch.setitem(simplify.RULES, "sub", lambda r, a, b: a),
    "bounds": lambda patch: patch.setitem(OPS, "sub", replace(OPS["sub"], interval=spans.add)),
    "tiles": lambda patch: patch.setitem(
        OPS, "lt", replace(OPS["lt"], interval=spans.comparison("gt"))
    ),
    "indices": _index_bug,
    "gradients": lambda patch: patch.setitem(OPS, "sub", replace(OPS["sub"], derivative=grads.add)),
    "kernel": _kernel_bug,
}


@pytest.mark.parametrize("stage", CHECKS)
def test_each_check_notices_a_bug_of_its_stage(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _planted(0.1371 + list(CHECKS).index(stage) / 16)
    BUGS[stage](monkeypatch)
    with pytest.raises(AssertionError, match=f"check '{stage}' of fuzz") as error:
        check(case, (stage,))
    assert "return score + torch.where(f0 > " in str(error.value)


def test_failing_programs_shrink_to_their_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cos gone wrong: little but a call of it is left."""
    monkeypatch.setitem(LOWERINGS, "cos", LOWERINGS["sin"])
    with pytest.raises(AssertionError) as error:
        explore({}, 0, 200)
    text = str(error.value)
    (line,) = [x for x in text.splitlines() if "torch.cos" in x]
    assert line.count("torch.") <= 3, text
    assert text.count("\n") < 9, text
