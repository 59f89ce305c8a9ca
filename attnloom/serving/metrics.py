"""Counts of an engine, in Prometheus' text form."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(slots=True)
class Histogram:
    """How many observations lie at or below each bound."""

    counts: list[int] = field(default_factory=lambda: [0] * len(BOUNDS_S))
    number: int = 0
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.number += 1
        self.total += seconds
        for i, bound in enumerate(BOUNDS_S):
            self.counts[i] += seconds <= bound

    def lines(self, name: str) -> list[str]:
        """Its lines, without the header."""
        pairs = [*zip(map(str, BOUNDS_S), self.counts, strict=True), ("+Inf", self.number)]
        found = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in pairs]
        return [*found, f"{name}_sum {self.total:.6f}", f"{name}_count {self.number}"]


@dataclass(slots=True)
class Metrics:
    """What an engine did since it was made.

    shared_tokens: prompt tokens that were in the cache already. computed_tokens: tokens that the
    model saw, drafts and repetitions after a preemption included.
    """

    requests: int = 0
    refused: int = 0
    failed_steps: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    first_token_seconds: Histogram = field(default_factory=Histogram)
    request_seconds: Histogram = field(default_factory=Histogram)


_COUNTERS = {
    "requests": "requests accepted",
    "refused": "requests refused because too many were waiting",
    "failed_steps": "steps that raised an error",
    "steps": "steps of the model",
    "prompt_tokens": "prompt tokens of ended requests",
    "shared_tokens": "prompt tokens of ended requests found in the cache",
    "computed_tokens": "tokens that the model saw",
    "output_tokens": "tokens of output",
    "drafted_tokens": "tokens drafted",
    "accepted_tokens": "drafted tokens accepted",
    "preemptions": "times a sequence had to give way",
}


def render(metrics: Metrics, gauges: dict[str, tuple[str, float]]) -> str:
    """Text for Prometheus.

    Args:
        gauges: name -> (what it is, its present value).
    """
    lines = []
    for name, what in _COUNTERS.items():
        lines += _header(f"attnloom_{name}_total", what, "counter")
        lines.append(f"attnloom_{name}_total {getattr(metrics, name)}")
    lines += _header("attnloom_finished_total", "requests ended, by reason", "counter")
    lines += [
        f'attnloom_finished_total{{reason="{reason}"}} {count}'
        for reason, count in sorted(metrics.finished.items())
    ]
    for name, (what, value) in gauges.items():
        lines += [*_header(f"attnloom_{name}", what, "gauge"), f"attnloom_{name} {value:g}"]
    for name, what in (
        ("first_token_seconds", "from a request's arrival to its first token"),
        ("request_seconds", "from a request's arrival to its end"),
    ):
        lines += _header(f"attnloom_{name}", what, "histogram")
        lines += getattr(metrics, name).lines(f"attnloom_{name}")
    return "\n".join(lines) + "\n"


def _header(name: str, what: str, kind: str) -> list[str]:
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
