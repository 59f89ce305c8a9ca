"""What a benchmark writes: one header, then one Row for each case, phase and peer."""

from __future__ import annotations

import datetime
import json
import math
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

READING = "reading"  # in place of a peer: a kernel that reads keys and values and does no more


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison, or one measurement of ours alone where peer is None.

    phase: forward, backward, decode, build, memory, overhead; first_call and warm_call, the first
        call in a process with an empty and with a filled kernel cache; first_step and warm_step,
        the same with a backward.
    shape: [B, Hq, Hkv, q_len, kv_len, D]. density: share of scores kept.
    ours, theirs: median in `unit`; p10 and p90 beside them where runs were repeated.
    ratio: theirs / ours, above 1 where ours is better; None where ours is nothing at all.
    ratio_error: standard error of the ratio, where runs differ in their inputs.
    """

    suite: str
    case: str
    phase: str
    unit: str
    ours: float
    dtype: str | None = None
    shape: list[int] | None = None
    density: float | None = None
    peer: str | None = None
    theirs: float | None = None
    ours_p10: float | None = None
    ours_p90: float | None = None
    theirs_p10: float | None = None
    theirs_p90: float | None = None
    num_runs: int = 1
    ratio_error: float | None = None

    @property
    def lost(self) -> bool:
        """Whether theirs is better, by more than two standard errors. A bound is no peer."""
        if self.peer == READING:
            return False
        return self.ratio is not None and self.ratio + 2 * (self.ratio_error or 0.0) < 1

    @property
    def ratio(self) -> float | None:
        return None if self.theirs is None or not self.ours else self.theirs / self.ours

    def to_json(self) -> dict[str, object]:
        """As written: fields that say nothing are left out, times are named ours_ms, peer_ms."""
        renamed = {
            "ours": f"ours_{self.unit}",
            "theirs": f"peer_{self.unit}",
            "theirs_p10": "peer_p10",
            "theirs_p90": "peer_p90",
        }
        fields = asdict(self) | {"ratio": self.ratio}
        return {
            renamed.get(name, name): round(value, 6) if isinstance(value, float) else value
            for name, value in fields.items()
            if value is not None
        }

    @staticmethod
    def from_json(fields: dict) -> Row:
        """The inverse of to_json."""
        unit = fields["unit"]
        renamed: dict[str, str] = {
            f"ours_{unit}": "ours",
            f"peer_{unit}": "theirs",
            "peer_p10": "theirs_p10",
            "peer_p90": "theirs_p90",
        }
        kept: dict[str, Any] = {
            renamed.get(str(k), str(k)): v for k, v in fields.items() if k != "ratio"
        }
        return Row(**kept)


def header(ours: str) -> dict[str, object]:
    """Machine, versions, commit and date of a run."""
    return {
        "header": True,
        "ours": ours,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "bf16_dot": bool(torch.cpu._is_avx512_bf16_supported()),
        "threads": torch.get_num_threads(),
        **_gpu(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attnloom": metadata.version("attnloom") if _installed("attnloom") else "source",
        "compiler": _first_line(["c++", "--version"]),
    }


def write(path: Path, head: dict[str, object], rows: Iterable[Row]) -> None:
    """Write header and rows as a JSON list, one entry a line."""
    lines = [json.dumps(entry) for entry in (head, *(row.to_json() for row in rows))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def read(path: Path) -> tuple[dict[str, object], list[Row]]:
    """Header and rows of a file that `write` made."""
    head, *rows = json.loads(path.read_text())
    return head, [Row.from_json(fields) for fields in rows]


def geometric_mean(values: Sequence[float]) -> float:
    """values: at least one, each above 0."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _gpu() -> dict[str, object]:
    if not torch.cuda.is_available():
        return {}
    from importlib import util

    triton = metadata.version("triton") if util.find_spec("triton") else "none"
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "triton": triton}


def _commit() -> str:
    commit = _first_line(["git", "rev-parse", "--short", "HEAD"])
    changed = _first_line(["git", "status", "--porcelain", "--", "attnloom", "benchmarks"])
    return f"{commit}+changes" if changed else commit


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return next(iter(done.stdout.splitlines()), "")
