"""The targets on one NVIDIA H200, bf16."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import Row
from benchmarks.target import Target, largest, mean_ratio, ratios, worst_ratio

PEERS = ("torch-flex", "torch-flex-flash", "sdpa-flash", "sdpa-cudnn", "fa4")
FLEX = ("torch-flex",)


def _decode_rate(rows: Sequence[Row]) -> float:
    """Least TB/s of keys and values read."""
    rates = []
    for row in rows:
        assert row.shape is not None
        batch, _, kv_heads, _, kv_len, head_dim = row.shape
        rates.append(2 * 2 * batch * kv_heads * kv_len * head_dim / row.ours * 1e-9)
    return min(rates)


def _rows_won(rows: Sequence[Row]) -> float:
    """Cases in which no peer is faster."""
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    return float(sum(min(ratios(group)) >= 1 for group in by_case.values()))


def _floor(text, limit, phase, peers=PEERS, case="", except_case="+", measure=worst_ratio):
    return Target(text, measure, limit, "x", phase, True, None, peers, case, except_case, ("gpu",))


def _prefill() -> list[Target]:
    targets = []
    for phase in ("forward", "backward"):
        over = f"{phase} over torch flex"
        targets += [
            _floor(f"{over}, worst case", 1.0, phase, FLEX, except_case=" "),
            _floor(
                f"{over}, geometric mean", 1.2, phase, FLEX, except_case=" ", measure=mean_ratio
            ),
            _floor(f"{over}, soft-cap", 2.0, phase, FLEX, "softcap", " "),
            _floor(f"{over}, D=96", 1.4, phase, FLEX, "-d96"),
            _floor(f"{over}, D=192", 1.4, phase, FLEX, "-d192"),
            _floor(f"{over}, documents, S=2048", 1.5, phase, FLEX, "documents12-b16-s2048"),
        ]
    targets += [
        _floor("backward over torch flex, learned slope", 2.0, "backward", FLEX, "+slope", " "),
        _floor("backward over torch flex, learned full bias", 2.0, "backward", FLEX, "+bias", " "),
        _floor("forward over the best peer, no score_mod, worst case", 1.0, "forward"),
        _floor("forward over the best peer, soft-cap", 1.5, "forward", PEERS, "softcap", " "),
        _floor("forward over the best peer, ALiBi", 1.35, "forward", PEERS, "alibi", " "),
        _floor("forward over the best peer, documents", 1.15, "forward", PEERS, "documents12-b4"),
        _floor("backward over the best peer, worst case", 1.0, "backward", PEERS, except_case=" "),
        _floor("backward over the best peer, soft-cap", 1.2, "backward", PEERS, "softcap", " "),
    ]  # fmt: skip
    for phase in ("forward", "backward"):
        text = f"{phase}: the backend chosen by itself over the portable one, worst case"
        targets.append(_floor(text, 0.98, phase, ("triton",), except_case=" "))
    return targets


GPU_TARGETS = (
    *_prefill(),
    Target(
        "full attention, D=128, share of the matrix product's rate",
        largest, 86.0, "%", "peak", True, suites=("gpu",),
    ),
    *(
        Target(text, largest, limit, "ms", phase, suites=("gpu-compile",))
        for text, limit, phase in (
            ("first call of a new variant", 1500.0, "first_call"),
            ("first call and backward of a new variant", 3000.0, "first_step"),
            ("first call in a new process, kernels on disk", 200.0, "warm_call"),
            ("first call and backward in a new process, kernels on disk", 200.0, "warm_step"),
        )
    ),
    Target("host overhead of an eager call", largest, 40.0, "us", "overhead", suites=("gpu",)),
    Target(
        "decode, keys and values read, worst case",
        _decode_rate, 3.8, "TB/s", "decode", True, suites=("decode",),
    ),
    Target(
        "decode, cases won over every peer",
        _rows_won, 2.0, "cases", "decode", True, None, PEERS, suites=("decode",),
    ),
    Target(
        "decode over pages of 16 to 256 tokens, over one tensor, same kernel, worst case",
        worst_ratio, 0.98, "x", "decode", True, None, ("contiguous",), suites=("paged",),
    ),
    Target(
        "decode over pages of 16 to 256 tokens, over FlashAttention 2 in one tensor, worst case",
        worst_ratio, 1.0, "x", "decode", True, None, ("sdpa-flash",), suites=("paged",),
    ),
    Target(
        "BlockMask of 131,072 tokens, eager call",
        largest, 1.0, "ms", "build", case="s131072", suites=("gpu-mask",),
    ),
    Target(
        "peak memory of it", largest, 64.0, "MiB", "memory", case="s131072", suites=("gpu-mask",),
    ),
)  # fmt: skip
