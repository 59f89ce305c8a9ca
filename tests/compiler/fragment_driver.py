"""Runs generated fragments over whole score matrices, without a kernel around them.

Several programs share one compilation: each set of fragments lives in a namespace of its own.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from attnloom.backends.cpu import toolchain
from attnloom.backends.cpu.build import load_source
from attnloom.backends.cpu.emit import emit_fragments
from attnloom.ir.node import BoundProgram, Program

TILE_N = 32
_PRELUDE = ("simd.h", "args.h", "lanes.h", "vecmath.h", "capture.h")
_DRIVER = """
struct Sizes { i64 B, H, Q_LEN, KV_LEN, padded; };

#define ROWS(PREFIX, HEAD, ROW, COLUMN, ATOMS)                                         \\
    narrow_overflow() = 0;                                                             \\
    for (i64 b = 0; b < s.B; b++) for (i64 h = 0; h < s.H; h++) {                      \\
        HEAD H; PREFIX##head_values(M, b, h, H);                                       \\
        ATOMS                                                                          \\
    }                                                                                  \\
    return narrow_overflow();
#define EACH(PREFIX, ROW, COLUMN, BODY)                                                \\
    for (i64 k0 = 0; k0 < s.padded; k0 += TILE_N) {                                    \\
        COLUMN C; PREFIX##column_values(M, H, b, h, k0, C);                            \\
        for (i64 q = 0; q < s.Q_LEN; q++) {                                            \\
            ROW R; PREFIX##row_values(M, H, b, h, q, R);                               \\
            for (int x = 0; x < TILE_N; x += W) {                                      \\
                const i64 k = k0 + x;                                                  \\
                const i64 at = ((b * s.H + h) * s.Q_LEN + q) * s.padded + k;           \\
                BODY                                                                   \\
            }                                                                          \\
        }                                                                              \\
    }
#define SCORE_DRIVER(NAME)                                                             \\
    extern "C" int NAME(const ModArgs& M, const Sizes& s, const real* in, real* out) { \\
        ROWS(, Head, Row, Column, EACH(, Row, Column,                                  \\
            vf_store(out + at, score_mod(M, H, R, C, b, h, q, k, x, vf_load(in + at)));)) \\
    }
#define MASK_DRIVER(NAME)                                                              \\
    extern "C" int NAME(const ModArgs& M, const Sizes& s, i8* out) {                   \\
        ROWS(mask_, MaskHead, MaskRow, MaskColumn, EACH(mask_, MaskRow, MaskColumn,    \\
            store_as(out + at, bytes_from_vm(mask_mod(M, H, R, C, b, h, q, k, x)));))  \\
    }
#define GRAD_DRIVER(NAME)                                                              \\
    extern "C" int NAME(const ModArgs& M, const Sizes& s, const real* in, const real* dout, \\
                        const i8* live, real* out) {                                   \\
        ROWS(, Head, Row, Column, HeadGrad G; head_grad_begin(G); EACH(, Row, Column,  \\
            vf_store(out + at, score_grad(M, H, R, C, G, b, h, q, k, x, vf_load(in + at), \\
                vf_load(dout + at), vm_from_bytes(load_as<v_i8>(live + at))));)        \\
            head_grad_flush(M, H, G, b, h);)                                           \\
    }
