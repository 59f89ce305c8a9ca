"""What becomes of the memory of a Gluon kernel's mbarriers: nothing else may lie there.

Triton's allocator gives memory away once its last use is over. A barrier that was initialised and
is not used by any partition of warps is over at once, but the processor takes its memory for a
barrier until it is invalidated: an interrupted program read a barrier's first state there, where it
had stored the number of a tile (H200; docs/log.md, 2026-11-30).
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton
from triton._C.libtriton import ir, nvidia, passes

_NAME = r"%[\w#]+"
_ALLOCATION = re.compile(
    rf"({_NAME}) = ttg\.local_alloc .*?-> !ttg\.memdesc<((?:\d+x)+)([a-zA-Z]\w*)"
)
_VIEW = re.compile(rf"({_NAME}) = ttg\.memdesc_\w+ ({_NAME})")
_START = re.compile(rf"ttng\.init_barrier ({_NAME})")
_PARTITIONS = re.compile(r"ttg\.warp_specialize(?:\.\w+)?\(([^)]*)\)")
_OPERATION = re.compile(r'\s*(?:%\S+ = )?"?([a-z]+\.[a-z_]+)')
_PLACE = re.compile(r"allocation\.offset = (\d+) : i32")


@dataclass(frozen=True)
class Region:
    """Bytes of shared memory. size 0: scratch of an operation, of a length that is not said."""

    what: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + max(self.size, 1)


def given_away(ttgir: str, ptx: str = "") -> list[str]:
    """What is wrong with the memory of a kernel's barriers: uses of barriers, the places of
    everything in shared memory, and the addresses in PTX, if there is any yet, are asked."""
    if "mbarrier.init" in ptx and not _barriers(ttgir):
        return ["no barriers are found in TTGIR that is written otherwise"]
    wrong = [*_forgotten(ttgir), *_touched(ptx)]
    if triton.__version__.startswith("3.6."):  # others have other passes
        wrong += _shared(placed(ttgir))
    return wrong


def _barriers(ttgir: str) -> set[str]:
    """Names of the allocations that are initialised as barriers."""
    views = _views(ttgir)
    return {_allocation(found[1], views) for found in _START.finditer(ttgir)}


def _views(ttgir: str) -> dict[str, str]:
    """What views of memory are of."""
    # names begin anew in partitions, which come later: the first definition is the kernel's
    views: dict[str, str] = {}
    for found in _VIEW.finditer(ttgir):
        views.setdefault(found[1], found[2])
    return views


def _allocation(name: str, views: dict[str, str]) -> str:
    while name in views:
        name = views[name]
    return name


def _forgotten(ttgir: str) -> Iterator[str]:
    """Barriers that no partition is given, which is what keeps memory to the end."""
    partitions, views = _PARTITIONS.findall(ttgir), _views(ttgir)
    if partitions:
        given = (name.strip() for names in partitions for name in names.split(","))
        kept = {_allocation(name, views) for name in given}
        for name in sorted(_barriers(ttgir) - kept):
            yield f"no partition uses the barriers {name}"


def placed(ttgir: str) -> str:
    """A kernel once the compiler has given all of its shared memory places."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ttgir"
        file.write_text(ttgir)
        module = ir.parse_mlir_module(str(file), context)
    module.context = context
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 86)
    manager.run(module, "allocate_shared_memory")
    return str(module)


def _regions(placed_ttgir: str) -> Iterator[Region]:
    for line in placed_ttgir.splitlines():
        place = _PLACE.search(line)
        if place is None:
            continue
        found = _ALLOCATION.search(line)
        if found is None:
            operation = _OPERATION.match(line)
            yield Region("scratch" if operation is None else operation[1], int(place[1]), 0)
        else:
            bits = re.search(r"\d+", found[3])
            assert bits is not None
            count = math.prod(int(n) for n in found[2].split("x") if n)
            yield Region(found[1], int(place[1]), count * max(int(bits[0]), 8) // 8)


def _shared(placed_ttgir: str) -> Iterator[str]:
    """What lies where barriers do."""
    names, regions = _barriers(placed_ttgir), [*_regions(placed_ttgir)]
    for barrier in (region for region in regions if region.what in names):
        for other in regions:
            if other is not barrier and other.offset < barrier.end and barrier.offset < other.end:
                yield f"{other.what} lies where the barriers {barrier.what} do, at {other.offset}"


_MOVE = re.compile(r"mov\.\w+\s+(%r\d+), (global_smem|%r\d+)\b")
_SUM = re.compile(r"add\.s32\s+(%r\d+), (%r\d+), (-?\d+);")
_INIT = re.compile(r"mbarrier\.init\S*\s+\[\s*(%r\d+)")
_ACCESS = re.compile(r"(?:ld|st)\.shared\S*\s[^[]*\[\s*(%r\d+|global_smem)\s*(?:\+\s*(\d+))?")


def _touched(ptx: str) -> Iterator[str]:
    """Loads and stores of barriers' memory whose address is a constant, as that of a drawn number
    is, which one lane tells the others."""
    constants: dict[str, set[int]] = {"global_smem": {0}}
    for line in ptx.splitlines():
        if found := _MOVE.search(line) or _SUM.search(line):
            step = int(found[3]) if found.re is _SUM else 0
            values = (n + step for n in constants.get(found[2], ()))
            constants.setdefault(found[1], set()).update(values)
    barriers = {n for found in _INIT.finditer(ptx) for n in constants.get(found[1], ())}
    for line in ptx.splitlines():
        for found in _ACCESS.finditer(line):
            for base in constants.get(found[1], ()):
                at = base + int(found[2] or 0)
                if at & ~7 in barriers:
                    what = " ".join(line.rstrip("; ").split())
                    yield f"'{what}' is at {at}, where a barrier is"
