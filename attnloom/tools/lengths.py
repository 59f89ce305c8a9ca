"""Which sizes a mod speaks of: the lengths of what it indexes by b, h, q_idx and kv_idx, and the
sizes that a factory noted on it.

`slope[h]` of length 8 says that there are 8 heads. Only an index that is the position itself
counts, a cast of it included: `table[h // 4]` and `table[(h + 1) % 8]` say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnloom.ir.node import BoundProgram
from attnloom.ir.passes.direct_loads import direct_loads
from attnloom.masking import extent

_LENGTHS: dict[extent.Axis, str] = {"Q_LEN": "q", "KV_LEN": "kv"}


@dataclass(frozen=True, slots=True)
class AxisLength:
    """axis: "b", "h", "q" or "kv". length: of a captured tensor's dimension that the axis indexes
    directly, or that a factory noted. why: as a person says it, "bias[h, ...] has that length".
    exact: other lengths than this are mistakes, smaller ones too."""

    axis: str
    length: int
    why: str
    exact: bool = False


def axis_lengths(bound: BoundProgram, names: tuple[str, ...]) -> list[AxisLength]:
    """Every dimension that a position indexes directly, in program order.

    Args:
        names: one for each captured tensor.
    """
    return [
        AxisLength(
            load.axis,
            bound.tensors[load.slot].size(load.dim),
            f"{load.shown(names[load.slot])} has that length",
        )
        for load in direct_loads(bound.program)
    ]


def noted_lengths(mod: Any) -> Iterator[AxisLength]:
    """Lengths that the factory of a mod noted on it."""
    for limit in extent.limits_of(mod, axes=extent.LENGTHS):
        yield AxisLength(_LENGTHS[limit.axis], limit.size, limit.source, limit.exact)


def told(lengths: list[AxisLength], axis: str) -> AxisLength | None:
    """What says most about an axis: an exact length, else the shortest, so that every load is in
    range."""
    found = [x for x in lengths if x.axis == axis and x.length > 0]
    return min(found, key=lambda x: (not x.exact, x.length), default=None)
