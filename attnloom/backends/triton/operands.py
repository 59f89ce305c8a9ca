"""The tensors of a backward as its kernels take them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import configs
from attnloom.backends.triton.arguments import is_aligned, takes_descriptor, unit_stride
from attnloom.backends.triton.fields import by_multiply_adds, operand_type, stored_type, target_of
from attnloom.backends.triton.interpreter import INTERPRETED
from attnloom.backends.triton.layouts import mask_layouts, score_layouts
from attnloom.ir.node import BoundProgram
from attnloom.plan.problem import compute_type


@dataclass(frozen=True)
class Operands:
    """query, key, value, out, dout: with neighbouring elements in a row. lse, dlse: [B, Hq, Q_LEN],
    contiguous, in the type of scores. dq, dk, dv: fresh results in the types that kernels store."""

    call: AttentionCall
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    real: torch.dtype

    @staticmethod
    def of(
        call: AttentionCall,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Operands:
        query, key, value = unit_stride(call.query), unit_stride(call.key), unit_stride(call.value)
        real = compute_type(query.dtype, key.dtype, value.dtype).torch
        dout = dout.to(query.dtype)
        if 0 in dout.stride():
            # the gradient of a sum, say: TMA cannot read it, and it is read once a key tile
            dout = dout.contiguous()
        fresh = tuple(
            torch.empty(t.shape, dtype=stored_type(t.dtype), device=t.device)
            for t in (query, key, value)
        )
        return Operands(
            call,
            query,
            key,
            value,
            unit_stride(out),
            unit_stride(dout),
            lse.to(real).contiguous(),
            None if dlse is None else dlse.to(real).contiguous(),
            *fresh,
            real,
        )

    @staticmethod
    def expected(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> Operands:
        """What the backward of a forward will most likely be given, to compile for: inputs and out
        stand where gradients will, and nothing may be written."""
        query, key, value = unit_stride(call.query), unit_stride(call.key), unit_stride(call.value)
        real = compute_type(query.dtype, key.dtype, value.dtype).torch
        out = unit_stride(out)
        return Operands(call, query, key, value, out, out, lse, None, query, key, value, real)

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value, self.dout

    @functools.cached_property
    def by_multiply_adds(self) -> bool:
        dtype = operand_type(self.query.dtype, self.key.dtype, self.value.dtype)
        return by_multiply_adds(self.call, dtype)

    @functools.cached_property
    def uses_tma(self) -> bool:
        return (
            not self.by_multiply_adds
            and configs.device_of(self.query.device).has_tma
            and not INTERPRETED
            and len({t.dtype for t in self.inputs}) == 1
            and all(takes_descriptor(t) for t in self.inputs)
        )

    @property
    def results_aligned(self) -> bool:
        return all(is_aligned(t) for t in (self.dq, self.dk, self.dv))

    @property
    def rows_aligned(self) -> bool:
        """Whether lse and dlse start where nearly all tensors do."""
        dlse = self.lse if self.dlse is None else self.dlse
        return (self.lse.data_ptr() | dlse.data_ptr()) % 16 == 0

    @functools.cached_property
    def signature(self) -> tuple[object, ...]:
        """All that launches depend on but for addresses, numbers and block lists."""
        call = self.call
        blocks, tensors = call.blocks, (*self.inputs, self.out)
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        return (
            self.query.device,
            tuple(t.dtype for t in tensors),
            tuple(t.shape for t in tensors),
            tuple(t.stride() for t in tensors),
            addresses % 16,
            self.dlse is None,
            None if call.score is None else _structure(call.score),
            None if call.mask is None else call.mask.program.digest,
            None
            if blocks is None
            else (blocks.q_block, blocks.kv_block, blocks.q_offset, blocks.kv_offset),
            None if call.score is None and call.mask is None else target_of(call),
            score_layouts(call),
            mask_layouts(call),
            call.options,
        )


def _structure(score: BoundProgram) -> tuple[object, ...]:
    """Of a score_mod, with the sizes that decide how captured gradients leave."""
    return score.program.digest, tuple(t.shape for t in score.tensors)
