"""The Gluon kernels under compute-sanitizer's memcheck (memcheck.py); `pytest -m gpu`."""

from __future__ import annotations

import pytest

from tests.kernels.hopper import ON_HOPPER

pytestmark = ON_HOPPER


@pytest.mark.parametrize(
    "name",
    ["gluon-forward", "gluon-backward", "gluon-captured", "gluon-panels", "gluon-causal-wide"],
)
def test_memcheck(name: str) -> None:
    from tests.kernels import memcheck

    if memcheck.sanitizer() is None:
        pytest.skip("needs compute-sanitizer")
    found = memcheck.check(name)
    assert found.verdict == "clean", found.text[-4000:]
