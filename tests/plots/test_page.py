"""`attnloom explain --html`: the page's text and data, and the page in a browser."""

from __future__ import annotations

import base64
import html.parser
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import attnloom
from attnloom.cli.main import main
from attnloom.errors import OptionError
from attnloom.plots import explain_html
from attnloom.plots.cells import Kind, tile_kinds
from attnloom.plots.colours import palette_rgb
from attnloom.plots.region import Region
from tests.plots import browser
from tests.tools import mods

_VOID = {"meta", "img", "link", "br", "input"}


def two_windows(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 300 * (h + 1))


def scaled(score, b, h, q_idx, kv_idx):
    return score * (1 if h < 1 else 2) + (kv_idx < 3)


@pytest.fixture(scope="module")
def found():
    return attnloom.explain(scaled, two_windows, q_len=1000, kv_len=1200, heads=2, measure=False)


class _Reader(html.parser.HTMLParser):
    """Elements, text outside scripts and styles, and whether every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def _data(page):
    (text,) = re.findall(r'id="map-data">(.*?)</script>', page)
    return json.loads(text)


def test_the_page_says_what_explain_found(found):
    page = explain_html(found)
    reader = _Reader(page)
    assert reader.open == []
    text = " ".join(" ".join(reader.text).split())
    for said in (
        "score_mod scaled with mask_mod two_windows",
        "query [1, 2, 1000, 64], key and value [1, 2, 1200, 64], float32 on cpu",
        f"{found.mask.density:.2%} of the scores lie in tiles that are computed",
        f"full {found.mask.num_full} {found.mask.num_full / found.mask.num_tiles:.1%}",
        "2 block maps differ over batch entries and heads.",
        found.backend.why,
        "No captured tensor requires grad.",
        *(f"{mod.kind} {mod.name} defined in {mod.place}" for mod in found.mods),
        *(s.text for mod in found.mods for s in mod.statements),
    ):
        assert " ".join(said.split()) in text, said
    # `<` of a formula reached the text as itself, so it was escaped.
    assert "kv_idx < 3" in text


def test_the_page_needs_nothing_else(found):
    reader = _Reader(explain_html(found))
    for _, attributes in reader.elements:
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert "http" not in re.sub(r"data:\S+", "", explain_html(found))


def test_pictures_and_data_are_the_block_map(found):
    page = explain_html(found)
    data = _data(page)
    pictures = _Reader(page).named("img")
    assert [("hidden" in a) for a in pictures] == [False, True]
    image_module = pytest.importorskip("PIL.Image", reason="needs the extra 'plots'")
    for head, attributes in enumerate(pictures):
        kinds = tile_kinds(found.block_mask, Region(0, (head,), (0, 1000), (0, 1200)), head)
        assert data["cells"][head] == ["".join(map(str, row)) for row in kinds.tolist()]
        file = base64.b64decode(attributes["src"].partition("base64,")[2])
        pixels = np.asarray(image_module.open(io.BytesIO(file)))
        assert (pixels == np.round(palette_rgb()[kinds] * 255)).all()


def test_heads_that_share_a_map_are_named():
    def window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < torch.where(h == 1, 300, 900))

    explained = attnloom.explain(
        None, window, q_len=1000, heads=4, batch=2, block_size=64, measure=False
    )
    page = explain_html(explained)
    reader = _Reader(page)
    assert len(reader.named("img")) == len(reader.named("option")) == len(_data(page)["cells"]) == 2
    text = " ".join(" ".join(reader.text).split())
    assert "2 block maps differ over batch entries and heads." in text
    for pairs in ("batch 0, 1, heads 0, 2, 3", "batch 0, 1, head 1"):
        assert text.count(pairs) == 2  # the choice, and the list


def test_long_masks_share_cells():
    found = attnloom.explain(
        None, two_windows, q_len=128 * 300, kv_len=128 * 100, heads=1, measure=False
    )
    data = _data(explain_html(found))
    assert data["tiles"] == [3, 1]
    assert (len(data["cells"][0]), len(data["cells"][0][0])) == (100, 100)
    kinds = tile_kinds(found.block_mask, Region(0, (0,), (0, 38400), (0, 12800)), 0)
    joined = kinds.reshape(100, 3, 100)
    alike = (joined == joined[:, :1]).all(1)
    wanted = np.where(alike, joined[:, 0], Kind.DROPPED)
    assert data["cells"][0] == ["".join(map(str, row)) for row in wanted.tolist()]


def test_without_a_mask_and_with_measured_costs():
    page = explain_html(attnloom.explain(mods.learned, q_len=128, head_dim=16))
    text = " ".join(_Reader(page).text)
    assert "Block map" not in text
    assert "map-data" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert "Expected speed-up over dense attention" in text
    assert "d_bias[h, " in text


def test_the_command_writes_it(tmp_path, capsys):
    target = tmp_path / "page.html"
    mod = "tests.tools.mods:window(left=40)"
    arguments = ["explain", mod, "--q-len", "256", "--no-measure", "--html"]
    assert main([*arguments, str(target)]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"wrote {target}\n"
    assert captured.out.startswith("query [1, 1, 256, 64]")
    assert "mask_mod window.mask_mod" in target.read_text()
    assert main([*arguments, str(tmp_path / "none" / "page.html")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_it_takes_an_explanation_only():
    with pytest.raises(OptionError, match=r"shows what attnloom\.explain returns, got NoneType"):
        explain_html(None)


@pytest.mark.skipif(
    browser.DRIVER is None or browser.CHROMIUM is None, reason="needs chromium and chromedriver"
)
def test_in_a_browser(found, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(explain_html(found), encoding="utf-8")
    with browser.browser() as session:
        session.open(page.as_uri())
        assert session.run("return document.documentElement.dataset.ready") == "2"
        size = "return [...document.images].map(i => [i.naturalWidth, i.naturalHeight])"
        assert session.run(size) == [[10, 8], [10, 8]]
        box = session.run("return document.images[0].getBoundingClientRect().toJSON()")

        def cell_at(row, column):
            session.point(
                box["x"] + (column + 0.5) * box["width"] / 10,
                box["y"] + (row + 0.5) * box["height"] / 8,
            )
            return session.run("return document.getElementById('cell').textContent")

        kinds = tile_kinds(found.block_mask, Region(0, (0,), (0, 1000), (0, 1200)), 0)
        assert kinds[4, 3] == Kind.FULL
        assert cell_at(4, 3) == (
            "queries 512 .. 639, keys 384 .. 511: full: the mask_mod is not asked"
        )
        assert cell_at(7, 9) == "queries 896 .. 999, keys 1152 .. 1199: empty: never computed"
        assert cell_at(6, 4).endswith("partial: the mask_mod is asked")
        choose = "const s = document.getElementById('entry'); s.value = '1';"
        session.run(choose + "s.dispatchEvent(new Event('change'));")
        shown = session.run("return [...document.images].map(i => i.offsetParent !== null)")
        assert shown == [False, True]
        assert cell_at(6, 4).endswith("full: the mask_mod is not asked")
        wide = "return document.documentElement.scrollWidth <= window.innerWidth"
        assert session.run(wide)
        assert session.console() == []
