"""Which processes share a GPU, asked of a management library that is not there."""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import Any

import pytest
import torch

from attnloom.backends.gluon import neighbours


class Library:
    """NVML as far as it is asked. processes: on the GPU, None: of another driver's mind."""

    def __init__(self, processes: int | None) -> None:
        self.processes = processes

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0 if uuid == b"GPU-1234" else 6

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, _: None) -> int:
        if self.processes is None:
            return 3
        found = ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))
        assert found[0] == 0
        found[0] = self.processes
        return 7 if self.processes else 0


@pytest.mark.parametrize("processes", [0, 1, 5, None])
def test_processes_are_counted_without_a_list_of_them(
    monkeypatch: pytest.MonkeyPatch, processes: int | None
) -> None:
    monkeypatch.setattr(neighbours, "_library", lambda: Library(processes))
    assert neighbours.num_processes("GPU-1234") == processes
    assert neighbours.num_processes("GPU-9") is None


def test_nothing_is_said_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_LIBRARY", "libnothing.so")
    neighbours._library.cache_clear()
    assert neighbours.num_processes("GPU-1234") is None
    neighbours._library.cache_clear()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_shared_device_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, processes: int
) -> None:
    monkeypatch.setattr(neighbours, "_library", lambda: Library(processes))
    monkeypatch.setattr(neighbours, "_uuid_of", lambda device: "GPU-1234")
    neighbours.warn_of_neighbours.cache_clear()
    with caplog.at_level(logging.WARNING, "attnloom"):
        for _ in range(3):
            neighbours.warn_of_neighbours(torch.device("cuda:0"))
        _wait()
    neighbours.warn_of_neighbours.cache_clear()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == processes - 1
    assert all("2 processes compute on cuda:0" in line for line in said)


def test_the_first_call_does_not_wait_for_the_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    def library() -> Library:
        assert answers.wait(60)
        return Library(2)

    monkeypatch.setattr(neighbours, "_library", library)
    monkeypatch.setattr(neighbours, "_uuid_of", lambda device: "GPU-1234")
    neighbours.warn_of_neighbours.cache_clear()
    with caplog.at_level(logging.WARNING, "attnloom"):
        neighbours.warn_of_neighbours(torch.device("cuda:0"))
        assert not caplog.records
        answers.set()
        _wait()
    neighbours.warn_of_neighbours.cache_clear()
    assert len(caplog.records) == 1


def _wait() -> None:
    for thread in threading.enumerate():
        if thread.name == neighbours.THREAD:
            thread.join(60)
