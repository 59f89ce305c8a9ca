"""How often calls that vary compile a kernel: the rule for GPUs, and what counts for it.

Kernels have tables of tiles, and forms for what the hardware can do with a tensor: short and long
lengths, rows that TMA can read or cannot, one split or several. Each such choice is between two, so
that what varies compiles a kernel once more at most; choices that vary together multiply. What is
never right: one configuration compiled again, because Triton tells addresses apart that nobody
asked about, and a third value of anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

# What a length or a batch chooses between: the kernels of attention, not those that build masks.
KERNELS = ("forward_kernel", "decode_kernel", "combine_kernel")
KERNELS += ("delta_kernel", "key_kernel", "row_kernel")


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel by name, and what it was compiled for, by the names of the choices."""

    name: str
    choices: tuple[tuple[str, str], ...]

    @staticmethod
    def of(name: str, config: Any, kinds: Sequence[Any]) -> Kernel:
        """config: frozen dataclass (config.py). kinds: types of the arguments."""
        chosen = [(f.name, object.__getattribute__(config, f.name)) for f in fields(config)]
        texts = [(name, getattr(value, "cache_key", str(value))) for name, value in chosen]
        # the box of a descriptor follows from the tile
        types = [(f"argument {i}", str(kind).split("<")[0]) for i, kind in enumerate(kinds)]
        return Kernel(name, (*texts, *types))


def beyond_the_first(calls: Sequence[Sequence[Kernel]]) -> int:
    """Kernels that no call but the first of its kind should have compiled.

    Args:
        calls: what each call compiled, in order. Of several tiles that a call tried, the last.
    """
    seen: defaultdict[str, list[Kernel]] = defaultdict(list)
    values: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    too_many = 0
    for made in calls:
        for kernel in {k.name: k for k in made if k.name in KERNELS}.values():
            again = kernel in seen[kernel.name]
            third = False
            for choice, value in kernel.choices:
                known = values[kernel.name, choice]
                third |= len(known) >= 2 and value not in known
                known.add(value)
            seen[kernel.name].append(kernel)
            too_many += again or third
    return too_many
