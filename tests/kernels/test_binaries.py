"""Kernels of ours are kept on disk without the compiler's texts, and nobody else's are."""

from __future__ import annotations

import os
import threading

import pytest

pytest.importorskip("triton")

from triton import knobs

from attnloom.backends.triton.binaries import binaries_alone


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_STORE_BINARY_ONLY", raising=False)
    monkeypatch.delitem(vars(knobs.compilation), "store_binary_only", raising=False)


def test_inside_alone_and_not_in_the_environment() -> None:
    assert not knobs.compilation.store_binary_only
    with binaries_alone():
        with binaries_alone():
            assert knobs.compilation.store_binary_only
        assert knobs.compilation.store_binary_only
        assert "TRITON_STORE_BINARY_ONLY" not in os.environ
    assert not knobs.compilation.store_binary_only


@pytest.mark.parametrize("said", ["0", "1"])
def test_what_the_environment_says_holds(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", said)
    with binaries_alone():
        assert knobs.compilation.store_binary_only is (said == "1")
    assert knobs.compilation.store_binary_only is (said == "1")


def test_what_somebody_assigned_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(knobs.compilation), "store_binary_only", False)
    with binaries_alone():
        assert not knobs.compilation.store_binary_only
    assert vars(knobs.compilation)["store_binary_only"] is False


def test_threads_leave_in_any_order() -> None:
    inside, leave = threading.Barrier(2), threading.Event()

    def stay() -> None:
        with binaries_alone():
            inside.wait()
            leave.wait()

    thread = threading.Thread(target=stay)
    with binaries_alone():
        thread.start()
        inside.wait()
    assert knobs.compilation.store_binary_only
    leave.set()
    thread.join()
    assert not knobs.compilation.store_binary_only
