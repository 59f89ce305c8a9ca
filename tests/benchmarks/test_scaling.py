"""The table of the scaling suite, and results in parts."""

from __future__ import annotations

import pytest

from benchmarks import merge, rows, scaling
from benchmarks.rows import Row


def row(phase: str, peer: str, theirs: float, ours: float = 2.0, length: int = 1024) -> Row:
    shape = [2, 8, 2, length, length, 64]
    case = f"causal-s{length}"
    return Row(
        "scaling", case, phase, "ms", ours, "bf16", shape, density=0.5, peer=peer, theirs=theirs
    )


def test_cells_have_our_rate_and_the_best_peer():
    table = scaling.table(
        [
            row("backward", "fa4", 1.0),
            row("forward", "torch-flex", 5.0),
            row("forward", "sdpa-cudnn", 3.0),
            row("forward", "triton", 1.0),  # ours too
        ]
    )
    forward, backward = table.splitlines()[2:]
    flops = 4 * 2 * 8 * 1024 * 1024 * 64 * 0.5
    assert f"{flops / 2e-3 / 1e12:.0f} (1.50 sdpa-cudnn)" in forward
    assert f"{2.5 * flops / 2e-3 / 1e12:.0f} (0.50 fa4)" in backward
    assert forward.split("|")[2].strip() == "4"


def test_lines_are_in_the_order_of_lengths():
    table = scaling.table([row("forward", "fa4", 1.0, length=n) for n in (4096, 1024, 131072)])
    assert [line.split("|")[3].strip() for line in table.splitlines()[2:]] == [
        "1024",
        "4096",
        "131072",
    ]


def test_nothing_measured_is_said():
    assert scaling.table([]) == "No row of the scaling suite."


def test_parts_of_a_run_are_joined(tmp_path):
    parts = []
    for number, length in enumerate((1024, 2048)):
        parts.append(tmp_path / f"{number}.json")
        rows.write(parts[-1], {"gpu": "a", "commit": "1"}, [row("forward", "fa4", 1, 2.0, length)])
    assert merge.main([str(tmp_path / "all.json"), *map(str, parts)]) == 0
    head, found = rows.read(tmp_path / "all.json")
    assert head["gpu"] == "a"
    assert [r.case for r in found] == ["causal-s1024", "causal-s2048"]


@pytest.mark.parametrize(
    ("heads", "cases", "said"),
    [
        (({"gpu": "a"}, {"gpu": "b"}), (1024, 2048), "differ in gpu"),
        (({"gpu": "a"}, {"gpu": "a"}), (1024, 1024), "two parts hold forward of causal-s1024"),
    ],
)
def test_what_is_not_one_run_is_not_joined(heads, cases, said):
    parts = [
        (head, [row("forward", "fa4", 1.0, length=length)])
        for head, length in zip(heads, cases, strict=True)
    ]
    with pytest.raises(ValueError, match=said):
        merge.merge(parts)
