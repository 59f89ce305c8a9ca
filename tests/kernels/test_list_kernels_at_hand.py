"""Lists are derived by kernels where those are compiled, by torch's operators until they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnloom.backends.triton import beside, list_launches, lists
from attnloom.backends.triton.launcher import Launcher
from tests.kernels.list_deriving import lists_of


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels that were compiled, on a machine whose disk has none."""
    found: list[str] = []

    def compile_(self: Launcher, args: tuple[Any, ...]) -> None:
        name = self.kernel.__name__
        if beside._thread.look and name not in found:
            raise beside._NotThereError
        found.append(name)

    monkeypatch.setenv("ATTNLOOM_QUICK_START", "1")
    monkeypatch.setattr(Launcher, "compile", compile_)
    monkeypatch.setattr(beside, "tell_when_read", lambda _: None)
    monkeypatch.setattr(list_launches, "_asked", {})
    monkeypatch.setattr(list_launches, "_LATER", 0.0)
    monkeypatch.setattr(list_launches, "_runs_here", lambda _: True)
    return found


def finish() -> None:
    for job in list_launches._asked.values():
        job.wait()


KINDS: dict[str, Callable[[], list_launches.Needed]] = {
    "rank_kernel": list_launches.ranking,
    "turn_kernel": lambda: list_launches.turning(sweeps=False),
    "join_kernel": lambda: list_launches.joining(3, 6),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_kernel_is_compiled_once_it_was_missed(name: str, compiled: list[str]) -> None:
    needed = KINDS[name]()
    assert not list_launches.are_at_hand(needed)
    finish()
    assert compiled == [name]
    assert list_launches.are_at_hand(needed)
    assert compiled == [name]


def test_all_that_are_missed_are_compiled(compiled: list[str]) -> None:
    needed = [make() for make in KINDS.values()]
    assert not list_launches.are_at_hand(*needed)
    finish()
    assert sorted(compiled) == sorted(KINDS)
    assert list_launches.are_at_hand(*needed)


def test_a_kernel_on_disk_is_at_hand(compiled: list[str]) -> None:
    compiled.append("rank_kernel")
    assert list_launches.are_at_hand(list_launches.ranking())


def test_what_does_not_compile_is_left_to_torch(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Launcher, args: tuple[Any, ...]) -> None:
        if beside._thread.look:
            raise beside._NotThereError
        raise RuntimeError("ptxas is not there")

    monkeypatch.setattr(Launcher, "compile", fails)
    for _ in range(2):
        assert not list_launches.are_at_hand(list_launches.ranking())
        finish()


def test_who_waits_for_kernels_has_them_compiled_where_they_run(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNLOOM_QUICK_START", "0")
    assert list_launches.are_at_hand(list_launches.ranking())
    assert compiled == []


def test_lists_do_not_wait_for_their_kernel(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = lists_of("causal", 700, (128, 128), "cpu")
    launched: list[torch.Tensor] = []
    monkeypatch.setattr(list_launches, "rank", lambda work, *_: launched.append(work))
    found = lists._derive_work(blocks, 64)
    assert torch.equal(found.work, lists.work_by_sort(blocks, 64).work)
    assert launched == []
    finish()
    lists._derive_work(blocks, 64)
    assert len(launched) == 1
