"""`attnloom demo`: options, and the check that what it needs is installed."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the demo."""
    parser.add_argument(
        "--seconds", type=_positive(float), default=120.0, help="training time (default: 120)"
    )
    parser.add_argument(
        "--steps", type=_positive(int), help="stop after this many steps, whatever the time"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and text")
    parser.add_argument(
        "--out", type=Path, default=Path("demo_output"), help="folder of the pictures"
    )
    parser.add_argument("--no-pictures", action="store_true", help="draw nothing")
    parser.add_argument(
        "--no-compare", action="store_true", help="leave out the measurement against dense SDPA"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 2 if one of its packages is missing."""
    needed = ["rich"] if args.no_pictures else ["rich", "matplotlib"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"attnloom demo needs {' and '.join(missing)}, which the core of attnloom does not "
            "install. Run: pip install 'attnloom[demo]'",
            file=sys.stderr,
        )
        return 2
    from attnloom.demo.run import DemoConfig, run_demo
    from attnloom.demo.train import TrainConfig

    return run_demo(
        DemoConfig(
            train=TrainConfig(seconds=args.seconds, steps=args.steps, seed=args.seed),
            out=args.out,
            pictures=not args.no_pictures,
            compare=not args.no_compare,
        )
    )


def _positive(kind: type):
    def parse(text: str):
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    parse.__name__ = kind.__name__
    return parse
