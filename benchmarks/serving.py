"""Output tokens a second of a decoder: our engine, SDPA over a padded cache, torch's flex over its
pages, and what memory would allow.

python -m benchmarks.serving [--shape 8b|small] [--sequences 32] [--prompt 1024] [--tokens 64]
                             [--peers sdpa,torch-flex] [--runs 3] [--json FILE]

Weights are random, made on the device; all contenders run the same ones in one process in turn, and
prompts are between half of --prompt and all of it. What is measured is decoding: the time of the
first token is left out. `bound` is the time in which the device reads all weights and all keys and
values once a step, at the bandwidth that it shows when it reads a large tensor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from attnloom.serving import Decoder, ModelConfig, Rope, random_decoder
from attnloom.serving.launch import page_bytes
from benchmarks import rows as rows_module
from benchmarks.rows import Row
from benchmarks.serving_peers import PEERS, Decoded, Workload, attnloom_engine, now
from benchmarks.tables import machine_line, markdown

SHAPES = {
    "8b": ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_length=32768,
        windows=(None,) * 32,
        scale_dim=128,
        rope=Rope(500000.0),
    ),
    "small": ModelConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        max_length=32768,
        windows=(None,) * 4,
        scale_dim=64,
    ),
}


def workload(args: argparse.Namespace, vocab_size: int) -> Workload:
    """Prompts of different lengths, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    shortest = max(1, args.prompt // 2)
    spread = torch.linspace(shortest, args.prompt, args.sequences).long().tolist()
    prompts = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in spread]
    return Workload(prompts, args.tokens)


def bandwidth(model: Decoder) -> float:
    """Bytes a second of the best of ten reads of a tensor that no cache holds."""
    num = (1 << 31 if model.device.type == "cuda" else 1 << 28) // 4
    data = torch.ones(num, device=model.device)
    best = float("inf")
    for _ in range(10):
        begin = now(model)
        data.sum().item()
        best = min(best, now(model) - begin)
    return 4 * num / best


def step_bytes(model: Decoder, work: Workload) -> float:
    """What one step must read: weights but the table of embeddings, and keys and values."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if not model.config.tied:
        weights -= model.embed_tokens.weight.numel() * model.embed_tokens.weight.element_size()
    held = sum(len(p) + work.num_tokens / 2 for p in work.prompts)
    return weights + held * page_bytes(model, 1)


def measure(model: Decoder, work: Workload, args: argparse.Namespace) -> list[Row]:
    """A row for each peer that runs; their steps in ms and ours."""
    contenders: dict[str, Callable[[Decoder, Workload], Decoded]] = {"attnloom": attnloom_engine}
    contenders |= {name: PEERS[name] for name in args.peers}
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, list[list[int]]] = {}
    for run in range(args.runs + 1):  # the first one compiles
        for name in list(contenders):
            try:
                decoded = contenders[name](model, work)
            except Exception as error:
                if name == "attnloom":
                    raise
                print(f"{name} does not run: {type(error).__name__}: {error}", file=sys.stderr)
                del contenders[name]
                continue
            tokens[name] = decoded.tokens
            if run:
                seconds.setdefault(name, []).append(decoded.seconds / (work.num_tokens - 1) * 1e3)
    _report_agreement(tokens)
    bound_ms = step_bytes(model, work) / bandwidth(model) * 1e3
    ours = seconds.pop("attnloom")
    return [_row(model, work, ours, name, theirs) for name, theirs in seconds.items()] + [
        _row(model, work, ours, "bound", [bound_ms])
    ]


def _report_agreement(tokens: dict[str, list[list[int]]]) -> None:
    """How many output tokens are the same: all in float32; in bfloat16 near ties part ways."""
    ours = tokens["attnloom"]
    for name, theirs in tokens.items():
        pairs = [
            (a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
        ]
        same = sum(a == b for a, b in pairs)
        print(f"{name}: {same} of {len(pairs)} tokens as ours", file=sys.stderr)


def _row(model: Decoder, work: Workload, ours: list[float], peer: str, theirs: list[float]) -> Row:
    config, num = model.config, len(work.prompts)
    longest = max(map(len, work.prompts)) + work.num_tokens
    return Row(
        suite="serving",
        case=f"b{num}-p{max(map(len, work.prompts))}-t{work.num_tokens}",
        phase="decode",
        unit="ms",
        ours=statistics.median(ours),
        dtype={torch.float32: "fp32", torch.bfloat16: "bf16"}[model.dtype],
        shape=[num, config.num_heads, config.num_kv_heads, 1, longest, config.head_dim],
        peer=peer,
        theirs=statistics.median(theirs),
        num_runs=len(ours),
    )


def table(rows: Sequence[Row]) -> str:
    """Tokens a second of each peer beside ours."""
    lines = []
    for row in rows:
        num = row.shape[0] if row.shape else 1
        assert row.theirs is not None and row.ratio is not None
        rates = (f"{num * 1e3 / ms:,.0f}" for ms in (row.ours, row.theirs))
        lines.append([row.case, row.dtype or "", row.peer or "", *rates, f"{row.ratio:.2f}"])
    return markdown(["case", "dtype", "peer", "tokens/s", "peer's", "ratio"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=list(SHAPES), default="8b" if cuda else "small")
    parser.add_argument("--sequences", type=int, default=32 if cuda else 8)
    parser.add_argument("--prompt", type=int, default=1024 if cuda else 256)
    parser.add_argument("--tokens", type=int, default=64 if cuda else 32)
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    device = "cuda" if cuda else "cpu"
    dtype = torch.bfloat16 if cuda else torch.float32
    model = random_decoder(SHAPES[args.shape], device, dtype)
    rows = measure(model, workload(args, model.config.vocab_size), args)
    head = rows_module.header("attnloom")
    if args.json:
        rows_module.write(args.json, head, rows)
    print(table(rows))
    print(machine_line(head))
    return 0


if __name__ == "__main__":
    sys.exit(main())
