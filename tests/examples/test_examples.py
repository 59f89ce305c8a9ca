"""The examples in their short form: they run, and what they say holds."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_neighborhood_image(tmp_path, capsys):
    pytest.importorskip("skimage", reason="needs the extra 'examples'")
    runs, before, after = example("neighborhood_image").main(
        ["--short", "--pictures", str(tmp_path)]
    )
    row_major, tiled, morton = runs
    for run in (tiled, morton):
        torch.testing.assert_close(run.image, row_major.image, atol=1e-4, rtol=1e-4)
        assert run.partial + run.full < row_major.partial + row_major.full
    assert after > before + 6
    assert (tmp_path / "neighborhood_image.png").stat().st_size > 10_000
    assert f"PSNR {before:.1f} dB with noise" in capsys.readouterr().out


def test_a_denoised_pixel_is_the_mean_that_its_definition_says():
    pytest.importorskip("skimage", reason="needs the extra 'examples'")
    module = example("neighborhood_image")
    noisy = torch.rand(16, 16, generator=torch.Generator().manual_seed(0))
    got = module.denoise(noisy, 5, None, "rows").image
    patches = module.patches(noisy).double().view(16, 16, -1)
    strength = module.STRENGTH * 2 * module.NOISE**2 * module.PATCH**2
    for row, column in ((0, 0), (3, 9), (15, 14)):
        # The window is moved inside at the borders.
        top, left = (min(max(0, at - 2), 11) for at in (row, column))
        near = patches[top : top + 5, left : left + 5]
        weight = torch.exp(-(near - patches[row, column]).square().sum(-1) / strength)
        wanted = (weight * noisy[top : top + 5, left : left + 5]).sum() / weight.sum()
        assert float(got[row, column]) == pytest.approx(float(wanted), abs=1e-4)


def test_speculative_tree():
    result = example("speculative_tree").main(["--short"])
    assert result.calls_step_by_step == len(result.text) == 40
    # The first call reads the prompt; then each keeps one byte at least.
    assert result.calls_with_trees < 30


def test_branches_are_accepted_as_far_as_they_are_right():
    module = example("speculative_tree")
    tokens, parents = [5, 7, 8, 9, 7], [-1, 0, 0, 2, 3]
    assert module.accepted(tokens, parents, best=[8, 0, 9, 1, 0]) == [0, 2, 3]
    assert module.accepted(tokens, parents, best=[6, 0, 9, 1, 0]) == [0]


def test_prefix_lm():
    shares = example("prefix_lm").main(["--short"])
    assert set(shares) == {"causal", "prefix"}
    assert min(shares.values()) > 0.6  # of 12 symbols; guessing gets 1 in 12


def test_shared_prefix():
    result = example("shared_prefix").main(["--short"])
    assert result.farthest < 1e-3
    assert result.packed_tokens < result.separate_tokens / 3


def test_token_selection():
    pytest.importorskip("skimage", reason="needs the extra 'examples'")
    found = example("token_selection").main(["--short"])
    errors = {(s.name, s.keys): s.error for s in found}
    shares = sorted({s.keys for s in found})
    assert len(shares) == 4
    for share in shares:
        assert errors["best patch", share] < errors["chance", share]
    assert errors["best patch", shares[-1]] < errors["best patch", shares[0]] / 2


def test_learned_bias(tmp_path):
    reports = example("learned_bias").main(["--short", "--pictures", str(tmp_path)])
    assert reports[0] > 2
    assert reports[-1] < 0.3
    assert {p.name for p in tmp_path.iterdir()} == {
        "learned_bias_hidden.png", "learned_bias_learned.png"
    }  # fmt: skip


def test_the_list_of_examples_is_whole():
    named = set(re.findall(r"\]\((\w+\.py)\)", (FOLDER / "README.md").read_text()))
    assert named == {p.name for p in FOLDER.glob("*.py")}
