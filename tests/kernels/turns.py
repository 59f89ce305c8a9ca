"""Kernels while processes take turns on a GPU: which of them lose what they had begun?

python -m tests.kernels.turns [--only NAME ...] [--processes 8] [--seconds 12] [--way WAY]
                              [--json FILE]

Without MPS a GPU changes between processes every 2 ms or so, in the middle of a kernel. Every
subject runs in a process of its own, as many at once as asked for (a subject several times if there
are fewer), compares each launch bit for bit with its first one, and finds its results' memory
filled with LEFT before. Subjects: the attention kernels with durations of more than a turn, cuDNN
and products of matrices for comparison, and the small kernels of turns_kernels.py, each with one
part more than the last. PLANTED, to be named by --only, has the fault that lost tiles: with luck it
is wrong in one of a hundred launches. docs/log.md, 2026-11-30, says what was seen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.apart import run_apart
from benchmarks.gpu_cases import GpuCase
from benchmarks.tables import markdown
from tests.kernels.turns_ways import WAYS, install

LEFT = 777.0  # in memory that nobody wrote to
START_S = 60.0  # for compiling and the first launch
_FOUND = "turns: "
_NOISE = 4e-3  # of sums in no fixed order, over the largest element
Run = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Finding:
    """runs, wrong: launches, and those that differ. left: elements of them that were never written.
    verdict: right, wrong, failed or hung."""

    subject: str
    verdict: str
    runs: int = 0
    wrong: int = 0
    left: int = 0
    detail: str = ""


def main(argv: list[str] | None = None) -> int:
    """Run subjects beside each other, print a table; 0 if all were right."""
    args = _parser().parse_args(argv)
    if args.one:
        if args.way:
            install(args.way)
        found = watched(args.one, SUBJECTS[args.one](), args.seconds)
        print(_FOUND + json.dumps(asdict(found)), flush=True)
        return 0
    findings = together(args.only, args.processes, args.seconds, args.way)
    print(table(findings))
    if args.json:
        args.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    return 0 if all(finding.verdict == "right" for finding in findings) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.turns")
    parser.add_argument("--only", nargs="+", choices=sorted(SUBJECTS), default=SOUND)
    parser.add_argument("--processes", type=int, default=8, help="at once")
    parser.add_argument("--seconds", type=float, default=12.0, help="of launches in each")
    parser.add_argument("--way", choices=sorted(WAYS), help="to assemble kernels (turns_ways.py)")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--one", choices=sorted(SUBJECTS), help=argparse.SUPPRESS)
    return parser


def together(
    names: Sequence[str], processes: int, seconds: float, way: str | None = None
) -> list[Finding]:
    """Subjects beside each other, over again where there are fewer than processes."""
    named = itertools.islice(itertools.cycle(names), max(processes, len(names)))
    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(lambda name: beside(name, seconds, way), named))


def beside(name: str, seconds: float, way: str | None = None) -> Finding:
    """A subject in a process of its own, which may fault or never end."""
    module = "tests.kernels.turns"
    command = [sys.executable, "-m", module, "--one", name, "--seconds", str(seconds)]
    command += ["--way", way] if way else []
    return judge(name, command, START_S + 3 * seconds)


def judge(name: str, command: Sequence[str], limit: float) -> Finding:
    ended = run_apart(command, limit)
    said = ended.text.strip().splitlines()
    for line in said:
        if line.startswith(_FOUND):
            return Finding(**json.loads(line[len(_FOUND) :]))
    if ended.status is None:
        return Finding(name, "hung", detail=f"nothing after {limit:.0f} s")
    return Finding(name, "failed", detail=(said or [f"status {ended.status}"])[-1][:200])


def watched(name: str, run: Run, seconds: float) -> Finding:
    """Launch for so long; a detail says where the first wrong launch differs."""
    first = [x.clone() for x in run()]
    if any(bool((x == LEFT).any()) for x in first):
        return Finding(name, "wrong", 1, 1, detail="the first launch left memory unwritten")
    found = Finding(name, "right")
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        differing = [_differing(x, y) for x, y in zip(run(), first, strict=True)]
        count = sum(int(wrong.sum()) for wrong, _ in differing)
        found = replace(found, runs=found.runs + 1)
        if count:
            detail = found.detail or f"launch {found.runs}: {count} elements, {_place(differing)}"
            left = found.left + sum(int(left.sum()) for _, left in differing)
            found = replace(found, verdict="wrong", wrong=found.wrong + 1, left=left, detail=detail)
    return found


def _differing(found: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(elements that differ, elements that nobody wrote); of float32 what is beyond its noise."""
    left = found == LEFT
    if found.dtype != torch.float32:
        return found != first, left
    far = (found - first).abs() > _NOISE * first.abs().max()
    return far | found.isnan(), left


