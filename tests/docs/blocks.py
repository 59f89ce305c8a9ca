"""Code blocks of Markdown documents, and what a reader would see when running them.

```python                         run; blocks of one document share a namespace
<!-- no-run: reason -->           on the line before a block: not run
<!-- output -->                   on the line before a ```text block: what the block above it
                                  prints; `...` stands for anything
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\s*$")
_MARK = re.compile(r"^<!-- (no-run: \S.*|output) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. line: of its first line of text, from 1. mark: of the comment before it."""

    language: str
    text: str
    line: int
    mark: str

    @property
    def runs(self) -> bool:
        return self.language == "python" and not self.mark.startswith("no-run")


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks of a document, in order.

    Raises:
        ValueError: a fence that this reader does not understand, or one left open.
    """
    lines = text.splitlines()
    found: list[Block] = []
    start: int | None = None
    language = ""
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        fence = _FENCE.match(line)
        if fence is None:
            raise ValueError(f"line {number}: fences look like ```python, got {line!r}")
        if start is None:
            start, language = number, fence[1]
            continue
        mark = _MARK.match(lines[start - 2]) if start > 1 else None
        body = "\n".join(lines[start : number - 1]) + "\n"
        found.append(Block(language, body, start + 1, mark[1] if mark else ""))
        start = None
    if start is not None:
        raise ValueError(f"line {start}: the fence is never closed")
    return found


def run(document: Path) -> int:
    """Run a document's Python blocks; the number of blocks that ran.

    Raises:
        AssertionError: a block prints something else than the document says.
        Whatever a block raises; its traceback names the document and the line.
    """
    namespace: dict[str, Any] = {"__name__": f"docs_{document.stem}"}
    printed: str | None = None
    count = 0
    for block in blocks_of(document.read_text()):
        if block.runs:
            code = "\n" * (block.line - 1) + block.text
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, str(document), "exec", dont_inherit=True), namespace)
            printed = out.getvalue()
            count += 1
        elif block.mark == "output":
            assert printed is not None, f"{document.name}:{block.line}: output of no block"
            _compare(printed, block, document)
            printed = None
    return count


def _compare(printed: str, block: Block, document: Path) -> None:
    # Long lines are wrapped in documents, and pictures have spaces at the ends of lines.
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    same = doctest.OutputChecker().check_output(block.text, printed, flags)
    assert same, (
        f"{document.name}:{block.line} shows\n{block.text}\nbut the block before it prints\n"
        f"{printed}"
    )
