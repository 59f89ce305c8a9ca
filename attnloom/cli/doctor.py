"""`attnloom doctor`: what this machine offers, what is missing and how to get it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from attnloom.cli.output import size, table, to_json
from attnloom.cli.progress import shown
from attnloom.errors import counted


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of doctor."""
    parser.add_argument("--no-run", action="store_true", help="run no attention")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Look and print; 0 if nothing serious is wrong, else 1."""
    from attnloom.tools.diagnosis import doctor

    with shown() as line:
        found = doctor(run=not args.no_run, progress=line.begin)
    print(to_json(found) if args.json else "\n".join(_text(found)))
    return 0 if found.healthy else 1


def _text(found) -> Iterator[str]:
    compiler, cache = found.compiler, found.cache
    features = ", ".join(found.cpu_features) or "none that attnloom knows by name"
    rows = [
        ("python", f"{found.python} on {found.system}"),
        *((name, version or "not installed") for name, version in found.versions.items()),
        ("compiler", f"{compiler.path} {compiler.version}".strip() or "none"),
        ("processor", features),
        ("threads", f"{found.num_threads} of {counted(found.num_cores, 'core')}"),
        *_gpu_rows(found.gpus),
        ("cache", _cache(cache)),
    ]
    if found.self_test is not None:
        rows.append(("self-test", _self_test(found.self_test)))
    yield table(rows, indent="")
    for finding in found.findings:
        yield f"\n{'PROBLEM' if finding.serious else 'note'}: {finding.what}\n  {finding.fix}"
    yield "\nnothing serious is wrong" if found.healthy else "\nattention will fail or be slow"


def _gpu_rows(gpus) -> Iterator[tuple[str, str]]:
    if not gpus:
        yield "gpu", "none that torch can use"
    for index, gpu in enumerate(gpus):
        yield (
            f"gpu {index}",
            f"{gpu.name}, capability {gpu.capability}, {size(gpu.memory_bytes)}, "
            f"{gpu.num_multiprocessors} multiprocessors, {size(gpu.shared_memory_bytes)} shared "
            f"memory a block, {gpu.registers} registers each",
        )


def _cache(cache) -> str:
    if not cache.exists:
        return f"{cache.path} (not made yet)"
    return f"{cache.path}: {counted(cache.num_kernels, 'kernel')}, {size(cache.total_bytes)}"


def _self_test(test) -> str:
    if test.problem:
        return f"failed: {test.problem}"
    return (
        f"forward and backward in {test.first_seconds:.2f} s ({counted(test.compiled, 'kernel')} "
        f"compiled), again in {test.next_seconds * 1e3:.1f} ms, max error {test.largest_error:.1e}"
    )
