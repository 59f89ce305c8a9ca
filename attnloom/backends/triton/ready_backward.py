"""Launches of the backward's kernels but for addresses, and the choice of their tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from attnloom.backends.triton import configs, configs_backward
from attnloom.backends.triton.backward_keys import key_kernel
from attnloom.backends.triton.backward_rows import row_kernel
from attnloom.backends.triton.choice import choose, keep
from attnloom.backends.triton.fields import operand_type, overhanging_block
from attnloom.backends.triton.fields_backward import Role, backward_config
from attnloom.backends.triton.launcher import Launcher
from attnloom.backends.triton.lists import covering
from attnloom.backends.triton.operands import Operands
from attnloom.backends.triton.packed import pack_ints
from attnloom.ir.node import Axes, BoundProgram

# Operations that take several instructions of a slow unit.
_SLOW = frozenset(
    "exp exp2 expm1 log log2 log1p sqrt rsqrt sin cos tan asin acos atan atan2 sinh cosh tanh "
    "asinh acosh atanh sigmoid erf erfc pow div reciprocal".split()
)
_OPERANDS = 12  # q0 .. g2, of both kernels
_MAX_PARTS = 16
_MAX_HEADS_TOGETHER = 64
# dk and dv of wider heads do not fit the registers together; by bytes an element. Two passes cost
# one product more, spills far more: D=192 in one pass spilled 69 registers, 32.9 ms on an H200.
_WIDEST_TOGETHER = {2: 128, 4: 128, 8: 64}


@dataclass(frozen=True, slots=True)
class Ready:
    """A launch but for its addresses. parts: see backward_keys.py."""

    launch: Launcher
    tile: configs.Tile
    shape: tuple[float, ...]
    parts: int = 1


_ready: dict[tuple[object, ...], Ready] = {}


def run(operands: Operands, role: Role, launch: Callable[[Ready], None]) -> None:
    """Launch a kernel; tiles are chosen at the first launch of a signature.

    Args:
        launch: starts a kernel, any number of times with the same outcome.
    """
    key = (operands.signature, role)
    ready = _ready.get(key)
    if ready is not None:
        launch(ready)
        return
    keep(_ready, key, _choose(operands, role, launch))


def known(operands: Operands, role: Role) -> Ready | None:
    """The launch of a signature that has run."""
    return _ready.get((operands.signature, role))


def _choose(operands: Operands, role: Role, launch: Callable[[Ready], None]) -> Ready:
    return choose(
        _tiles(operands, role),
        lambda tile: _prepare(operands, role, tile),
        launch,
        configs_backward.FEW_SPILLS,
        configs.MAX_TRIES,
    )


def first(operands: Operands, role: Role) -> Ready:
    """The launch that is tried first."""
    return _prepare(operands, role, _tiles(operands, role)[0])


def _tiles(operands: Operands, role: Role) -> tuple[configs.Tile, ...]:
    device = configs.device_of(operands.query.device)
    return _table(role)(device, replace(shape_class(operands), work=_work(operands.call.score)))


def _table(role: Role) -> Callable[..., tuple[configs.Tile, ...]]:
    if not role.own_keys:
        return configs_backward.row_tiles
    return configs_backward.key_tiles if role.want_dk else configs_backward.value_tiles


def _prepare(operands: Operands, role: Role, tile: configs.Tile) -> Ready:
    return (_prepare_keys if role.own_keys else _prepare_rows)(operands, role, tile)


def _work(score: BoundProgram | None) -> int:
    """See configs_backward.Shape."""
    if score is None:
        return 0
    program = score.program
    slow = (
        axes for node, axes in zip(program.nodes, program.axes, strict=True) if node.op in _SLOW
    )
    return 2 if any(axes & Axes.Q and axes & Axes.KV for axes in slow) else 1


def shape_class(operands: Operands) -> configs_backward.Shape:
    blocks = operands.call.blocks
    query, key, value = operands.query, operands.key, operands.value
    limit_m, limit_n = covering(query.size(2)), covering(key.size(2))
    if blocks is not None:
        limit_m, limit_n = min(limit_m, blocks.q_block), min(limit_n, blocks.kv_block)
    return configs_backward.Shape(
        width=max(sum(configs.chunks(query.size(3))), sum(configs.chunks(value.size(3)))),
        itemsize=operand_type(query.dtype, key.dtype, value.dtype).itemsize,
        max_m=limit_m,
        max_n=limit_n,
        multiply_adds=operands.by_multiply_adds,
    )


def both_fit(operands: Operands) -> bool:
    """Whether one kernel can hold dk and dv; two passes otherwise."""
    shape = shape_class(operands)
    widest = _WIDEST_TOGETHER[shape.itemsize]
    return shape.width <= (widest // 2 if shape.multiply_adds else widest)


def pitch_of(operands: Operands) -> int:
    """Q_LEN in whole tiles of every size, and in whole blocks: key tiles step through all of one,
    also where it overhangs the last query."""
    blocks, q_len = operands.call.blocks, operands.query.size(2)
    unit = configs.MAX_TILE if blocks is None else max(configs.MAX_TILE, blocks.q_block)
    return -(-q_len // unit) * unit


def _offsets(operands: Operands) -> tuple[int, int]:
    blocks = operands.call.blocks
    return (0, 0) if blocks is None else (blocks.q_offset, blocks.kv_offset)


def _prepare_rows(operands: Operands, role: Role, tile: configs.Tile) -> Ready:
    query, key = operands.query, operands.key
    batch, heads, q_len, _ = query.shape
    num_tiles = -(-q_len // tile.tile_m)
    group = heads // key.size(1)
    shape = (
        heads,
        group,
        batch,
        num_tiles,
        q_len,
        key.size(2),
        *_offsets(operands),
        0 if key.size(0) == 1 else 1,
        heads_together(operands, key.size(2)) * group,
        overhanging_block(operands.call),
        pitch_of(operands),
    )
    config = backward_config(operands, tile, role)
    launch = Launcher(row_kernel, config, num_tiles * batch * heads, tile.options, _OPERANDS)
    return Ready(launch, tile, pack_ints(shape))


def _prepare_keys(operands: Operands, role: Role, tile: configs.Tile) -> Ready:
    query, key = operands.query, operands.key
    batch, heads, q_len, _ = query.shape
    kv_batch, heads_kv, kv_len, _ = key.shape
    group = heads // heads_kv
    units = group * batch // kv_batch
    num_tiles = -(-kv_len // tile.tile_n)
    programs = num_tiles * kv_batch * heads_kv
    processors = configs.device_of(query.device).num_processors
    parts = min(units, _MAX_PARTS, max(1, processors // programs))
    owners = kv_batch * heads_kv * parts
    shape = (
        heads,
        heads_kv,
        group,
        q_len,
        kv_len,
        batch,
        num_tiles,
        *_offsets(operands),
        max(1, heads_together(operands, q_len) // group) * parts,
        units,
        parts,
        owners,
        kv_batch,
        pitch_of(operands),
    )
    config = backward_config(operands, tile, role)
    launch = Launcher(key_kernel, config, num_tiles * owners, tile.options, _OPERANDS)
    return Ready(launch, tile, pack_ints(shape), parts)


def heads_together(operands: Operands, length: int) -> int:
    """Heads whose streamed tensors share half of the L2 cache; more with a mask, so that the
    longest of many programs start first."""
    query, value = operands.query, operands.value
    row_bytes = (query.size(3) + value.size(3)) * query.element_size()
    l2_bytes = configs.device_of(query.device).l2_bytes
    together = max(1, l2_bytes // 2 // (length * row_bytes))
    if operands.call.blocks is not None:
        together *= 4
    return min(_MAX_HEADS_TOGETHER, together)
