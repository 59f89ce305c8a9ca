"""`attnloom serve`: options, and the check that what it needs is installed."""

from __future__ import annotations

import argparse
import importlib.util
import math
import signal
import socket
import sys
from pathlib import Path

from attnloom.errors import counted

_NEEDED = ("fastapi", "uvicorn", "safetensors", "tokenizers")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the server."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        help="model: config.json, *.safetensors and tokenizer.json, as save_pretrained writes them",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="serve a tiny random model of bytes instead, to try it"
    )
    parser.add_argument("--name", help="of the model in requests (default: the folder's)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone"
    )
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes a free one")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: that of the weights"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        help="tokens of prompt and output, no more than the model's positions (default: 4096, or "
        "those if they are fewer)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=_waiting,
        default=30,
        help="how long answers that were begun may go on after SIGTERM or Ctrl-C (default: 30)",
    )
    parser.add_argument(
        "--max-running", type=int, default=64, help="requests served at once (default: 64)"
    )
    parser.add_argument(
        "--max-step-tokens", type=int, default=512, help="tokens of a step (default: 512)"
    )
    parser.add_argument(
        "--max-waiting", type=int, default=256, help="more are answered 429 (default: 256)"
    )
    parser.add_argument("--page-size", type=int, default=64, help="tokens a page (default: 64)")
    parser.add_argument(
        "--cache-gib", type=_memory, default=1.0, help="memory for keys and values (default: 1)"
    )
    parser.add_argument(
        "--cuda-graphs",
        choices=("auto", "on", "off"),
        default="auto",
        help="capture decoding steps (default: auto, where there is a CUDA device)",
    )
    parser.add_argument(
        "--speculate",
        action="store_true",
        help="draft what followed the last tokens before, and verify it",
    )


def _memory(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no amount of memory; it must be above 0")
    return value


def _waiting(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 9:
        raise argparse.ArgumentTypeError(
            f"{text} is no time to wait; it must be a whole number of seconds, 0 or more"
        )
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal says not to; 2 if a package is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"attnloom serve needs {' and '.join(missing)}, which the core of attnloom does not "
            "install. Run: pip install 'attnloom[serve]'",
            file=sys.stderr,
        )
        return 2
    if (args.folder is None) != args.tiny:
        print("attnloom serve: give the folder of a model, or --tiny.", file=sys.stderr)
        return 2
    listener = _bind(args.host, args.port)
    if listener is None:
        return 2
    with listener:
        try:
            return _serve(args, listener)
        except KeyboardInterrupt:  # while the model was read; later signals are the server's
            return 128 + signal.SIGINT


def _bind(host: str, port: int) -> socket.socket | None:
    """The address taken, before time is spent on a model; None if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        said = getattr(error, "strerror", None) or str(error).rstrip(".")
        print(
            f"attnloom serve: cannot listen on {host}, port {port}: {said}. Choose another --port "
            "(0: a free one) or --host.",
            file=sys.stderr,
        )
        return None
    return listener


def _serve(args: argparse.Namespace, listener: socket.socket) -> int:
    from attnloom.serving import process
    from attnloom.serving.launch import ServeConfig, build_engine
    from attnloom.serving.server import create_app

    config = ServeConfig(
        folder=args.folder,
        device=args.device,
        dtype=args.dtype,
        max_length=args.max_length,
        max_running=args.max_running,
        max_step_tokens=args.max_step_tokens,
        max_waiting=args.max_waiting,
        page_size=args.page_size,
        cache_bytes=int(args.cache_gib * (1 << 30)),
        speculate=args.speculate,
        cuda_graphs={"auto": "auto", "on": True, "off": False}[args.cuda_graphs],
    )
    engine = build_engine(config)
    engine.warm_up()
    name = args.name or ("tiny" if args.folder is None else args.folder.resolve().name)
    print(
        f"serving {name} on {engine.cache.device}: "
        f"{counted(engine.cache.num_pages, 'page')} of "
        f"{counted(engine.cache.page_size, 'token')}, texts to "
        f"{counted(engine.limits.max_length, 'token')}"
    )
    if not getattr(engine.tokenizer, "has_template", True):
        print("the model has no chat template: conversations are given to it as 'role: text' lines")
    sys.stdout.flush()  # where it is a file, a pipe or a journal, now and not at the end
    return process.run(create_app(engine, name), listener, args.drain_seconds)
