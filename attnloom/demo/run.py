"""The demo from start to summary, on a terminal or into a log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from attnloom.demo.compare import CONTENDERS, StepCost, measure_step
from attnloom.demo.corpus import pack_batches, read_documents
from attnloom.demo.generate import generate
from attnloom.demo.model import Decoder
from attnloom.demo.oracle import TOLERANCE, check_against_oracle
from attnloom.demo.train import Step, TrainConfig, train

_PROMPT = b"\n    def __init__(self, "
_LOG_EVERY_SECONDS = 10.0
# From here on a run has warmed up, and a loss within 1 nat of the first one means failure.
_JUDGED_STEPS = 20


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What `attnloom demo` was asked for.

    out: folder of the pictures. pictures, compare: whether to draw and to measure dense SDPA.
    generated_bytes: length of the text sampled at the end.
    """

    train: TrainConfig = field(default_factory=TrainConfig)
    out: Path = Path("demo_output")
    pictures: bool = True
    compare: bool = True
    generated_bytes: int = 400


def run_demo(config: DemoConfig, console: Console | None = None) -> int:
    """Check, train, compare, generate, draw, sum up.

    Returns:
        Exit code: 0, or 1 if the variant disagrees with the oracle or the loss did not fall.
    """
    console = console or Console()
    variant = config.train.model.variant
    console.rule("attnloom demo")
    console.print(
        "Attention variant: causal inside each document, the "
        f"{variant.window_left} keys before the query, soft-cap {variant.soft_cap:g}, "
        "a learned bias for each head and distance.\n"
    )
    if not _print_oracle_check(config, console):
        return 1
    documents = read_documents()
    torch.manual_seed(config.train.seed)
    decoder = Decoder(config.train.model)
    console.print(
        f"Training on {len(documents)} files of the Python standard library "
        f"({sum(map(len, documents)) / 1e6:.1f} MB); "
        f"{_parameters(decoder) / 1e6:.1f} M parameters; "
        f"{config.train.rows} x {config.train.length} packed bytes a step; "
        f"{torch.get_num_threads()} threads."
    )
    steps = _train_with_progress(decoder, documents, config.train, console)
    costs = _measure_costs(config, console) if config.compare else ()
    _print_sample(decoder, config, console)
    drawn = _draw(decoder, documents, steps, config) if config.pictures else ()
    _print_summary(steps, costs, drawn, console)
    if len(steps) >= _JUDGED_STEPS and not _last_tenth(steps) < steps[0].loss - 1:
        console.print(f"[red]The loss hardly fell in {len(steps)} steps; something is wrong.[/red]")
        return 1
    return 0


def _print_oracle_check(config: DemoConfig, console: Console) -> bool:
    start = time.perf_counter()
    results = check_against_oracle(config.train.model.variant, config.train.seed)
    table = Table(
        title="Against dense float64 attention, small input", title_justify="left", min_width=48
    )
    table.add_column("tensor")
    table.add_column("relative error", justify="right")
    table.add_column(f"at most {TOLERANCE:g}")
    for result in results:
        verdict = "[green]agrees[/green]" if result.agrees else "[red]DISAGREES[/red]"
        table.add_row(result.name, f"{result.error:.1e}", verdict)
    console.print(table)
    console.print(f"Checked in {time.perf_counter() - start:.1f} s, kernel builds included.\n")
    return all(result.agrees for result in results)


def _train_with_progress(
    decoder: Decoder, documents: list[bytes], config: TrainConfig, console: Console
) -> list[Step]:
    steps: list[Step] = []
    logged = -_LOG_EVERY_SECONDS
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("building kernels", total=1.0)
        for step in train(decoder, documents, config):
            steps.append(step)
            line = _describe(step)
            done = max(
                step.seconds / config.seconds, step.index / config.steps if config.steps else 0
            )
            progress.update(task, completed=min(done, 1.0), description=line)
            if not console.is_terminal and step.seconds - logged >= _LOG_EVERY_SECONDS:
                console.print(f"  {step.seconds:5.0f} s  {line}")
                logged = step.seconds
    console.print(f"Trained: {_describe(steps[-1])}\n")
    return steps


def _describe(step: Step) -> str:
    rate = step.tokens / step.seconds
    return (
        f"step {step.index}  loss {step.loss:.2f}  {rate:,.0f} tokens/s  "
        f"tiles skipped {step.skipped_percent:.0f}%"
    )


def _measure_costs(config: DemoConfig, console: Console) -> tuple[StepCost, ...]:
    console.print("Measuring one training step of each kind in a process of its own ...")
    shape = config.train.rows, config.train.length
    return tuple(measure_step(name, *shape, torch.get_num_threads()) for name in CONTENDERS)


def _print_sample(decoder: Decoder, config: DemoConfig, console: Console) -> None:
    start = time.perf_counter()
    text = generate(decoder, _PROMPT, config.generated_bytes, config.train.seed)
    rate = config.generated_bytes / (time.perf_counter() - start)
    shown = (_PROMPT + text).decode("utf-8", errors="replace").strip("\n")
    shown = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in shown
    )
    title = f"What it writes, one byte at a time from a key-value cache ({rate:.0f} bytes/s)"
    console.print(Panel(escape(shown), title=title, title_align="left"))


def _draw(
    decoder: Decoder,
    documents: list[bytes],
    steps: Sequence[Step],
    config: DemoConfig,
) -> tuple[Path, ...]:
    from attnloom.demo import pictures

    batch = next(pack_batches(documents, 1, config.train.length, config.train.seed))
    block_mask = config.train.model.variant.block_mask(batch.documents)
    paths = tuple(config.out / name for name in ("blocks.png", "scores.png", "loss.png"))
    pictures.draw_block_map(block_mask, paths[0])
    pictures.draw_scores(decoder, batch.documents, paths[1])
    pictures.draw_loss(steps, paths[2])
    return paths


def _print_summary(
    steps: Sequence[Step], costs: Sequence[StepCost], drawn: Sequence[Path], console: Console
) -> None:
    last = steps[-1]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("loss", f"{steps[0].loss:.2f} -> {_last_tenth(steps):.2f} nats a byte")
    facts.add_row("trained", f"{len(steps)} steps, {last.tokens:,} bytes, {last.seconds:.0f} s")
    facts.add_row("speed", f"{last.tokens / last.seconds:,.0f} tokens/s")
    skipped = _mean(s.skipped_percent for s in steps)
    facts.add_row("tiles", f"the mask skips {skipped:.0f}% of the score matrix")
    for path in drawn:
        facts.add_row("picture", escape(str(path)))
    console.print(Panel(facts, title="Summary", title_align="left", expand=False))
    if costs:
        _print_costs(costs, console)


def _print_costs(costs: Sequence[StepCost], console: Console) -> None:
    table = Table(title="One training step of the whole model", title_justify="left")
    table.add_column("attention")
    table.add_column("time", justify="right")
    table.add_column("extra peak memory", justify="right")
    for cost in costs:
        extra = "n/a" if cost.extra_bytes is None else f"{cost.extra_bytes / 2**20:,.0f} MiB"
        table.add_row(CONTENDERS[cost.attention], f"{cost.seconds * 1e3:,.0f} ms", extra)
    console.print(table)
    console.print("SDPA cannot soft-cap, so its steps compute a simpler model.")


def _parameters(decoder: Decoder) -> int:
    return sum(p.numel() for p in decoder.parameters())


def _last_tenth(steps: Sequence[Step]) -> float:
    """Mean loss of the last tenth of the steps."""
    return _mean(step.loss for step in steps[-max(1, len(steps) // 10) :])


def _mean(values) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
