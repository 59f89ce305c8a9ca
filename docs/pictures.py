"""What mkdocs runs on pages with pictures, which are made while the site is built:

<!-- figure: NAME -->    the matplotlib figure that the Python blocks above call NAME
<!-- gallery -->         every example of benchmarks/variants.py: picture, code, density, speed
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

from mkdocs.structure.files import File

from attnloom.plots import plot_mask, plot_scores
from benchmarks.gallery import RESULTS, Example, examples, results_line
from benchmarks.rows import Row
from tests.docs.blocks import blocks_of

_FIGURE = re.compile(r"^<!-- figure: (\w+) -->$", re.MULTILINE)
_GALLERY = "<!-- gallery -->"
_PICTURE_S = 64
_SCORE_HEADS = 4
_DPI = 96


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any, **_: Any) -> str:
    """mkdocs' hook: the page with its markers replaced and its pictures among the files."""
    stem = page.file.src_uri.removesuffix(".md")

    def add(name: str, figure: Any) -> str:
        path = f"{stem}_{name}.png"
        out = io.BytesIO()
        figure.savefig(out, dpi=_DPI)
        files.append(File.generated(config, path, content=out.getvalue()))
        return f"{path.rpartition('/')[2]}"

    if _FIGURE.search(markdown):
        markdown = _with_figures(markdown, add)
    if _GALLERY in markdown:
        markdown = markdown.replace(_GALLERY, _gallery(add))
    return markdown


def _with_figures(markdown: str, add: Any) -> str:
    """Runs the page's blocks as far as each marker."""
    blocks = [block for block in blocks_of(markdown) if block.runs]
    namespace: dict[str, Any] = {"__name__": "docs_page"}
    done = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal done
        line = markdown[: match.start()].count("\n") + 1
        while done < len(blocks) and blocks[done].line < line:
            exec(compile(blocks[done].text, "page", "exec", dont_inherit=True), namespace)
            done += 1
        return f"![{match[1]}]({add(match[1], namespace[match[1]])})"

    return _FIGURE.sub(replace, markdown)


def _gallery(add: Any) -> str:
    parts: list[str] = []
    family = ""
    for example in examples():
        if example.variant.family != family:
            family = example.variant.family
            parts.append(f"## {family.capitalize()}s")
        parts.append(_entry(example, add))
    parts.append("## How it was measured")
    parts += [results_line(name) for name in RESULTS]
    return "\n\n".join(parts)


def _entry(example: Example, add: Any) -> str:
    variant = example.variant
    title = ", ".join(f"`{name}`" for name in variant.names)
    score_mod, mask_mod = variant.build(1, _SCORE_HEADS, _PICTURE_S)
    q_len, kv_len = variant.lengths(_PICTURE_S)
    several = list(range(_SCORE_HEADS)) if "h" in variant.mask_axes else [0]
    if score_mod is not None:
        figure = plot_scores(score_mod, mask_mod, q_len=q_len, kv_len=kv_len)
    else:
        assert mask_mod is not None, "an example sets one of them"
        figure = plot_mask(mask_mod, q_len, kv_len, block_size=16, heads=several)
    speeds = [_speed(name, row) for name, row in example.rows.items()]
    measured = mask_mod is not None and not math.isnan(example.density)
    facts = [f"Keeps {example.density:.1%} of the scores." if measured else ""]
    return "\n\n".join(
        [
            f"### {title}",
            variant.summary,
            f"![{variant.name}]({add(variant.name, figure)})",
            f"```python\n{_listing(example)}\n```",
            " ".join(filter(None, [*facts, *speeds])),
        ]
    )


def _listing(example: Example) -> str:
    """The example as a program: imports, sizes, mods, and the call."""
    variant = example.variant
    lines, arguments, names = [variant.code], ["query, key, value"], ["flex_attention", "mods"]
    if "score_mod" in variant.code:
        arguments.append("score_mod=score_mod")
    if "mask_mod" in variant.code:
        axes = ", ".join(n if n.lower() in variant.mask_axes else "None" for n in ("B", "H"))
        lengths = f"{variant.q_len}, {variant.kv_len}"
        lines.append(f"block_mask = create_block_mask(mask_mod, {axes}, {lengths})")
        arguments.append("block_mask=block_mask")
        names.insert(0, "create_block_mask")
    lines.append(f"out = flex_attention({', '.join(arguments)})")
    code = "\n".join(lines)
    modules = [f"import {name}" for name in ("math", "torch") if f"{name}." in code]
    sizes = {"B": 1, "H": _SCORE_HEADS, "S": 4096}
    used = [f"{n} = {size}" for n, size in sizes.items() if re.search(rf"\b{n}\b", code)]
    head = [*modules, f"from attnloom import {', '.join(names)}", "", *used]
    return "\n".join([*head, code])


def _speed(device: str, row: Row | None) -> str:
    if row is None or row.ratio is None:
        return ""
    return (
        f"{device}: {row.ours:.2f} ms, {row.peer} {row.theirs:.2f} ms, {row.ratio:.2f} times as "
        "fast."
    )
