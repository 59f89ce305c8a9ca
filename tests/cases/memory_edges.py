"""Attention on tensors that end where memory ends: a program that dies of one read too far.

Each input lies in pages of its own, its last byte in front of a page that nobody may read, or its
first byte behind one. Run as `python -m tests.cases.memory_edges`; it prints what it ran. With
TRITON_INTERPRET=1 and --triton the Triton kernels run, as their interpreter runs them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import sys

import torch

import attnloom
from tests.harness.interpreting import language_replaced_once

PAGE = mmap.PAGESIZE
SIZES = ((1, 1, 8, 8), (3, 5, 33, 7), (17, 130, 16, 40), (64, 128, 64, 64))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED_SIZES = ((17, 35, 16, 40), (33, 33, 192, 144))
INTERPRETED_DTYPES = (torch.float16,)  # chunks of a head dimension are those of halves
_PROT_NONE = 0
_kept: list[mmap.mmap] = []  # torch.frombuffer keeps none of them


def at_the_edge(tensor: torch.Tensor, end: bool) -> torch.Tensor:
    """A copy between two pages that cannot be read, at the end of what lies between or at its
    start."""
    size = tensor.numel() * tensor.element_size()
    inner = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, inner + 2 * PAGE)
    _kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for guard in (start, start + PAGE + inner):
        if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE + (inner - size if end else 0)
    whole = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return whole.view(tensor.shape).copy_(tensor)


def run(sizes: tuple[int, int, int, int], dtype: torch.dtype, end: bool, backend: str) -> None:
    """Forward and backward with a mask, a bias and ids that end there too; everything is read."""
    q_len, kv_len, head_dim, value_dim = sizes
    shapes = ((2, q_len, head_dim), (1, kv_len, head_dim), (1, kv_len, value_dim))
    q, k, v = (at_the_edge(torch.randn(1, *shape).to(dtype), end) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bias = at_the_edge(torch.randn(2, q_len, kv_len).to(dtype), end)
    ids = at_the_edge(torch.arange(kv_len) // 7, end)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx, kv_idx]

    def mask_mod(b, h, q_idx, kv_idx):
        return (ids[kv_idx] % 2 == 0) | (q_idx >= kv_idx)

    mask = attnloom.create_block_mask(mask_mod, None, None, q_len, kv_len, BLOCK_SIZE=16)
    for block_mask in (None, mask):
        out, aux = attnloom.flex_attention(
            *leaves, score_mod, block_mask, enable_gqa=True,
            return_aux=attnloom.AuxRequest(lse=True), kernel_options={"backend": backend},
        )  # fmt: skip
        dout = at_the_edge(torch.ones_like(out), end)
        grads = torch.autograd.grad(out, leaves, dout)
        assert all(x.isfinite().all() for x in (out, aux.lse, *grads))


def main() -> None:
    torch.manual_seed(0)
    triton = "--triton" in sys.argv
    sizes_and_dtypes = (INTERPRETED_SIZES, INTERPRETED_DTYPES) if triton else (SIZES, DTYPES)
    with language_replaced_once() if triton else contextlib.nullcontext():
        for sizes, dtype, end in itertools.product(*sizes_and_dtypes, (True, False)):
            run(sizes, dtype, end, "triton" if triton else "cpu")
            sys.stdout.write(f"{sizes} {dtype} {'end' if end else 'start'}\n")
            sys.stdout.flush()
    if "--beyond" in sys.argv:
        short = at_the_edge(torch.ones(8), True)
        sys.stdout.write(f"{ctypes.c_float.from_address(short.data_ptr() + 32).value}\n")


if __name__ == "__main__":
    main()
