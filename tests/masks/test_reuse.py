"""Lists of a mask that was built before are returned again, and never where they are stale."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import attnloom
from attnloom.masking import build, reuse

S = 300


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that tiles were classified."""
    counted: list[int] = []
    real = build.classify

    def counting(*args, **kwargs):
        counted.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(build, "classify", counting)
    return counted


def documents(ids: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)


def window(left: int) -> Callable[..., torch.Tensor]:
    return lambda b, h, i, j: (i >= j) & (i - j <= left)


def make(mod: Callable[..., torch.Tensor], length: int = S, **options) -> attnloom.BlockMask:
    return attnloom.create_block_mask(mod, None, None, length, length, **options)


def test_case_068_a_mask_built_in_every_layer_and_step(builds: list[int]) -> None:
    """Layers and generation steps rebuilt equal masks: new closures, new tensors, equal values."""
    for _ in range(3):
        ids = torch.arange(S) // 70
        mask = make(documents(ids))
        assert torch.equal(mask.to_mask()[0, 0], documents(ids)(0, 0, *_grid()))
    assert len(builds) == 1


@pytest.mark.parametrize("change", ["in place", "through numpy", "through data", "another tensor"])
def test_changed_values_are_seen(builds: list[int], change: str) -> None:
    ids = torch.arange(S) // 70
    make(documents(ids))
    if change == "in place":
        ids[100:] = 1
    elif change == "through numpy":
        ids.numpy()[100:] = 1
    elif change == "through data":
        ids.data[100:] = 1
    else:
        ids = torch.arange(S) // 71
    mask = make(documents(ids))
    assert len(builds) == 2
    assert torch.equal(mask.to_mask()[0, 0], documents(ids)(0, 0, *_grid()))


def test_whatever_else_differs_is_built(builds: list[int]) -> None:
    make(window(50))
    make(window(51))
    make(window(50), S + 1)
    make(window(50), BLOCK_SIZE=64)
    make(window(50), separate_full_blocks=False)
    make(lambda b, h, i, j: (i > j) & (i - j <= 50))
    attnloom.create_block_mask(window(50), 2, None, S, S)
    assert len(builds) == 7
    make(window(50))
    assert len(builds) == 7


def test_the_sign_of_zero_can_decide(builds: list[int]) -> None:
    def mod(zero: torch.Tensor):
        return lambda b, h, i, j: 1 / zero[i] > j

    kept = make(mod(torch.zeros(S))).lists().entries.numel()
    assert kept > 0 == make(mod(-torch.zeros(S))).lists().entries.numel()


def test_lists_that_somebody_wrote_into_are_not_reused(builds: list[int]) -> None:
    make(window(50)).lists().entries.zero_()
    assert torch.equal(make(window(50)).to_mask()[0, 0], window(50)(0, 0, *_grid()))
    assert len(builds) == 2


def test_few_and_small_ones_are_kept(builds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for left in range(reuse.MAX_MASKS + 1):
        make(window(left))
    assert len(reuse._kept) == reuse.MAX_MASKS
    make(window(0))
    assert len(builds) == reuse.MAX_MASKS + 2
    reuse.forget()
    monkeypatch.setattr(reuse, "MAX_BYTES", 8)
    make(window(50))
    make(documents(torch.arange(S) // 70))
    assert not reuse._kept


def test_a_mask_of_inference_mode_is_built(builds: list[int]) -> None:
    """Its lists are inference tensors, which training cannot save."""
    with torch.inference_mode():
        make(window(50))
        make(window(50))
    make(window(50))
    assert len(builds) == 3


def _grid() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(S)[:, None], torch.arange(S)
