"""Every Python block of the README and the documentation runs and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import attnloom
from attnloom import plots, stats
from tests.docs.blocks import DOCUMENTS, ROOT, blocks_of, run

WITH_CODE = [d for d in DOCUMENTS if any(b.runs for b in blocks_of(d.read_text()))]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", WITH_CODE, ids=_name)
def test_blocks_run(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what other tests of this process had to fall back for is nothing that a page shows
    monkeypatch.setitem(stats._counts, "fallbacks", 0)
    assert run(document) > 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_python_is_marked_as_python(document: Path) -> None:
    """Nothing escapes this test under another name."""
    languages = {block.language for block in blocks_of(document.read_text())}
    assert languages <= {"python", "text", "sh", ""}


@pytest.mark.parametrize("path", [*attnloom.__all__, *(f"plots.{n}" for n in plots.__all__)])
def test_every_public_name_has_a_page_with_an_example(path: str) -> None:
    name = path.rpartition(".")[2]
    page = ROOT / "docs" / "api" / f"{name}.md"
    assert page.is_file(), f"write {_name(page)}, with an example, and list it in mkdocs.yml"
    text = page.read_text()
    assert f"<!-- docstring: {path} -->" in text
    examples = [b for b in blocks_of(text) if b.runs]
    assert any(re.search(rf"\b{name}\b", b.text) for b in examples)


def test_a_wrong_output_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(2)\n```\n\n<!-- output -->\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match=r"page.md:7 shows\n3\n\nbut .* prints\n2"):
        run(page)
    page.write_text(page.read_text().replace("\n3\n", "\n2\n"))
    assert run(page) == 1


def test_a_failing_block_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run(page)
    assert caught.traceback[-1].lineno + 1 == 8


def test_a_block_that_does_not_run_needs_a_reason() -> None:
    quiet = "<!-- no-run: needs a GPU -->\n```python\n1 / 0\n```\n"
    assert not blocks_of(quiet)[0].runs
    assert blocks_of(quiet.replace(": needs a GPU", ""))[0].runs
    with pytest.raises(ValueError, match="fences look like"):
        blocks_of("```{python}\n```\n")
