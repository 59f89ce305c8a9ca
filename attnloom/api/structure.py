"""Programs as text, so that a traced mod can be an argument of a registered operator.

The text holds structure only and is complete: an exported graph that carries it runs in another
process without the Python function that it was traced from.
"""

from __future__ import annotations

import functools
import json

import torch

from attnloom.errors import OptionError
from attnloom.ir.node import Axes, DType, Node, Program, TensorSpec
from attnloom.ir.verify import verify

VERSION = 1


@functools.lru_cache(maxsize=1024)
def encode(program: Program | None) -> str:
    """The text of a program; "" for None. Equal programs give equal texts."""
    if program is None:
        return ""
    return json.dumps(
        {
            "version": VERSION,
            "nodes": [[n.op, n.args, n.dtype.value, _pack(n.attr)] for n in program.nodes],
            "outputs": program.outputs,
            "tensors": [
                [str(t.dtype).removeprefix("torch."), t.rank, t.requires_grad]
                for t in program.tensors
            ],
            "numbers": [d.value for d in program.numbers],
            "reductions": program.reductions,
        },
        separators=(",", ":"),
    )


@functools.lru_cache(maxsize=1024)
def decode(text: str) -> Program | None:
    """The program that `encode` wrote; None for "".

    Raises:
        OptionError: the text was written by another version of attnloom, or is damaged.
    """
    if not text:
        return None
    try:
        raw = json.loads(text)
        if raw["version"] != VERSION:
            raise ValueError(f"its version is {raw['version']}, this attnloom reads {VERSION}")
        program = Program(
            nodes=tuple(
                Node(op, tuple(args), DType(dtype), _unpack(attr))
                for op, args, dtype, attr in raw["nodes"]
            ),
            outputs=tuple(raw["outputs"]),
            tensors=tuple(TensorSpec(_dtype(d), r, g) for d, r, g in raw["tensors"]),
            numbers=tuple(DType(d) for d in raw["numbers"]),
            reductions=tuple((slot, dim) for slot, dim in raw["reductions"]),
        )
        verify(program)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise OptionError(
            f"an attnloom operator was given a mod it cannot read ({error}). Export the model "
            "again with this version of attnloom."
        ) from error
    return program


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def _pack(attr: object) -> object:
    """JSON keeps bool, int and float apart; only a reduction's (kind, axis) needs a mark."""
    if isinstance(attr, tuple):
        kind, axis = attr
        return {"reduce": kind, "axis": int(axis)}
    return attr


def _unpack(attr: object) -> object:
    if isinstance(attr, dict):
        return (attr["reduce"], Axes(attr["axis"]))
    return attr
