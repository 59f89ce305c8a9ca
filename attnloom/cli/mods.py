"""What `explain` and `check` share: naming mods, the sizes of a problem, errors of users' code."""

from __future__ import annotations

import argparse
import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import attnloom
from attnloom.errors import AttnloomError, ModError, OptionError, TraceError
from attnloom.tools.setting import DTYPES
from attnloom.tools.target import resolve
from attnloom.trace.messages import source_line

_TARGET = (
    "package.module:function or path/file.py:function, a score_mod or a mask_mod; a factory with "
    "literal arguments as 'mods.py:alibi(8)', a method as 'model.py:Layer(64).score_mod'"
)
_TOLD = {"q-len": "q_idx", "batch": "b", "heads": "h"}
# Folders whose frames are not the user's code.
_LIBRARIES = tuple(str(Path(p.__file__).parent) for p in (attnloom, torch) if p.__file__)


def add_problem_options(
    parser: argparse.ArgumentParser, defaults: dict[str, int], cut: str = ""
) -> None:
    """Declare the mods and the sizes. defaults: of --q-len, --batch, --heads, --head-dim and
    --block-size. cut: what becomes of lengths that are told and too long."""
    parser.add_argument("mod", metavar="MODULE:FUNCTION", help=_TARGET)
    parser.add_argument("--mask", metavar="MODULE:FUNCTION", help="a mask_mod beside a score_mod")
    for name, what in (
        ("q-len", "queries"),
        ("kv-len", "keys (default: as captured tensors say, else as many as queries)"),
        ("batch", "batch entries"),
        ("heads", "query heads"),
        ("kv-heads", "key heads (default: as many as query heads)"),
        ("head-dim", "features of a head"),
    ):
        default = defaults.get(name.replace("-", "_"))
        text = what if default is None else f"{what} (default: {default})"
        if name in _TOLD:  # the tools know the default, and look at the mods first
            default, letter = None, _TOLD[name]
            text = f"{what} (default: as captured tensors indexed by {letter} say, else "
            text += f"{defaults[name.replace('-', '_')]}"
            text += f"{cut})" if name == "q-len" else ")"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--block-size", type=_block_size, default=defaults["block_size"], metavar="N[,M]",
        help=f"tokens of a tile, or query,key (default: {defaults['block_size']})",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--device", help="default: that of the captured tensors")
    parser.add_argument("--backend", default="auto", help="default: auto")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def problem(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `explain` and `check_mod`.

    Raises:
        OptionError, ModError: a mod cannot be found, or is of the wrong kind.
    """
    first = resolve(args.mod)
    mods = {first.kind: first.mod}
    if args.mask is not None:
        second = resolve(args.mask)
        if second.kind != "mask_mod":
            raise ModError(f"--mask is '{args.mask}', which is a score_mod; swap the two.")
        if first.kind == "mask_mod":
            raise OptionError(
                f"'{args.mod}' and --mask '{args.mask}' are both mask_mods; join them with "
                "attnloom.and_masks in a file and name the result."
            )
        mods["mask_mod"] = second.mod
    names = "q_len kv_len batch heads kv_heads head_dim block_size dtype device".split()
    return {
        **mods,
        **{name: getattr(args, name) for name in names},
        "kernel_options": {"backend": args.backend},
    }


@contextlib.contextmanager
def users_errors() -> Iterator[None]:
    """Name the line where a mod itself raises, in place of a traceback through attnloom.

    Raises:
        TraceError: an exception that is not attnloom's came from the user's own code.
    """
    try:
        yield
    except AttnloomError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        if last.filename.startswith(_LIBRARIES):
            raise
        line = source_line(last.filename, last.lineno or 0, getattr(last, "colno", None))
        raise TraceError(
            f"the mod raised {type(error).__name__}: {error} ({Path(last.filename).name}:"
            f"{last.lineno})\n    {line}"
        ) from error


def _block_size(text: str) -> int | tuple[int, int]:
    parts = [int(part) for part in text.split(",")]
    if len(parts) > 2:
        raise argparse.ArgumentTypeError(f"must be N or N,M, got {text}")
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])
