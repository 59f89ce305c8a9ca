"""The figures: what they show, their labels, one panel a head, their errors."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch

import attnloom
from attnloom.errors import ModError, OptionError, ShapeError, UnsupportedError
from attnloom.plots import plot_block_map, plot_mask, plot_plan, plot_scores
from attnloom.plots.colours import EMPTY, FULL, rgb
from attnloom.plots.plan import row_work, statement_runs
from tests.tools import mods

pytest.importorskip("matplotlib", reason="needs the extra 'plots'")
reach = torch.tensor([2, 5, 9])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= reach[h]


def masked(q_len, mod=causal):
    return attnloom.create_block_mask(mod, None, None, q_len, 20, device="cpu", BLOCK_SIZE=16)


def images(figure):
    return [axes.images[0].get_array() for axes in figure.axes if axes.images]


def legend_texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_a_mask_with_words():
    words = "The cat sat on the mat".split()
    figure = plot_mask(causal, 6, tokens=words, title="Causal")
    (axes,) = figure.axes
    wanted = np.where(np.tri(6, dtype=bool)[..., None], rgb(FULL), rgb(EMPTY))
    assert (images(figure)[0] == wanted).all()
    for side in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [label.get_text() for label in side] == words
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("kv_idx", "q_idx")
    assert legend_texts(figure) == ["kept", "masked"]
    assert figure.get_suptitle() == "Causal"
    # Query 0 is at the top, and cells are centred on their tokens.
    assert axes.images[0].get_extent() == [-0.5, 5.5, 5.5, -0.5]


def test_one_panel_a_head():
    figure = plot_mask(by_head, 20)
    assert [axes.get_title() for axes in figure.axes if axes.images] == [
        "head 0", "head 1", "head 2"
    ]  # fmt: skip
    for head, image in enumerate(images(figure)):
        kept = (image == rgb(FULL)).all(-1)
        assert kept.sum() == sum(
            max(0, 20 - abs(d)) for d in range(-9, 10) if abs(d) <= reach[head]
        )
    (one,) = images(plot_mask(by_head, 20, heads=2))
    assert (one == images(figure)[2]).all()


def test_zoom_with_tiles():
    figure = plot_mask(by_head, 100, block_size=16, heads=[1], q_range=(40, 60), kv_range=(30, 70))
    (image,) = images(figure)
    assert image.shape == (20, 40, 3)
    assert figure.axes[0].images[0].get_extent() == [29.5, 69.5, 59.5, 39.5]
    assert len(legend_texts(figure)) == 4
    mask = attnloom.create_block_mask(by_head, None, 3, 100, 100, device="cpu", BLOCK_SIZE=16)
    same = plot_mask(mask, heads=[1], q_range=(40, 60), kv_range=(30, 70))
    assert (images(same)[0] == image).all()


def test_many_words_are_thinned_out():
    words = [f"w{n}" for n in range(130)]
    figure = plot_mask(causal, 130, tokens=words, q_range=(10, 130))
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown == words[10::3]


def test_a_block_map():
    mask = attnloom.create_block_mask(by_head, None, 3, 100, 100, device="cpu", BLOCK_SIZE=16)
    figure = plot_block_map(mask)
    assert len(images(figure)) == 3
    live = torch.stack([1 - mask[:, h].sparsity() / 100 * torch.ones(()) for h in range(3)])
    titles = [axes.get_title() for axes in figure.axes if axes.images]
    assert titles == [f"head {h}: {live[h]:.1%} live" for h in range(3)]
    assert legend_texts(figure)[0] == "full tile of 16 x 16"
    (part,) = images(plot_block_map(mask, heads=0, q_range=(17, 40), kv_range=(0, 16)))
    assert part.shape == (2, 1, 3)


def test_a_mask_without_live_tiles_is_white():
    figure = plot_block_map(masked(40, lambda b, h, q_idx, kv_idx: q_idx < 0))
    assert (images(figure)[0] == rgb(EMPTY)).all()
    assert [axes.get_title() for axes in figure.axes] == ["0.0% of the scores lie in live tiles"]


def test_a_long_mask_token_by_token():
    """More than 4096 x 4096 tokens were refused."""
    figure = plot_mask(causal, 5000, block_size=64)
    (image,) = images(figure)
    assert image.shape == (1000, 1000, 3)
    assert (image[500, :500] == rgb(FULL)).any() and (image[500, 515:] == rgb(EMPTY)).all()


def test_scores_of_positions_alone():
    figure = plot_scores(mods.alibi(4), causal, q_len=16)
    slope = torch.exp2(-8.0 * torch.arange(1, 5) / 4)
    at = torch.arange(16)
    for head, image in enumerate(images(figure)):
        wanted = slope[head] * (at - at[:, None])
        assert (image.mask == ~np.tri(16, dtype=bool)).all()
        np.testing.assert_allclose(image.filled(0), wanted.tril().numpy(), rtol=1e-6)
    scales = {axes.images[0].get_clim() for axes in figure.axes[:4]}
    assert len(scales) == 1, "all heads share one scale"
    assert figure.axes[-1].get_ylabel() == "score"


def test_weights_of_queries_and_keys():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 12, 8, generator=generator)
    key = torch.randn(2, 2, 20, 8, generator=generator)
    where = {"query": query, "key": key, "batch": 1, "heads": [3]}
    (image,) = images(
        plot_scores(mods.learned, **where, softmax=True, q_range=(2, 9), kv_range=(3, 8))
    )
    out = attnloom.flex_attention(
        query, key, torch.eye(20).expand(2, 2, 20, 20), mods.learned, enable_gqa=True
    )
    np.testing.assert_allclose(image, out[1, 3, 2:9, 3:8].detach().numpy(), atol=1e-5)
    (raw,) = images(plot_scores(**where))
    wanted = query[1, 3] @ key[1, 1].T / 8**0.5
    np.testing.assert_allclose(raw, wanted.numpy(), atol=1e-5)


def test_a_plan_counts_what_runs():
    found = attnloom.explain(mods.alibi(4), mods.documented, q_len=512, measure=False)
    counts = {(kind, line.name): count for kind, line, count in statement_runs(found)}
    tiles = found.mask
    assert counts == {
        ("score_mod", "h0"): 4,
        ("score_mod", "return"): tiles.full_scores + tiles.partial_scores,
        ("mask_mod", "r0"): 4 * 512,
        ("mask_mod", "c0"): 4 * 512,
        ("mask_mod", "return"): tiles.partial_scores,
    }
    full, partial = row_work(found)
    assert (full.sum() * 4, partial.sum() * 4) == (tiles.num_full, tiles.num_partial)
    assert (full + partial == found.block_mask.to_dense()[0, 0].sum(1).numpy()).all()
    figure = plot_plan(found)
    assert [axes.get_title() for axes in figure.axes] == [
        "how often each line runs", "tiles of each row"
    ]  # fmt: skip
    assert figure.axes[0].texts[0].get_text() == "once a head, 4: h0 = slope[h]"
    plain = plot_plan(attnloom.explain(mods.alibi(4), q_len=64, measure=False))
    assert len(plain.axes) == 1


def test_figures_are_files(tmp_path):
    """Constrained layout, legends and fonts are laid out only when a figure is drawn."""
    figure = plot_mask(by_head, 40, block_size=16)
    figure.savefig(tmp_path / "mask.png", dpi=40)
    figure.savefig(tmp_path / "mask.svg")
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "mask.svg").stat().st_size > 1000


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'attnloom\[plots\]'"):
        plot_mask(causal, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: plot_mask(causal), ShapeError, "q_len is missing: a mod has no length"),
        (lambda: plot_mask(causal, 0), ShapeError, "q_len is 0; a picture needs 1 token"),
        (lambda: plot_mask(causal, 3, tokens=["a"]), ShapeError, "tokens has 1 label; there are 3"),
        (lambda: plot_mask(causal, 3, 4, kv_tokens="ab"), ShapeError, "kv_tokens has 2 labels"),
        (lambda: plot_block_map(masked(0)), ShapeError, r"shape \[1, 1, 0, 20\].* no score"),
        (lambda: plot_mask(masked(0)), ShapeError, r"shape \[1, 1, 0, 20\].* no score to draw"),
        (lambda: plot_scores(mask=masked(0)), ShapeError, "no score to draw"),
        (lambda: plot_block_map(causal), ModError, "draws a BlockMask, got function"),
        (lambda: plot_plan(causal), OptionError, "draws what attnloom.explain returns, got func"),
        (lambda: plot_scores(query=torch.ones(1, 1, 2, 2)), ShapeError, "give both or neither"),
        (
            lambda: plot_scores(query=torch.ones(1, 3, 2, 2), key=torch.ones(1, 2, 2, 2)),
            ShapeError,
            "heads of query must be a multiple",
        ),
        (
            lambda: plot_scores(query=torch.ones(2, 2), key=torch.ones(2, 2)),
            ShapeError,
            r"query is \[2, 2\]; it must be \[B, H, L, D\]",
        ),
        (
            lambda: plot_scores(
                query=torch.ones(1, 1, 2, 2), key=torch.ones(1, 1, 2, 2), heads=1
            ),
            ShapeError,
            "heads is 1; query .* has 1, counted from 0",
        ),
        (lambda: plot_scores(mods.alibi(2), q_len=8192), ShapeError, "Zoom in with q_range"),
    ],
)  # fmt: skip
def test_mistakes(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_block_map_went_on_beyond_the_tokens():
    """Axes of 277 tokens ran to 288, and the density was not the one that the mask prints."""
    mask = attnloom.create_block_mask(causal, None, None, 277, 250, device="cpu", BLOCK_SIZE=32)
    (axes,) = plot_block_map(mask).axes
    assert (axes.get_xlim(), axes.get_ylim()) == ((-0.5, 249.5), (276.5, -0.5))
    density = 100 - mask.sparsity()
    assert axes.get_title() == f"{density:.1f}% of the scores lie in live tiles"


def test_weights_are_told_apart_though_one_row_has_a_single_key():
    """A document of one token set a linear scale, on which all others were black."""
    ids = torch.tensor([0] + [1] * 99)
    figure = plot_scores(None, lambda b, h, q, kv: ids[q] == ids[kv], q_len=100, softmax=True)
    drawn = figure.axes[0].images[0]
    one, many = (float(drawn.norm(weight)) for weight in (1.0, 1 / 99))
    assert one == pytest.approx(1)
    assert 0 <= float(drawn.norm(0.0)) <= many < 0.6
    figure = plot_scores(mods.alibi(2), causal, q_len=100, softmax=True)
    drawn = figure.axes[0].images[0]
    assert float(drawn.norm(1 / 99)) > 0.3
    assert drawn.get_array().min() == pytest.approx(0, abs=1e-3)  # the values are as they were
    figure.savefig(io.BytesIO())
    bar = figure.axes[-1]
    ticks = {label.get_text() for label in bar.get_yticklabels()}
    assert {"0.01", "0.1", "1"} <= ticks


def test_long_statements_of_a_plan_were_cut():
    def long(score, b, h, q_idx, kv_idx):
        for n in range(8):
            score = score + torch.sin((q_idx - kv_idx) * (n + 2.5))
        return score

    found = attnloom.explain(long, q_len=64, measure=False)
    texts = [text.get_text() for text in plot_plan(found).axes[0].texts]
    statements = [line.text for _, line, _ in statement_runs(found)]
    assert max(map(len, statements)) > 92
    for text, statement in zip(texts, statements, strict=True):
        assert "..." not in text
        assert "".join(text.split()).endswith("".join(statement.split()))
        assert max(map(len, text.split("\n"))) <= 92
