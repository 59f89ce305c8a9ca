"""`attnloom serve`: options, and the check that what it needs is installed."""

from __future__ import annotations

import argparse
import importlib.util
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
        "--max-length", type=int, default=4096, help="tokens of prompt and output (default: 4096)"
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
        "--cache-gib", type=float, default=1.0, help="memory for keys and values (default: 1)"
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


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; 2 if a package is missing."""
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
    import uvicorn

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
        f"{counted(engine.cache.book.allocator.num_pages, 'page')} of "
        f"{counted(engine.cache.page_size, 'token')}"
    )
    uvicorn.run(create_app(engine, name), host=args.host, port=args.port, log_level="info")
    return 0
