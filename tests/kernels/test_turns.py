"""What turns.py makes of the ways in which a subject can end, and its small kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from tests.kernels import turns, turns_ways

_SAID = 'turns: {"subject": "x", "verdict": "wrong", "runs": 3, "wrong": 1, "left": 9}'
_ENDS = {
    "wrong": f"print('noise'); print('''{_SAID}''')",
    "failed": "raise RuntimeError('an illegal address')",
    "hung": "import time; time.sleep(60)",
}


@pytest.mark.parametrize("verdict", _ENDS)
def test_every_end_has_its_verdict(verdict: str) -> None:
    found = turns.judge("x", [sys.executable, "-c", _ENDS[verdict]], 1.0)
    assert found.verdict == verdict
    assert verdict != "failed" or found.detail == "RuntimeError: an illegal address"
    assert (found.runs, found.left) == ((3, 9) if verdict == "wrong" else (0, 0))


def launches(results: list[torch.Tensor]) -> turns.Run:
    """One of the results a launch, the last one ever after."""

    def of() -> Iterator[torch.Tensor]:
        yield from results
        while True:
            yield results[-1]

    source = of()
    return lambda: (next(source),)


RIGHT = torch.arange(6.0).view(2, 3)
LOST = torch.tensor([[0.0, 1.0, 2.0], [turns.LEFT] * 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_lost_tile_is_counted_and_placed(dtype: torch.dtype) -> None:
    results = [x.to(dtype) for x in (RIGHT, RIGHT, LOST, RIGHT)]
    found = turns.watched("x", launches(results), 0.05)
    assert (found.verdict, found.wrong, found.left) == ("wrong", 1, 3)
    assert found.runs > 3
    assert found.detail == "launch 2: 3 elements, result 0 from [1, 0] to [1, 2]"


def test_launches_alike_are_right() -> None:
    assert turns.watched("x", launches([RIGHT]), 0.02).verdict == "right"
    noisy = [RIGHT, RIGHT + 1e-3 * torch.ones(2, 3)]
    assert turns.watched("x", launches(noisy), 0.02).verdict == "right"
    exact = [x.bfloat16() for x in (RIGHT, RIGHT + 0.125)]
    assert turns.watched("x", launches(exact), 0.02).verdict == "wrong"
    assert turns.watched("x", launches([RIGHT, RIGHT / 0]), 0.02).verdict == "wrong"


def test_a_first_launch_that_leaves_memory_is_no_reference() -> None:
    found = turns.watched("x", launches([LOST]), 0.02)
    assert (found.verdict, found.detail) == ("wrong", "the first launch left memory unwritten")


def test_the_table_names_every_subject() -> None:
    told = turns.table([turns.Finding("x", "right", 5), turns.Finding("y", "hung", detail="z")])
    assert "| x" in told and "| hung" in told


_PTX = [
    ".reqntid 384",
    "\tsetmaxnreg.inc.sync.aligned.u32 \t240;",
    "\tbarrier.sync \t1;",
    "\tbar.sync \t0, 128;",
    "\tbar.sync \t2, 128;",
    "\tmbarrier.try_wait.parity.shared::cta.b64 complete, [%r1], %r2;",
    "\tcp.async.bulk.wait_group.read \t0;",
]
_CHANGED = {
    "registers alike": (1, None),
    "another barrier": (3, "\tbar.sync \t9, 128;"),
    "asks": (5, "\tmbarrier.test_wait.parity.shared::cta.b64 complete, [%r1], %r2;"),
    "waits for memory": (6, "\tcp.async.bulk.wait_group \t0;"),
}


@pytest.mark.parametrize("way", turns_ways.WAYS)
def test_ways_change_divided_kernels_alone(way: str) -> None:
    number, line = _CHANGED[way]
    wanted = [*_PTX[:number], *([] if line is None else [line]), *_PTX[number + 1 :]]
    assert turns_ways.changed(way, "\n".join(_PTX)).splitlines() == wanted
    assert turns_ways.changed(way, "bar.sync 0, 128;") == "bar.sync 0, 128;"
    with pytest.raises(AssertionError, match="changes nothing"):
        turns_ways.changed(way, ".reqntid 384 // setmaxnreg")


def needs_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in turns.PARTS if name != turns.PLANTED])
def test_small_kernels(name: str) -> None:
    """Against torch, with more tiles than programs and steps than places in the ring."""
    needs_hopper()
    found = turns.watched(name, turns.small(turns.PARTS[name], 300, 11, 3), 1.0)
    assert found.verdict == "right", found


@pytest.mark.gpu
def test_interrupted_kernels_lose_no_tile() -> None:
    """Barriers that nobody used lost tiles of the forward, and faulted the backward, in each of
    several processes that took turns: memory that was theirs still held other things."""
    needs_hopper()
    found = turns.together(["forward", "backward, a tile a program"], 4, 10.0)
    assert [finding.verdict for finding in found] == ["right"] * 4, turns.table(found)
    assert min(finding.runs for finding in found) >= 10
