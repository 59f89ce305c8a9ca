"""Which tile sizes the kernels of the backward run with; as configs.py, for its phase.

In a Tile of the key kernel tile_n is what a program owns and tile_m its step; in one of the row
kernel the other way around. Measurements: docs/log.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attnloom.backends.triton.configs import Device, Tile, as_they_fit, clamped

# Registers a thread that a kernel may spill before smaller tiles are tried: up to here the larger
# tile was the faster one (H200, D=128: documents 11, ALiBi 13; soft-capping, 38, ran 10% faster in
# the next).
FEW_SPILLS = 36
_WIDEST_PAIR = 128
Table = tuple[tuple[int, int, tuple[Tile, ...]], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a choice depends on.

    width: D and Dv as covered by chunks, the larger. itemsize: of the operands in bytes.
    max_m, max_n: a tile must not be larger. multiply_adds: products without matrix instructions.
    work: on a score beside the products: 0 none, 1 some, 2 functions at a fraction of full rate.
    """

    width: int
    itemsize: int
    max_m: int
    max_n: int
    multiply_adds: bool
    work: int = 0


# (arch at least, width at most) -> tiles. First match counts; AMD has arch 0.
_KEYS_HALF: Table = (
    (90, 64, (Tile(64, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 4, 2))),
    (90, 96, (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2))),
    (90, 128, (Tile(64, 128, 8, 3), Tile(64, 64, 4, 2), Tile(32, 128, 8, 2))),
    (90, 192, (Tile(64, 128, 8, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2))),
    (90, 256, (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(32, 64, 4, 1))),
    (80, 64, (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2))),
    (80, 128, (Tile(32, 128, 8, 2), Tile(32, 64, 4, 2), Tile(32, 64, 4, 1))),
    (80, 256, (Tile(32, 64, 8, 1), Tile(32, 32, 4, 1))),
    (0, 64, (Tile(32, 64, 4, 1),)),
    (0, 128, (Tile(32, 64, 4, 1), Tile(16, 64, 4, 1))),
)
_ROWS_HALF: Table = (
    (90, 64, (Tile(64, 128, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2))),
    (90, 96, (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2))),
    (90, 128, (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2))),
    (90, 192, (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2))),
    (90, 256, (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1))),
    (80, 64, (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2))),
    (80, 128, (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1))),
    (80, 256, (Tile(64, 32, 8, 1), Tile(32, 32, 4, 1))),
    (0, 64, (Tile(64, 32, 4, 1),)),
    (0, 128, (Tile(64, 32, 4, 1), Tile(64, 16, 4, 1))),
)
# The pass that has dv alone, where dk and dv take one each: without values in shared memory.
_VALUES_HALF: Table = (
    (90, 128, ()),
    (90, 192, (Tile(64, 128, 8, 3), Tile(64, 128, 8, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2))),
)
_SMALL = (Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1))
# Products by fused multiply-adds: short steps, which are the inner dimension of a product.
_MULTIPLY_ADDS = {
    "tile_n": (Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
    "tile_m": (Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
}


def key_tiles(device: Device, shape: Shape) -> tuple[Tile, ...]:
    """Tiles to try for the key kernel, best first; at least one."""
    return _fitting(_KEYS_HALF, device, shape, "tile_n", shape.work > 0)


def row_tiles(device: Device, shape: Shape) -> tuple[Tile, ...]:
    """Tiles to try for the row kernel, best first; at least one."""
    return _fitting(_ROWS_HALF, device, shape, "tile_m", shape.work > 1)


def value_tiles(device: Device, shape: Shape) -> tuple[Tile, ...]:
    """Tiles to try for a key kernel that has dv alone, best first; at least one."""
    if not _lookup(_VALUES_HALF, device, shape):
        return key_tiles(device, shape)
    return _fitting(_VALUES_HALF, device, shape, "tile_n", shape.work > 0)


@functools.lru_cache(maxsize=4096)
def _fitting(
    table: Table, device: Device, shape: Shape, owned: str, in_pairs: bool
) -> tuple[Tile, ...]:
    """in_pairs: prefer tiles of which two fit a processor. The products of one program then run
    under the score_mod of the other; without one, they are 1% (keys) and 6% (rows) slower. H200,
    D=128, soft-capping: rows 3.52 ms against 3.77."""
    found = as_they_fit(_lookup(table, device, shape), shape.max_m, shape.max_n)
    if in_pairs and shape.width <= _WIDEST_PAIR:
        found = tuple(sorted(found, key=lambda tile: tile.num_warps > 4))
    found = (*found, *_SMALL)
    if shape.multiply_adds:
        found = _MULTIPLY_ADDS[owned]
    fitted = [clamped(t, shape.max_m, shape.max_n) for t in found]
    kept = [
        t for t in dict.fromkeys(fitted) if _shared_bytes(t, shape, owned) <= device.shared_bytes
    ]
    return tuple(kept) or (clamped(_SMALL[-1], shape.max_m, shape.max_n),)


def _lookup(table: Table, device: Device, shape: Shape) -> tuple[Tile, ...]:
    if shape.itemsize != 2:
        return ()
    for arch, width, tiles in table:
        if device.arch >= arch and shape.width <= width:
            return tiles
    return ()


def _shared_bytes(tile: Tile, shape: Shape, owned: str) -> int:
    """Shared memory that a kernel surely needs: the stages of the tiles that stream through."""
    step = tile.tile_m + tile.tile_n - getattr(tile, owned)
    return shape.itemsize * shape.width * step * 2 * max(tile.num_stages - 1, 1)
