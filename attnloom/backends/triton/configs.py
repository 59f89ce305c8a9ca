"""Which tile sizes a kernel runs with: tables by architecture and shape class, best first.

A table lists what was measured fastest, then smaller ones. A candidate is dropped when its shared
memory surely exceeds the device's; one that Triton still refuses for resources, or whose kernel
spills, is followed by the next (launch_forward.py). Measurements: docs/log.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from attnloom.backends.triton.interpreter import INTERPRETED

HALF = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 512
MAX_TILE = 128  # rows or keys of the largest tile of all tables
_SMALLEST_SIDE = 16  # of products by matrix instructions
# Tiles whose kernel spills more 4-byte registers a thread are passed over, MAX_TRIES at most. ALiBi
# and documents spill 9 and 11 in a program of 128 x 64, two of which run on a processor.
FEW_SPILLS = 12
MAX_TRIES = 3
_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """What matters of a device. arch: 10 * major + minor on NVIDIA, 0 elsewhere."""

    arch: int
    shared_bytes: int
    num_processors: int
    l2_bytes: int

    @property
    def has_tma(self) -> bool:
        return self.arch >= 90

    @property
    def can_overlap(self) -> bool:
        """Whether a kernel may start beside the one that it waits for."""
        return self.arch >= 90 and not INTERPRETED

    @property
    def has_matrix_instructions(self) -> bool:
        """Whether Triton uses its matrix instructions: before Ampere it has fused multiply-adds
        alone."""
        return not 0 < self.arch < 80


@functools.cache
def device_of(device: torch.device) -> Device:
    """The device that tensors on `device` run on; the interpreter has no limits."""
    if device.type != "cuda":
        return Device(0, _UNLIMITED, 4, _UNLIMITED)
    found = torch.cuda.get_device_properties(device)
    is_amd = torch.version.hip is not None
    return Device(
        0 if is_amd else 10 * found.major + found.minor,
        65536 if is_amd else found.shared_memory_per_block_optin,
        found.multi_processor_count,
        getattr(found, "L2_cache_size", 0) or 1 << 22,
    )


@dataclass(frozen=True, slots=True)
class Tile:
    """One way to run a kernel."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        # What is proven of positions (layouts.py) and of row statistics (ready_backward.pitch_of)
        # holds for such sides; tl.arange takes powers of two.
        for side in (self.tile_m, self.tile_n):
            assert _SMALLEST_SIDE <= side <= MAX_TILE and side & (side - 1) == 0, self

    @property
    def options(self) -> dict[str, int]:
        """As Triton's launch takes them."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a choice depends on.

    width: larger of D and Dv as covered by chunks. itemsize: of the operands in bytes.
    by_fused_adds: products are fused multiply-adds, not the work of tensor cores.
    max_m, max_n: a tile must not be larger: block sizes of the mask, lengths.
    num_rows: tiles of one row in the whole problem (B * Hq * Q_LEN).
    """

    width: int
    itemsize: int
    by_fused_adds: bool
    max_m: int
    max_n: int
    num_rows: int


# (arch at least, width at most) -> tiles. First match counts; AMD has arch 0.
_FORWARD_HALF: tuple[tuple[int, int, tuple[Tile, ...]], ...] = (
    # two programs a processor hide each other's waits: D128 causal 2.21 ms against 2.34 with one
    (90, 64, (Tile(64, 128, 4, 2), Tile(128, 64, 4, 3))),
    (90, 96, (Tile(128, 64, 4, 3),)),
    (
        90,
        128,
        (Tile(128, 64, 4, 2), Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 2)),
    ),
    # alone on a processor, a program gains from a third stage: D128 causal 2.35 -> 2.13 ms
    (90, 192, (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2))),
    (90, 256, (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2))),
    (80, 64, (Tile(128, 64, 4, 3), Tile(128, 32, 4, 3))),
    (80, 128, (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 32, 4, 2))),
    (80, 256, (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2))),
    (0, 64, (Tile(128, 64, 4, 2), Tile(64, 64, 4, 1))),
    (0, 128, (Tile(128, 64, 8, 1), Tile(64, 64, 4, 1))),
    (0, 512, (Tile(64, 32, 8, 1),)),
)
# float32 on tensor cores (tf32, tf32x3): operands are twice as large.
_FORWARD_TF32: tuple[tuple[int, int, tuple[Tile, ...]], ...] = (
    (0, 64, (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2))),
    (0, 128, (Tile(64, 32, 4, 2), Tile(32, 32, 4, 2))),
    (0, 512, (Tile(32, 32, 4, 1),)),
)
# By fused multiply-adds every operand of a product is a register.
_FUSED = (Tile(32, 32, 4, 2), Tile(32, 32, 4, 1))
_SMALL = (
    Tile(64, 32, 4, 2),
    Tile(64, 32, 8, 1),
    Tile(32, 32, 4, 1),
    Tile(32, 16, 4, 1),
    Tile(16, 16, 4, 1),
)


