"""Every mod has a place in the reference, with an example that runs."""

from __future__ import annotations

import re

import pytest

import attnloom
from attnloom import mods
from tests.docs.blocks import ROOT, blocks_of

PAGES = sorted((ROOT / "docs" / "api" / "mods").glob("*.md"))
NAMES = [name for name in mods.__all__ if name not in attnloom.__all__]


@pytest.mark.parametrize("name", NAMES)
def test_every_mod_has_a_section_with_an_example(name: str) -> None:
    (page,) = (p for p in PAGES if f"<!-- docstring: mods.{name} -->" in p.read_text())
    text = page.read_text()
    assert f"\n## {name}\n" in text
    section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert any(re.search(rf"\bmods\.{name}\b", b.text) for b in blocks_of(section) if b.runs)


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_say_what_style_asks(name: str) -> None:
    """What it does, what it takes, what it returns, where it comes from."""
    text = getattr(mods, name).__doc__
    assert text
    for section in ("Args:", "Returns:", "Raises:"):
        taken = name not in {"causal_mask", "TokenOrder", "not_mask", "xor_masks", "compose"}
        assert section in text or not taken, f"{name}: {section}"


PAPERLESS = {  # ideas of this library, of torch's users, or too old to cite
    "ancestor_bits", "TokenOrder", "not_mask", "xor_masks", "compose", "per_head", "offset",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(NAMES) - PAPERLESS))
def test_mods_name_their_source(name: str) -> None:
    text = getattr(mods, name).__doc__ or ""
    source = text.split("Source:")
    assert len(source) == 2, name
    assert source[1].strip(), name
