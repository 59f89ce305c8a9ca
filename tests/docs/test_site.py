"""The pages of the site: links between them, the menu, docstrings, and the build itself."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import attnloom
from benchmarks.variants import VARIANTS
from tests.docs.blocks import DOCUMENTS, ROOT

DOCS = ROOT / "docs"
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    kept = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in kept}


def _broken(page: Path) -> list[str]:
    found = []
    for link in _LINK.findall(_FENCED.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in _anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert not _broken(page)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n\n[a](#one-two) [b](#three) [c](page.md#one-two) [d](none.md)\n")
    assert _broken(page) == ["#three", "none.md"]


def test_the_menu_lists_every_page() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"([\w/]+\.md)$", menu, re.MULTILINE))
    assert listed == {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}


@pytest.mark.parametrize("name", attnloom.__all__)
def test_docstrings_become_pages(name: str) -> None:
    hooks = _hooks()
    text = hooks.on_page_markdown(f"# {name}\n\n<!-- docstring: {name} -->\n")
    assert "<!--" not in text
    summary = (getattr(attnloom, name).__doc__ or "").strip().split("\n")[0]
    assert summary and summary in text


def test_entries_and_signatures() -> None:
    hooks = _hooks()

    def sample(first: int, *, second: str = "x") -> bool:
        """Do it.

        Args:
            first: a number,
                of lines.
            second: a word.
        Returns:
            Whether
            it was done.
        Raises:
            ShapeError: too many.
        """
        return bool(first) and bool(second)

    assert hooks.signature("sample", sample) == "sample(first: int, *, second: str = 'x') -> bool"
    assert hooks.render(sample) == (
        "Do it.\n\n\n**Args**\n\n- `first`: a number,\n  of lines.\n- `second`: a word.\n\n"
        "**Returns**\n\nWhether\nit was done.\n\n**Raises**\n\n- `ShapeError`: too many."
    )
    with pytest.raises(AttributeError):
        hooks.document("no_such_name")


def test_methods_of_a_class_are_listed() -> None:
    text = _hooks().document("BlockMask")
    for method in ("rows", "crop", "from_cu_seqlens", "to_mask"):
        assert f"### BlockMask.{method}\n" in text


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra 'docs'")
    pytest.importorskip("material", reason="needs the extra 'docs'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "api" / "flex_attention.html").read_text()
    assert "Scaled dot-product attention with a traced score_mod" in page
    gallery = (tmp_path / "site" / "gallery.html").read_text()
    for name in re.findall(r'src="(gallery_[^"]+)"', gallery):
        assert (tmp_path / "site" / name).read_bytes().startswith(b"\x89PNG")
    assert gallery.count('src="gallery_') == len(VARIANTS)
    assert 'src="plot_mask_heads.png"' in (tmp_path / "site" / "api" / "plot_mask.html").read_text()
    loaded = re.findall(r'<(?:script|img)[^>]+src="(https?:[^"]+)', page)
    loaded += re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="(https?:[^"]+)', page)
    assert not loaded