@functools.lru_cache(maxsize=4096)
def forward_tiles(device: Device, shape: Shape) -> tuple[Tile, ...]:
    """Tiles to try for a forward, best first; at least one."""
    table = _FORWARD_HALF if shape.itemsize == 2 else _FORWARD_TF32
    found: tuple[Tile, ...] = ()
    for arch, width, tiles in table:
        if device.arch >= arch and shape.width <= width:
            found = tiles
            break
    if shape.by_fused_adds:
        found = _FUSED
    best = found[0] if found else _SMALL[0]
    if best.tile_m > 64 and shape.num_rows < device.num_processors * best.tile_m:
        # too few programs for the device: halve the tiles
        found = (Tile(64, min(best.tile_n, 64), 4, best.num_stages), *found)
    return _fitting(found, device, shape)


# tile_m is an upper limit: rows of a decode are few. Keys stream through once, so that copies in
# flight count, not reuse.
_DECODE_HALF: tuple[tuple[int, int, tuple[Tile, ...]], ...] = (
    # four programs of 64 keys fit a processor, three of 128 (4.34 and 3.94 TB/s, in two runs)
    (90, 64, (Tile(64, 64, 4, 3), Tile(64, 128, 4, 3))),
    (90, 128, (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2))),
    (80, 64, (Tile(64, 64, 4, 3),)),
    (80, 128, (Tile(64, 64, 4, 2), Tile(64, 32, 4, 3))),
    (0, 128, (Tile(64, 32, 4, 2),)),
    (0, 512, (Tile(32, 32, 4, 2),)),
)


@functools.lru_cache(maxsize=4096)
def decode_tiles(device: Device, shape: Shape) -> tuple[Tile, ...]:
    """Tiles to try for a decode, best first; at least one."""
    found: tuple[Tile, ...] = (Tile(32, 32, 4, 2),)
    if shape.itemsize == 2:
        for arch, width, tiles in _DECODE_HALF:
            if device.arch >= arch and shape.width <= width:
                found = tiles
                break
    return _fitting(found, device, shape)


def _fitting(found: tuple[Tile, ...], device: Device, shape: Shape) -> tuple[Tile, ...]:
    fitted = [
        clamped(t, shape.max_m, shape.max_n)
        for t in (*as_they_fit(found, shape.max_m, shape.max_n), *_SMALL)
    ]
    kept = [t for t in dict.fromkeys(fitted) if shared_bytes(t, shape) <= device.shared_bytes]
    return tuple(kept) or (Tile(16, 16, 4, 1),)


def as_they_fit(found: tuple[Tile, ...], max_m: int, max_n: int) -> tuple[Tile, ...]:
    """Tiles in the order given, but those that have to be cut down last: stages and warps of a
    large tile are not what a small one is best with."""
    return tuple(sorted(found, key=lambda t: t.tile_m > max_m or t.tile_n > max_n))


def clamped(tile: Tile, max_m: int, max_n: int) -> Tile:
    """The tile cut down to at most max_m x max_n."""
    tile_m, tile_n = min(tile.tile_m, max_m), min(tile.tile_n, max_n)
    warps = tile.num_warps
    if tile_m < tile.tile_m or tile_n < tile.tile_n:
        warps = min(warps, 4)
    if INTERPRETED:
        # an interpreted step costs milliseconds whatever its size
        return Tile(tile_m, tile_n, 4, 1)
    return Tile(tile_m, tile_n, warps, tile.num_stages)


def per_block(block: int, tile: int) -> int:
    """Tiles of one side in a block of a mask. A larger tile has no entry in the lists, and kernels
    would read what lies beyond."""
    assert block % tile == 0, f"tiles of {tile} do not divide blocks of {block}"
    return block // tile


def shared_bytes(tile: Tile, shape: Shape) -> int:
    """Shared memory that a forward surely needs: the stages of keys and values."""
    return shape.itemsize * shape.width * tile.tile_n * 2 * max(tile.num_stages - 1, 1)


def chunks(width: int) -> tuple[int, int, int]:
    """Up to three power-of-two chunks, each at least 16, that cover a head dimension tightly."""
    parts: list[int] = []
    rest = width
    while rest > 0 and len(parts) < 2:
        part = 1 << (rest.bit_length() - 1)
        # what would be left is smaller than the smallest tile side: cover all of it at once
        if part < 16 or (rest - part and rest - part <= 16 and part < 32):
            part = max(16, triton.next_power_of_2(rest))
        parts.append(part)
        rest -= part
    if rest > 0:
        parts.append(max(16, triton.next_power_of_2(rest)))
    return tuple(parts + [0] * (3 - len(parts)))  # type: ignore[return-value]
