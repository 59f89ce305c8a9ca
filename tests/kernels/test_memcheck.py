"""What memcheck.py makes of the ways in which a run can end."""

from __future__ import annotations

import sys

import pytest

from tests.kernels import memcheck

_ENDS = {
    "clean": "print('========= ERROR SUMMARY: 0 errors')",
    "errors": "print('========= ERROR SUMMARY: 3 errors'); raise SystemExit(9)",
    "failed": "raise RuntimeError('no kernel image')",
    "hung": "import time; print('started', flush=True); time.sleep(60)",
}


@pytest.mark.parametrize("verdict", _ENDS)
def test_every_end_has_its_verdict(verdict: str) -> None:
    found = memcheck.judge("a run", [sys.executable, "-c", _ENDS[verdict]], 0.5)
    assert found.verdict == verdict
    assert found.text or verdict == "hung"


def test_nothing_is_run_without_the_tool(monkeypatch, capsys) -> None:
    monkeypatch.setattr(memcheck, "sanitizer", lambda: None)
    assert memcheck.main([]) == 2
    assert "compute-sanitizer was not found" in capsys.readouterr().err
