"""The command `attnloom`: one entry in COMMANDS for each subcommand."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from attnloom.errors import AttnloomError, DtypeError, ModError, OptionError, ShapeError

# What was asked for means nothing, as opposed to: it was tried, and failed.
_MISUSE = (OptionError, ModError, ShapeError, DtypeError)

_SIGPIPE = 128 + 13  # what a shell reports of a program that a closed pipe ended


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand; `module` is imported only when it runs or when its options are needed.

    module: offers add_options(parser) and run(args) -> exit code.
    """

    name: str
    summary: str
    module: str


COMMANDS = (
    Command("demo", "train a small language model through attnloom", "attnloom.cli.demo"),
    Command(
        "explain", "show what attnloom makes of a score_mod or mask_mod", "attnloom.cli.explain"
    ),
    Command("check", "compare a mod's values and gradients with the oracle", "attnloom.cli.check"),
    Command(
        "serve", "serve a model behind an endpoint in the form of OpenAI's", "attnloom.cli.serve"
    ),
    Command("doctor", "say what this machine offers and what is missing", "attnloom.cli.doctor"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: arguments after the program's name; those of the process if None.
    Returns:
        Exit code: 0 on success, 1 if the command failed, 2 if it was called wrongly.
    """
    parser = argparse.ArgumentParser(
        prog="attnloom", description="FlexAttention as an ordinary function."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.summary, description=command.summary
        )
        importlib.import_module(command.module).add_options(subparser)
        subparser.set_defaults(module=command.module)
    args = parser.parse_args(argv)
    try:
        code = importlib.import_module(args.module).run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `attnloom explain ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        return _SIGPIPE
    except AttnloomError as error:
        print(f"attnloom {args.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, _MISUSE) else 1


if __name__ == "__main__":
    sys.exit(main())
