"""Triton's signature of a kernel's arguments, as a launcher passes them."""

from __future__ import annotations

from typing import Any

import torch

_FORMATS = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


def type_of(argument: Any) -> Any:
    """Of one argument: a tensor, a descriptor, a number or a tuple of them."""
    if isinstance(argument, tuple):
        return tuple(type_of(a) for a in argument)
    if hasattr(argument, "block_shape"):
        shape = ",".join(map(str, argument.block_shape))
        layout = f",{argument.layout!r}" if hasattr(argument, "layout") else ""  # Gluon's
        return f"tensordesc<{_FORMATS[argument.base.dtype]}[{shape}]{layout}>"
    if hasattr(argument, "data_ptr"):
        return "*" + _FORMATS[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"
