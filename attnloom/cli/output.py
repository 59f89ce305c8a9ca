"""What the tools print: aligned tables and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

import torch


def table(rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Columns aligned at the left, one row a line; the last column may be of any length."""
    if not rows:
        return ""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[c]) for row in cells) for c in range(len(cells[0]) - 1)]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append((indent + "  ".join([*padded, row[-1]])).rstrip())
    return "\n".join(lines)


def to_json(report: object) -> str:
    """A dataclass as JSON; dtypes and devices by their names, what is not finite as null."""
    return json.dumps(_plain(report), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = [f for f in dataclasses.fields(value) if f.metadata.get("plain", True)]
        fields = {f.name: _plain(getattr(value, f.name)) for f in kept}
        verdicts = {n: getattr(value, n) for n in ("passed", "healthy") if hasattr(value, n)}
        return fields | verdicts
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def size(num_bytes: int) -> str:
    """A number of bytes in the largest unit that leaves at least one."""
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