def _place(differing: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """First and last index of the first result that differs."""
    number, wrong = next((i, w) for i, (w, _) in enumerate(differing) if bool(w.any()))
    at = wrong.nonzero()
    return f"result {number} from {at[0].tolist()} to {at[-1].tolist()}"


def table(findings: Sequence[Finding]) -> str:
    head = ("subject", "verdict", "launches", "wrong", "left", "detail")
    return markdown(head, [tuple(str(x) for x in asdict(f).values()) for f in findings])


def _filled(tensors: Sequence[torch.Tensor]) -> None:
    """Give memory back that a launch's results of these sizes will find, filled with LEFT."""
    for _ in range(2):
        _ = [torch.full_like(x, LEFT) for x in tensors]


def _attention(contender: str, case: GpuCase, backward: bool, drawn: bool | None = None) -> Run:
    """drawn: whether programs of the Hopper backward draw their tiles, whatever they spill; None:
    as it is chosen."""
    from benchmarks.gpu_peers import CONTENDERS

    if drawn is not None:
        _choose_drawn(drawn)
    inputs = [x.requires_grad_(backward) for x in case.inputs()]
    attend = CONTENDERS[contender].prepare(case, None)
    assert attend is not None
    out = attend(*inputs)
    dout = torch.randn_like(out)

    def forward() -> tuple[torch.Tensor, ...]:
        _filled([out])
        return (attend(*inputs),)

    def gradients() -> tuple[torch.Tensor, ...]:
        _filled(inputs)
        dq, dk, dv = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        if contender.startswith("sdpa"):
            return dq.float(), dk.float(), dv.float()
        return dq.float(), dk, dv  # dq is a sum in no fixed order

    return gradients if backward else forward


def _choose_drawn(drawn: bool) -> None:
    from attnloom.backends.gluon import launch_backward, ready_backward

    form_of = ready_backward.form_of
    ready_backward.form_of = lambda operands: replace(form_of(operands), persistent=drawn)
    launch_backward.FEW_SPILLS = 1 << 20


def _product() -> Run:
    a, b = (torch.randn(12288, 12288, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def run() -> tuple[torch.Tensor, ...]:
        out = torch.full((12288, 12288), LEFT, dtype=torch.bfloat16, device="cuda")
        torch.mm(a, b, out=out)
        return (out,)

    return run


def _rowwise() -> Run:
    """CUTLASS's product of float8 matrices with a scale a row: TMA, partitions of warps, draws."""
    a, b = (torch.randn(16384, 16384, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    rows = torch.ones(16384, 1, device="cuda")

    def run() -> tuple[torch.Tensor, ...]:
        _filled([torch.empty(16384, 16384, dtype=torch.bfloat16, device="cuda")])
        return (torch._scaled_mm(a, b.t(), rows, rows.t(), out_dtype=torch.bfloat16),)

    return run


def small(parts: dict[str, bool], tiles: int = 8448, steps: int = 32, repeats: int = 32) -> Run:
    """A kernel of turns_kernels.py. Its results are compared with torch's here, once."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from tests.kernels.turns_kernels import COLUMNS, ROWS, Parts, turns_kernel

    cfg = Parts(**parts, REPEATS=repeats)
    rows, columns = 2 * ROWS.value, COLUMNS.value
    draw = torch.Generator(device="cuda").manual_seed(0)
    size = ((tiles + steps) * rows, columns)
    source = torch.randn(size, generator=draw, device="cuda").to(torch.bfloat16)
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    grid = min(processors, tiles) if parts.get("DRAWS") else tiles

    def described(tensor: torch.Tensor) -> TensorDescriptor:
        layout = NVMMASharedLayout(128, 16, 2)
        box = [ROWS.value, columns]
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)

    def run() -> tuple[torch.Tensor, ...]:
        out = torch.full((tiles * rows, columns), LEFT, dtype=torch.bfloat16, device="cuda")
        turns_kernel[(grid,)](
            described(source), source, described(out), out, counter, steps, tiles, cfg, num_warps=4
        )
        return (out,)

    sums = source.float().view(-1, rows, columns).cumsum(0)
    ahead = torch.cat([torch.zeros_like(sums[:1]), sums])
    wanted = (ahead[steps : steps + tiles] - ahead[:tiles]).reshape(-1, columns)
    (first,) = run()
    if not torch.allclose(first.float(), wanted, rtol=2e-2, atol=0.1):
        raise AssertionError(f"{parts} is wrong by itself")
    return run


_LONG = GpuCase("causal", 2, 16, 16, 8192, 8192, 128)
_FULL = GpuCase("full", 2, 16, 16, 8192, 8192, 128)
_CAPPED = GpuCase("causal+softcap", 2, 16, 16, 8192, 8192, 128)
_FORWARD = GpuCase("causal", 16, 16, 16, 8192, 8192, 128)
PLANTED = "small, apart, drawn, unused barriers"
PARTS: dict[str, dict[str, bool]] = {
    "small": {},
    "small, TMA": {"LOADS": True},
    "small, TMA both ways": {"LOADS": True, "STORES": True},
    "small, apart": {"APART": True},
    "small, apart, signals": {"APART": True, "SIGNALS": True},
    "small, apart, TMA": {"APART": True, "SIGNALS": True, "LOADS": True},
    "small, apart, TMA both ways": {
        "APART": True, "SIGNALS": True, "LOADS": True, "STORES": True,
    },
    "small, apart, products": {
        "APART": True, "SIGNALS": True, "LOADS": True, "STORES": True, "PRODUCTS": True,
    },
    "small, apart, drawn": {
        "APART": True, "SIGNALS": True, "LOADS": True, "STORES": True, "PRODUCTS": True,
        "DRAWS": True,
    },
    PLANTED: {
        "APART": True, "SIGNALS": True, "LOADS": True, "STORES": True, "PRODUCTS": True,
        "DRAWS": True, "UNUSED": True,
    },
}  # fmt: skip
SUBJECTS: dict[str, Callable[[], Run]] = {
    "forward": lambda: _attention("attnloom", _FORWARD, backward=False),
    "backward, drawn": lambda: _attention("attnloom", _CAPPED, backward=True, drawn=True),
    "backward, a tile a program": lambda: _attention("attnloom", _CAPPED, True, drawn=False),
    "backward, no mask": lambda: _attention("attnloom", _FULL, backward=True),
    "backward, D=64": lambda: _attention(
        "attnloom", replace(_LONG, head_dim=64, batch=4), backward=True
    ),
    "backward, D=192": lambda: _attention("attnloom", replace(_LONG, head_dim=192), backward=True),
    "portable backward": lambda: _attention("triton", _LONG, backward=True),
    "cuDNN's backward": lambda: _attention("sdpa-cudnn", _LONG, backward=True),
    "product": _product,
    "CUTLASS's product": _rowwise,
    **{name: lambda parts=parts: small(parts) for name, parts in PARTS.items()},
}
SOUND = [name for name in SUBJECTS if name != PLANTED]

if __name__ == "__main__":
    sys.exit(main())
