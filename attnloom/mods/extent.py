"""How factories say which sizes a mod is for."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.extent import LENGTHS, Axis, Limit


def of_table(factory: str, name: str, table: Tensor, *axes: Axis | None) -> list[Limit]:
    """Limits of a table whose last dimensions lie along these axes; None is along no axis.

    A batch or head dimension of size 1 serves all.
    """
    source = f"{factory}: {name} has shape {list(table.shape)}"
    sizes = table.shape[table.dim() - len(axes) :]
    return [
        Limit(axis, size, False, source)
        for axis, size in zip(axes, sizes, strict=True)
        if axis in LENGTHS or (axis is not None and size > 1)
    ]


def of_tokens(factory: str, name: str, table: Tensor) -> list[Limit]:
    """Limits of a table [S] or [B, S] of what both queries and keys are."""
    leading: tuple[Axis, ...] = ("batch",) if table.dim() == 2 else ()
    found = of_table(factory, name, table, *leading, "Q_LEN")
    return found + of_table(factory, name, table, "KV_LEN")


def of_packed(factory: str, name: str, length: int) -> list[Limit]:
    """What documents that end at `length` tell of a call; it may be longer, by tokens that belong
    to no document."""
    source = f"{factory}: {name} ends at {length}"
    return [Limit(axis, length, False, source, binding=False) for axis in LENGTHS]


def of_heads(factory: str, name: str, heads: int) -> list[Limit]:
    """The limit of a mod whose values depend on how many heads there are."""
    return [Limit("heads", heads, True, f"{factory}: {name} is {heads}")]


def of_canvas(factory: str, canvas: tuple[int, ...]) -> list[Limit]:
    """Limits of a grid: sequences are as long as it has tokens."""
    volume = 1
    for size in canvas:
        volume *= size
    return [Limit(axis, volume, True, f"{factory}: canvas is {canvas}") for axis in LENGTHS]
