"""The CPU backend: finds the compiled kernel of a call, hands it memory and runs it.

A call costs about 15 us here: kernels are remembered by structure, and all arguments are packed at
once (launch_args.py); calls that are like an earlier one keep even those (again.py).
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnloom.backends.cpu import build, toolchain
from attnloom.backends.cpu.again import BackwardAgain, ForwardAgain
from attnloom.backends.cpu.captured_gradients import CapturedGradients
from attnloom.backends.cpu.launch_args import (
    DTYPE_CODES,
    Arguments,
    Parts,
    operand,
    unit_stride,
)
from attnloom.backends.cpu.schedule import (
    DECODE_KEYS,
    DECODE_ROWS,
    BackwardSchedule,
    Schedule,
    backward_schedule,
    decode_schedule,
    num_threads,
)
from attnloom.backends.cpu.widths import needs_wide_ints
from attnloom.backends.registry import AttentionCall, ForwardResult, Gradients
from attnloom.errors import counted
from attnloom.ir.node import DType
from attnloom.plan.problem import compute_type

_ALIGNMENT = 64
_MAX_RANK = 8
_KEPT_BYTES = 16 << 20
_DEFINES = {
    "forward": (),
    "backward": (),
    "decode": (("TILE_M", DECODE_ROWS), ("TILE_N", DECODE_KEYS)),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """Entry points of a loaded kernel; both take the address of an AttentionArgs."""

    workspace: Callable[[int], int]
    run: Callable[[int], int]


_Key = tuple[Any, ...]
_kernels: dict[_Key, Kernel] = {}
# Structures that met a captured integer beyond narrow lanes: they start wide from then on.
_wide: set[_Key] = set()


class CpuBackend:
    """Fused attention in C++ compiled on first use; see `registry.Backend`."""

    name = "cpu"

    def unsupported(self, call: AttentionCall) -> str | None:
        if call.query.device.type != "cpu":
            return f"query is on {call.query.device}, the kernels run on the CPU only."
        for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
            known = tensor.dtype in DTYPE_CODES
            if not known or (name == "query" and tensor.dtype.itemsize == 1):
                return f"{name} has dtype {tensor.dtype}, which the CPU kernels cannot load."
        for bound in (call.score, call.mask):
            for spec in bound.program.tensors if bound is not None else ():
                if spec.rank > _MAX_RANK:
                    return (
                        f"a captured tensor has {counted(spec.rank, 'dimension')}, kernels take "
                        f"{_MAX_RANK}."
                    )
        if toolchain.available() is None:
            return "no C++ compiler was found."
        return None

    def forward(self, call: AttentionCall, want_max_scores: bool) -> ForwardResult:
        real = compute_type(call.query.dtype, call.key.dtype, call.value.dtype)
        out, lse, max_scores = results = _forward_results(call, real, want_max_scores)
        if call.table is not None and call.table.counts is not None:
            # kernels leave rows of padding alone
            for rows_of, padding in ((out, 0.0), (lse, -math.inf), (max_scores, -math.inf)):
                if rows_of is not None:
                    rows_of.fill_(padding)
        state = _row_state(call, real)
        inputs = tuple(unit_stride(t) for t in (call.query, call.key, call.value))
        kernel, parts = _forward_parts(call, inputs, results, state)
        _launch(kernel, call, real, parts)
        return ForwardResult(out, lse, max_scores, state)

    def forward_again(self, call: AttentionCall, want_max_scores: bool) -> ForwardAgain | None:
        inputs = call.query, call.key, call.value
        real = compute_type(call.query.dtype, call.key.dtype, call.value.dtype)
        if any(unit_stride(t) is not t for t in inputs):
            return None
        results, state = _forward_results(call, real, want_max_scores), _row_state(call, real)
        name, parts = _forward_parts(call, inputs, results, state)
        run = _narrow(name, call, real)
        if run is None:
            return None
        like = ForwardResult(*results, state)
        return ForwardAgain(call, Arguments(call, parts), run, like, want_max_scores)

    def backward_again(
        self,
        call: AttentionCall,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> BackwardAgain | None:
        operands, rows = _backward_operands(call, out, lse, dout, dlse)
        given = (call.query, call.key, call.value, out, dout, lse, dlse)
        taken = (*operands[:5], *rows)
        if any(a is not b for a, b in zip(given, taken, strict=True)):
            return None
        real, plan, captured = _planned(call)
        run = _narrow("backward", call, real)
        if run is None:
            return None
        parts = _backward_parts(call, operands, rows, plan.schedule, captured.address)
        return BackwardAgain(Arguments(call, parts), run, operands[5:], captured)

    def backward(
        self,
        call: AttentionCall,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        operands, rows = _backward_operands(call, out, lse, dout, dlse)
        real, plan, captured = _planned(call)
        buffers = captured.buffers()

        def clear() -> None:
            for buffer in buffers.values():
                buffer.zero_()

        parts = _backward_parts(call, operands, rows, plan.schedule, captured.address)
        _launch("backward", call, real, parts, clear)
        dq, dk, dv = operands[5:]
        return Gradients(dq, dk, dv, captured.total(buffers))


def _planned(call: AttentionCall) -> tuple[DType, BackwardSchedule, CapturedGradients]:
    """The type that a backward computes in, how it is divided, and its captured gradients."""
    real = compute_type(call.query.dtype, call.key.dtype, call.value.dtype)
    plan = backward_schedule(call, num_threads(call))
    return real, plan, CapturedGradients(call, plan, real)


_Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _forward_results(call: AttentionCall, real: DType, want_max_scores: bool) -> _Results:
    """Memory for out, lse and max_scores."""
    rows = call.query.shape[:3]
    out = torch.empty((*rows, call.value.size(3)), dtype=call.query.dtype, device="cpu")
    lse = torch.empty(rows, dtype=real.torch, device="cpu")
    return out, lse, torch.empty_like(lse) if want_max_scores else None


def _forward_parts(
    call: AttentionCall,
    inputs: tuple[torch.Tensor, ...],
    results: _Results,
    state: torch.Tensor | None,
) -> tuple[str, Parts]:
    """The kernel of a forward, and what it takes; inputs: with rows of unit stride."""
    query, key, value = inputs
    out, lse, max_scores = results
    batch = query.size(0)
    in_pages = call.table is not None and call.table.pages is not None
    stored = (operand(t, batch, in_pages) for t in (key, value))
    operands = [operand(query, batch), *stored, operand(out, batch)] + [()] * 4
    rows = (lse.data_ptr(), _address(max_scores), 0, _address(state))
    threads = num_threads(call)
    # A backward takes scores from the products of the forward kernel: those of the decode
    # kernel add up in another order, and would be divided by sums that are not theirs.
    schedule = decode_schedule(call, threads) if state is None else None
    kernel = "forward" if schedule is None else "decode"
    return kernel, Parts(operands, rows, schedule or Schedule(threads))


def _backward_operands(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.Tensor | None]]:
    """query, key, value, out, dout and memory for their gradients as a backward takes them; lse and
    dlse."""
    query, key, value = (unit_stride(t) for t in (call.query, call.key, call.value))
    real = compute_type(query.dtype, key.dtype, value.dtype).torch
    out, dout = unit_stride(out), unit_stride(dout.to(query.dtype))
    results = (torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in (query, key, value))
    dlse = None if dlse is None else dlse.to(real).contiguous()
    return (query, key, value, out, dout, *results), (lse.to(real).contiguous(), dlse)


def _backward_parts(
    call: AttentionCall,
    operands: tuple[torch.Tensor, ...],
    rows: tuple[torch.Tensor, torch.Tensor | None],
    schedule: Schedule,
    grads: int,
) -> Parts:
    batch, kv_batch = call.query.size(0), call.key.size(0)
    words = [operand(t, batch) for t in operands[:6]]
    words += [operand(t, kv_batch) for t in operands[6:]]
    lse, dlse = rows
    places = (lse.data_ptr(), 0, _address(dlse), _address(call.row_state))
    return Parts(words, places, schedule, grads)


def _row_state(call: AttentionCall, real: DType) -> torch.Tensor | None:
    """Memory for the row state, [2, B, Hq, Q_LEN], where it makes gradients better: those of
    half-precision inputs are rounded far more coarsely than lse is."""
    if not call.for_backward or call.query.dtype != real.torch:
        return None
    return torch.empty((2, *call.query.shape[:3]), dtype=real.torch, device="cpu")


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _launch(
    name: str,
    call: AttentionCall,
    real: DType,
    parts: Parts,
    again: Callable[[], None] = lambda: None,
) -> None:
    """Run a kernel; `again` resets what it adds to, before a second run with wider integers."""
    arguments = Arguments(call, parts)
    key = _structure(name, call, real)
    wide = real is DType.F32 and (key in _wide or needs_wide_ints(call))
    if _run(_kernel(name, call, real, key, wide), arguments) and not wide:
        _wide.add(key)
        again()
        _run(_kernel(name, call, real, key, True), arguments)


def _narrow(name: str, call: AttentionCall, real: DType) -> Callable[[Arguments], int] | None:
    """The kernel of a call, which has run; None where its integers need wide lanes."""
    key = _structure(name, call, real)
    if real is DType.F32 and (key in _wide or needs_wide_ints(call)):
        return None
    return functools.partial(_run, _kernel(name, call, real, key, False))


def _run(kernel: Kernel, arguments: Arguments) -> int:
    num_bytes = kernel.workspace(arguments.address) + _ALIGNMENT
    workspace = _workspace(num_bytes)
    address = workspace.data_ptr()
    arguments.set_workspace(address + -address % _ALIGNMENT)
    return kernel.run(arguments.address)


class _Kept(threading.local):
    """A thread's last workspace. Fresh memory costs a page fault for each 4 KiB, often more than a
    small kernel itself takes."""

    workspace = torch.empty(0, dtype=torch.uint8, device="cpu")


_kept = _Kept()


def _workspace(num_bytes: int) -> torch.Tensor:
    kept = _kept.workspace
    if kept.numel() >= num_bytes:
        return kept
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    if num_bytes <= _KEPT_BYTES:
        _kept.workspace = workspace
    return workspace


def load_kernel(spec: build.KernelSpec) -> Kernel:
    """The entry points of a kernel, compiled if need be.

    Raises:
        CompileError: there is no compiler, or it refused.
    """
    library = build.kernel(spec)
    entries = (library.attnloom_workspace, library.attnloom_run)
    for entry in entries:
        entry.argtypes = [ctypes.c_void_p]
        entry.restype = ctypes.c_int64
    return Kernel(*entries)


def _structure(name: str, call: AttentionCall, real: DType) -> _Key:
    return (
        name,
        None if call.score is None else call.score.program.digest,
        None if call.mask is None else call.mask.program.digest,
        real,
        _all_bf16(call),
        call.options.exact_math,
    )


def _all_bf16(call: AttentionCall) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype == torch.bfloat16


def _kernel(name: str, call: AttentionCall, real: DType, key: _Key, wide: bool) -> Kernel:
    found = _kernels.get((key, wide))
    if found is not None:
        return found
    spec = build.KernelSpec(
        name,
        None if call.score is None else call.score.program,
        None if call.mask is None else call.mask.program,
        "double" if real is DType.F64 else "float",
        wide,
        call.options.exact_math,
        (("BF16_INPUTS", int(_all_bf16(call))), *_DEFINES[name]),
    )
    found = load_kernel(spec)
    _kernels[key, wide] = found
    return found