"""


def native_target() -> tuple[str, ...]:
    tools = toolchain.available()
    assert tools is not None
    return tools.flags()[-1:]


def as_int64(number: float) -> int:
    return max(-(2**63), min(2**63 - 1, int(number))) if math.isfinite(number) else 0


class TensorArg(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64 * 8),
        ("stride", ctypes.c_int64 * 8),
    )


class ModArgs(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.c_void_p),
        ("reals", ctypes.c_void_p),
        ("ints", ctypes.c_void_p),
        ("grads", ctypes.c_void_p),
        ("q_len", ctypes.c_int64),
        ("kv_len", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Shape:
    B: int = 2
    H: int = 2
    Q_LEN: int = 5
    KV_LEN: int = 37

    @property
    def padded(self) -> int:
        return -(-self.KV_LEN // TILE_N) * TILE_N

    @property
    def full(self) -> tuple[int, int, int, int]:
        return (self.B, self.H, self.Q_LEN, self.padded)

    def positions(self) -> dict[str, torch.Tensor]:
        sizes = {"b": self.B, "h": self.H, "q": self.Q_LEN, "kv": self.KV_LEN}
        shapes = torch.eye(4, dtype=torch.int64)
        return {
            name: torch.arange(size).reshape((shapes[i] * (size - 1) + 1).tolist())
            for i, (name, size) in enumerate(sizes.items())
        }

    def sizes(self) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * 5)(self.B, self.H, self.Q_LEN, self.KV_LEN, self.padded)


class Driver:
    """Fragments of several programs of one kind ("score", "mask" or "grad"), compiled together."""

    def __init__(
        self,
        kind: str,
        programs: list[Program],
        real: str = "float",
        wide_ints: bool = False,
        exact_math: bool = False,
        target: tuple[str, ...] | None = None,
    ) -> None:
        self.kind, self.programs = kind, programs
        self.real = torch.float64 if real == "double" else torch.float32
        text = [f"#define TILE_N {TILE_N}", f"#define REAL_IS_DOUBLE {int(real == 'double')}"]
        text += [f"#define WIDE_INTS {int(wide_ints)}"]
        text += [*(f'#include "{name}"' for name in _PRELUDE), _DRIVER]
        for number, program in enumerate(programs):
            fragments = emit_fragments(
                None if kind == "mask" else program,
                program if kind == "mask" else None,
                real=real,
                wide_ints=wide_ints,
                exact_math=exact_math,
                gradient=kind == "grad",
            )
            driver = f"{kind.upper()}_DRIVER(run{number})"
            text += [f"namespace p{number} {{", fragments.text, driver, "}", "#undef HAS_SCORE"]
            text += ["#undef HAS_MASK", "#undef HAS_CAPTURED_GRAD"]
        # Most of a test's time is compilation, and these functions run for microseconds.
        self.library = load_source("\n".join(text), (*(target or native_target()), "-O1"))

    def score(self, number: int, bound: BoundProgram, score: torch.Tensor, shape: Shape):
        """Scores [B, H, Q_LEN, KV_LEN] after the mod, and whether a value was too wide."""
        out = torch.full(shape.full, torch.nan, dtype=self.real)
        arguments = self._pad(score, shape), out
        flag = self._call(number, bound, shape, arguments, {})
        return out[..., : shape.KV_LEN], flag

    def mask(self, number: int, bound: BoundProgram, shape: Shape):
        out = torch.full(shape.full, 99, dtype=torch.int8)
        flag = self._call(number, bound, shape, (out,), {})
        assert ((out == 0) | (out == -1)).all()
        return out[..., : shape.KV_LEN] != 0, flag

    def grad(
        self,
        number: int,
        bound: BoundProgram,
        score: torch.Tensor,
        dscore: torch.Tensor,
        live: torch.Tensor,
        shape: Shape,
    ):
        """dL/dscore before the mod, gradients by slot, and the flag. Dead lanes hold NaN."""
        out = torch.full(shape.full, torch.nan, dtype=self.real)
        lanes = self._pad(-live.to(torch.int8), shape, 0)
        arguments = (self._pad(score, shape), self._pad(dscore, shape), lanes, out)
        grads = {
            slot: torch.zeros(bound.tensors[slot].shape, dtype=self.real)
            for slot, spec in enumerate(bound.program.tensors)
            if spec.requires_grad
        }
        flag = self._call(number, bound, shape, arguments, grads)
        return out[..., : shape.KV_LEN], grads, flag

    def _pad(self, value: torch.Tensor, shape: Shape, fill: float = torch.nan) -> torch.Tensor:
        dtype = self.real if value.dtype.is_floating_point else value.dtype
        padded = torch.full(shape.full, fill, dtype=dtype)
        padded[..., : shape.KV_LEN] = value
        return padded

    def _call(self, number, bound, shape, arguments, grads) -> bool:
        tensors = (TensorArg * max(1, len(bound.tensors)))()
        for arg, tensor in zip(tensors, bound.tensors, strict=False):
            arg.data = tensor.data_ptr()
            arg.size[: tensor.dim()] = tuple(tensor.shape)
            arg.stride[: tensor.dim()] = tuple(tensor.stride())
        reals = torch.tensor([float(n) for n in bound.numbers] or [0.0], dtype=torch.float64)
        ints = torch.tensor([as_int64(n) for n in bound.numbers] or [0], dtype=torch.int64)
        table = (ctypes.c_void_p * max(1, len(bound.tensors)))()
        for slot, grad in grads.items():
            table[slot] = grad.data_ptr()
        args = ModArgs(
            ctypes.addressof(tensors),
            reals.data_ptr(),
            ints.data_ptr(),
            ctypes.addressof(table),
            shape.Q_LEN,
            shape.KV_LEN,
        )
        function = getattr(self.library, f"run{number}")
        pointers = (ctypes.c_void_p(a.data_ptr()) for a in arguments)
        return bool(function(ctypes.byref(args), shape.sizes(), *pointers))
