"""`attnloom explain`: what attnloom makes of a mod, as text or JSON."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from attnloom.cli import mods
from attnloom.cli.output import dtype_name, table, to_json
from attnloom.cli.progress import shown
from attnloom.errors import OptionError, counted
from attnloom.tools.alike import pairs_text

_MOST_MAPS = 8
_DEFAULTS = {"q_len": 2048, "batch": 1, "heads": 1, "head_dim": 64, "block_size": 128}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of explain."""
    mods.add_problem_options(parser, _DEFAULTS)
    parser.add_argument(
        "--no-measure", action="store_true", help="leave out the measured cost of a tile"
    )
    parser.add_argument(
        "--program", action="store_true", help="also print every node of the programs"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE",
        help="also write a page: block map, programs, where they run, cost; it needs nothing else",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Explain and print; 0."""
    from attnloom.tools.explanation import explain

    with shown() as line, mods.users_errors():
        line.begin("importing the mod")
        found = explain(**mods.problem(args), measure=not args.no_measure, progress=line.begin)
    print(to_json(found) if args.json else "\n".join(_text(found, args.program)))
    if args.html is not None:
        _write_page(found, args.html)
    return 0


def _write_page(found, path: Path) -> None:
    from attnloom.plots.page import explain_html

    try:
        path.write_text(explain_html(found), encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"--html {path} cannot be written ({error.strerror}). Name a file in a folder that "
            "exists and is yours."
        ) from None
    print(f"wrote {path}", file=sys.stderr)


def _text(found, with_program: bool) -> Iterator[str]:
    s = found.setting
    yield (
        f"query [{s.batch}, {s.heads}, {s.q_len}, {s.head_dim}], key and value [{s.batch}, "
        f"{s.kv_heads}, {s.kv_len}, {s.head_dim}], {dtype_name(s.dtype)} on {s.device}"
    )
    yield from (f"  {note}" for note in s.notes)
    for traced in found.mods:
        yield from ("", *_mod(traced, with_program))
    if found.gradient is not None:
        yield from ("", *_gradient(found.gradient))
    if found.mask is not None:
        yield from ("", *_mask(found.mask, s))
    yield from ("", *_backend(found.backend))
    if found.speed is not None:
        yield from ("", *_speed(found.speed))


def _mod(traced, with_program: bool) -> Iterator[str]:
    yield f"{traced.kind} '{traced.name}' ({traced.place})"
    for c in traced.captures:
        learnable = ", gets a gradient" if c.learnable else ""
        yield f"  reads {c.name} {list(c.shape)} {dtype_name(c.dtype)}{learnable}"
    yield table([(s.when, _assignment(s)) for s in traced.statements])
    if with_program:
        yield "\n".join(f"    {line}" for line in traced.program.split("\n"))


def _assignment(statement) -> str:
    if statement.name == "return":
        return f"return {statement.text}"
    return f"{statement.name} = {statement.text}"


def _gradient(gradient) -> Iterator[str]:
    yield f"gradient ({counted(gradient.num_nodes, 'operation')}, the recomputed score included)"
    yield table([(s.when, _assignment(s)) for s in gradient.statements])
    for c in gradient.captured:
        over = f"; summed over {c.summed_over}" if c.summed_over else ""
        yield f"  d_{c.name}[{c.index}] += {c.value}{over}"
    if not gradient.captured:
        yield "  no captured tensor requires grad"


def _mask(mask, setting) -> Iterator[str]:
    empty = mask.num_tiles - mask.num_full - mask.num_partial
    q_block, kv_block = setting.block_size
    yield (
        f"block map ({list(mask.shape)} in tiles of {q_block} x {kv_block}, built in "
        f"{mask.build_seconds * 1e3:.1f} ms)"
    )
    yield table(
        [
            ("full", _share(mask.num_full, mask.num_tiles), "the mask_mod is not asked"),
            ("partial", _share(mask.num_partial, mask.num_tiles), "asked at every score"),
            ("empty", _share(empty, mask.num_tiles), "skipped"),
            ("density", f"{mask.density:.2%}", "of the scores lie in tiles that are computed"),
        ]
    )
    if mask.finer is not None:
        size, density = mask.finer
        yield f"  with --block-size {size} the density would be {density:.2%}"
    same = "the tiles of all batch entries and heads are alike"
    if len(mask.alike) > 1:
        yield from _maps(mask.alike)
        same = "the first map"
    yield f"  {same}; rows are queries, columns are keys:"
    yield "\n".join(f"  |{line}|" for line in mask.picture.split("\n"))


def _maps(alike) -> Iterator[str]:
    yield f"  {len(alike)} maps differ:"
    for number, pairs in enumerate(alike[:_MOST_MAPS], 1):
        yield f"    {number}: {pairs_text(pairs)}"
    if len(alike) > _MOST_MAPS:
        yield f"    and {counted(len(alike) - _MOST_MAPS, 'map')} more (--html shows 16)"


def _share(count: int, total: int) -> str:
    return f"{count} of {total} ({count / total:.1%})"


def _backend(choice) -> Iterator[str]:
    yield f"backend {choice.backend} (kernel: {choice.kernel})"
    yield f"  {choice.why}"
    for rejected in choice.rejected:
        yield f"  not {rejected.backend}: {rejected.reason}"


def _speed(speed) -> Iterator[str]:
    yield (
        f"expected forward {_ms(speed.expected_ms)}, dense attention without mods "
        f"{_ms(speed.dense_ms)}: speed-up {speed.speedup:.2f}"
    )
    costs = (("plain", speed.plain_ns), ("full", speed.full_ns), ("partial", speed.partial_ns))
    measured = [(name, ns) for name, ns in costs if not math.isnan(ns)]
    yield table([(f"{name} tile", f"{ns:.3f} ns a score") for name, ns in measured])
    yield f"  {speed.how}"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 1e4 else f"{milliseconds:.3g} ms"
