"""Who waits for whom before a device is used."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.harness.device_turns import held

_SOON_S, _LATE_S = 0.2, 10.0


class Visitor:
    """A thread that goes in and stays until it is told to leave."""

    def __init__(self, alone: bool, folder: Path) -> None:
        self._inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._visit, args=(alone, folder), daemon=True)
        self._thread.start()

    def _visit(self, alone: bool, folder: Path) -> None:
        with held(alone, folder):
            self._inside.set()
            self._leave.wait(_LATE_S)

    def is_inside(self, within: float = _LATE_S) -> bool:
        return self._inside.wait(within)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(_LATE_S)


def test_many_are_inside_at_once(tmp_path: Path) -> None:
    visitors = [Visitor(False, tmp_path) for _ in range(3)]
    assert all(visitor.is_inside() for visitor in visitors)
    for visitor in visitors:
        visitor.leave()


def test_one_alone_waits_for_all_and_is_waited_for(tmp_path: Path) -> None:
    early = Visitor(False, tmp_path)
    assert early.is_inside()
    alone = Visitor(True, tmp_path)
    assert not alone.is_inside(_SOON_S)
    late = Visitor(False, tmp_path)
    assert not late.is_inside(_SOON_S), "who comes later goes in before who waits"
    early.leave()
    assert alone.is_inside()
    assert not late.is_inside(_SOON_S)
    alone.leave()
    assert late.is_inside()
    late.leave()


def test_a_failure_lets_go(tmp_path: Path) -> None:
    try:
        with held(True, tmp_path):
            raise RuntimeError
    except RuntimeError:
        pass
    visitor = Visitor(True, tmp_path)
    assert visitor.is_inside()
    visitor.leave()
