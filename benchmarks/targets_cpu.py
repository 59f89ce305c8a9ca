"""The targets on a 2-core AVX-512 machine."""

from __future__ import annotations

from benchmarks.target import Target, largest, mean_ratio, worst_ratio


def _speedups() -> list[Target]:
    names = {"torch-flex": "compiled torch flex", "sdpa": "SDPA"}
    table = (
        # phase, peer, fp32 mean, bf16 mean, worst case of either
        ("forward", "torch-flex", 2.2, 5.0, 1.8),
        ("forward", "sdpa", 3.8, 6.0, 1.7),
        ("backward", "sdpa", 4.0, 5.0, None),
        ("decode", "torch-flex", 1.4, 9.0, None),
    )
    targets = []
    for phase, peer, fp32, bf16, worst in table:
        text = f"{phase} over {names[peer]}"
        for dtype, limit in (("fp32", fp32), ("bf16", bf16)):
            mean = f"{text}, {dtype}, geometric mean"
            targets.append(Target(mean, mean_ratio, limit, "x", phase, True, dtype, (peer,)))
        if worst is not None:
            targets.append(
                Target(f"{text}, worst case", worst_ratio, worst, "x", phase, True, peers=(peer,))
            )
    return targets


CPU_TARGETS = (
    *_speedups(),
    Target("first call of a new variant", largest, 1500, "ms", "first_call"),
    Target("first call in a new process, kernel on disk", largest, 50, "ms", "warm_call"),
    Target("host overhead of a repeated call", largest, 60, "us", "overhead"),
    Target(
        "extra memory at S=4096, forward and backward", largest, 64, "mib", "memory", case="alibi"
    ),
    Target(
        "BlockMask of 2^20 tokens, window 1024",
        largest,
        2000,
        "ms",
        "build",
        case="window1024-s1048576",
    ),
    Target(
        "BlockMask of 2^20 tokens, 1,000 documents",
        largest,
        2000,
        "ms",
        "build",
        case="documents1000-s1048576",
    ),
    Target("peak memory of the former", largest, 1024, "mib", "memory", case="window1024-s1048576"),
    Target(
        "peak memory of the latter", largest, 1024, "mib", "memory", case="documents1000-s1048576"
    ),
)
