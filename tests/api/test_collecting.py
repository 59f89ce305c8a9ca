"""The garbage collector waits for imports and compilers, and for nothing longer."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from attnloom.backends import registry
from attnloom.backends.collecting import uncollected


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.enable()
    yield
    if not enabled:
        gc.disable()


def test_nothing_is_collected_inside():
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_so():
    gc.disable()
    with uncollected():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_an_error_turns_it_on_again():
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()


def test_the_last_of_several_threads_turns_it_on():
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with uncollected():
            inside.set()
            assert done.wait(60)

    thread = threading.Thread(target=other)
    with uncollected():
        thread.start()
        assert inside.wait(60)
    assert not gc.isenabled()
    done.set()
    thread.join(60)
    assert gc.isenabled()


def test_a_backend_is_imported_without(monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []

    def imported(name: str) -> object:
        seen.append(gc.isenabled())
        raise ImportError(name)

    monkeypatch.setattr(registry.importlib, "import_module", imported)
    with pytest.raises(ImportError):
        registry.load.__wrapped__("tiled")
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_off_inside_collects():
    with uncollected():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
