"""Forms of the Gluon forward side by side with peers: right first (one process each), then timed in
turn in one process."""

import functools
import multiprocessing
import sys
import time
from dataclasses import replace
from typing import Any

from attnloom.api import launch
from attnloom.backends.gluon.configs_forward import Form, forms
from benchmarks.candidates import GluonForward
from benchmarks.gpu_cases import GpuCase

# Calls of one form must not be started the short way of another's.
launch.may_keep = lambda query: False
START = time.perf_counter()
WIDE, FLAT, NARROW = (forms(d, d, 128)[0] for d in (192, 128, 64))
BIG = forms(256, 256, 128)[0]
ONE = Form(1, 64, 2, 2, True, True, 240, 24, (216, 24), programs=2)


def kinds(base, **kept):
    yield "used", base
    yield "lazy", replace(base, lazy=True)
    if kept:
        yield "kept", replace(base, **kept)
        yield "kept lazy", replace(base, lazy=True, **kept)
        yield "kept lazy lanes", replace(base, lazy=True, by_lane=True, **kept)
        early = replace(base, q_stages=1, out_in_q=False, **kept)
        yield "kept early", early
        yield "kept early lazy lanes", replace(early, lazy=True, by_lane=True)


def documents():
    yield "used", FLAT, False
    yield "kept lazy", replace(FLAT, q_kept=1, lazy=True), False
    yield "one", ONE, True
    yield "one lanes", replace(ONE, by_lane=True), True
    yield "one in turn", replace(ONE, overlap=False, by_lane=True), True
    yield "one, 1 q", replace(ONE, q_stages=1, out_in_q=False, by_lane=True), True
    yield (
        "one in turn, 1 q",
        replace(ONE, q_stages=1, out_in_q=False, overlap=False, by_lane=True),
        True,
    )
    early = replace(ONE, q_kept=1, q_stages=1, out_in_q=False)
    yield "one kept early", early, True
    yield "one kept early lanes", replace(early, by_lane=True), True
    yield "one kept early lanes in turn", replace(early, by_lane=True, overlap=False), True
    yield "two of 64", Form(2, 64, 4, 2, True, True, 240, 24, (232, 40), by_lane=True), True
    yield "three of 64", Form(3, 64, 4, 1, False, True, 160, 32, (152, 56), by_lane=True), True


def case(variant, D, length=8192, batch=4):
    return GpuCase(variant, batch, 16, 16, length, length, D)


ROUNDS = (
    (case("causal", 192), [(n, f, False) for n, f in kinds(WIDE, q_kept=3)]
     + [("kept lazy lanes in turn",
         replace(WIDE, q_kept=3, lazy=True, by_lane=True, overlap=False), False)], "sdpa-cudnn"),
    (case("full", 192), [(n, f, False) for n, f in kinds(WIDE, q_kept=3)], "sdpa-cudnn"),
    (case("documents12", 128, 2048, 16), list(documents()), "torch-flex"),
    (case("documents12", 128), list(documents())[:4], "torch-flex"),
    (case("causal", 128), [(n, f, False) for n, f in kinds(FLAT, q_kept=1)], "sdpa-cudnn"),
    (case("full", 128), [(n, f, False) for n, f in kinds(FLAT, q_kept=1)], "sdpa-cudnn"),
    (case("causal", 256), [(n, f, False) for n, f in kinds(BIG)], "sdpa-cudnn"),
    (case("full", 256), [(n, f, False) for n, f in kinds(BIG)], "sdpa-cudnn"),
    (case("causal", 64), [(n, f, False) for n, f in kinds(NARROW)], "sdpa-cudnn"),
)  # fmt: skip


def check(chosen):
    """Against float64 on a small problem, and again with launches of many tiles."""
    number, name = chosen
    import torch  # noqa: F401

    from benchmarks import gpu_candidates as g
    from benchmarks.accuracy import relative_errors

    whole, found, _ = ROUNDS[number]
    form, finer = next((f, x) for n, f, x in found if n == name)
    try:
        small = replace(whole, batch=2, heads=4, kv_heads=4, q_len=1520, kv_len=1520)
        run = g._Runs(GluonForward(form, finer), small, False)
        oracle = run.oracle(small)
        ours, seen = (max(relative_errors(x, oracle).values()) for x in run.both())
        many = replace(whole, batch=16, q_len=1520, kv_len=1520)
        again = g._repeats(g._Runs(GluonForward(form, finer), many, False))
        return number, name, f"{ours:.0f} ppm ({seen:.0f}), repeats {again}", ours < 1.1 * seen + 50
    except Exception as error:
        return number, name, f"{type(error).__name__} {error}"[-200:], False


def timed(number, right):
    import torch

    from benchmarks.gpu import alternate
    from benchmarks.gpu_peers import CONTENDERS, attention_of

    whole, found, peer = ROUNDS[number]
    inputs = whole.inputs()
    theirs = CONTENDERS[peer].prepare(whole, None)
    assert theirs is not None
    runs: dict[str, Any] = {peer: functools.partial(theirs, *inputs)}
    wanted = runs[peer]()
    for name, form, finer in found:
        if (number, name) not in right:
            continue
        change = GluonForward(form, finer)
        attention = attention_of("gluon", whole)

        def run(change=change, attention=attention):
            with change.installed():
                return attention(*inputs)

        far = float((run().float() - wanted.float()).abs().max())
        if not far <= 3e-2 * float(wanted.float().abs().max()):
            print("  far from the peer:", name, far)
        runs[name] = run
    samples = alternate(runs)
    print(f"\n{whole.name} [{time.perf_counter() - START:.0f} s]")
    for name, sample in samples.items():
        ratio = samples[peer].median_ms / sample.median_ms
        shown = f"{sample.median_ms:8.4f} {sample.p10_ms:8.4f} {sample.p90_ms:8.4f} {ratio:6.3f}"
        print(f"  {name:28s} {shown}")
    sys.stdout.flush()
    del wanted, runs
    torch.cuda.empty_cache()


def main():
    numbers = [int(x) for x in sys.argv[1].split(",")] if len(sys.argv) > 1 else range(len(ROUNDS))
    chosen = [(n, name) for n in numbers for name, _, _ in ROUNDS[n][1]]
    right = set()
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        for number, name, said, good in pool.imap_unordered(check, chosen):
            print(f"{ROUNDS[number][0].name} {name}: {said}", flush=True)
            if good:
                right.add((number, name))
    print(f"checked [{time.perf_counter() - START:.0f} s]", flush=True)
    for number in numbers:
        timed(number, right)


if __name__ == "__main__":
    main()
