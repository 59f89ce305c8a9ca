"""`attnloom check`: values and gradients of a mod against the float64 oracle."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

from attnloom.cli import mods
from attnloom.cli.output import dtype_name, table, to_json
from attnloom.cli.progress import shown

_DEFAULTS = {"q_len": 160, "batch": 2, "heads": 2, "head_dim": 32, "block_size": 32}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of check."""
    mods.add_problem_options(parser, _DEFAULTS, ", and at most that beyond 2^19 scores")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Check and print; 0 if everything is within the error budget, else 1."""
    from attnloom.tools.checking import check_mod

    with shown() as line, mods.users_errors():
        line.begin("importing the mod")
        found = check_mod(**mods.problem(args), seed=args.seed, progress=line.begin)
    print(to_json(found) if args.json else "\n".join(_text(found)))
    return 0 if found.passed else 1


def _text(found) -> Iterator[str]:
    s = found.setting
    yield (
        f"{' with '.join(found.names)}: batch {s.batch}, heads {s.heads} / {s.kv_heads}, lengths "
        f"{s.q_len} / {s.kv_len}, head_dim {s.head_dim}, {dtype_name(s.dtype)} on {s.device}, seed "
        f"{found.seed}"
    )
    yield from (f"  {note}" for note in s.notes)
    rows: list[tuple[str, ...]] = [
        ("", "max error", "allowed", "mean error", "allowed", "gain - 1", "")
    ]
    for r in found.results:
        mine, most = r.errors, r.allowed
        numbers = (mine.largest, most.largest, mine.mean, most.mean, mine.gain - 1)
        rows.append((r.name, *(_shown(x) for x in numbers), "ok" if r.passed else "WRONG"))
    yield table(rows)
    yield from (f"  {r.name}: {r.problem}" for r in found.results if not r.passed)
    if found.out_of_range:
        yield f"  {found.out_of_range}"
    at = found.indices_at
    reach = f"; indices up to {at.q_len} / {at.kv_len}" if _lengths(at) > _lengths(s) else ""
    verdict = f"passed: as accurate as the error budget asks, at lengths {s.q_len} / {s.kv_len}"
    yield f"{verdict}{reach}" if found.passed else "FAILED"


def _lengths(setting) -> int:
    return setting.q_len * setting.kv_len


def _shown(number: float) -> str:
    """A dash where there is nothing to compare: no limit, or no gain."""
    return f"{number:.1e}" if math.isfinite(number) else "-"
