"""Problems over pages: drawn with NaN in every row that no sequence has written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnloom import BlockMask, PagedKV, PageTable, create_block_mask, flex_attention
from attnloom.backends.reference import paged_reference

_SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.06, 0.03] * 3)
_WINDOWS = torch.tensor([3, 20, 50, 100, 7] * 3)
_BIAS = torch.linspace(-1, 1, 15 * 257).reshape(15, 257)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 20)


def by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= _WINDOWS[h])


def by_batch(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (kv_idx % (b + 2) != 1)


def bidirectional(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= 64


def nothing(b, h, q_idx, kv_idx):
    return q_idx < 0


def alibi(device):
    slopes = _SLOPES.to(device)

    def mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx) + 0.01 * b

    return mod


def bias(device):
    table = _BIAS.to(device)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[h, (q_idx - kv_idx).clamp(0, 256)]

    return mod


def softcap(device):
    return lambda score, b, h, q_idx, kv_idx: 5 * torch.tanh(score / 5)


MASKS = {m.__name__: m for m in (causal, window, by_head, by_batch, bidirectional, nothing)}
SCORES = {m.__name__: m for m in (alibi, bias, softcap)}


@dataclass(frozen=True)
class Problem:
    """page_size 0: [B, Hkv, MAX_LEN, D] tensors, of one batch entry if shared. strided: pages are a
    view of [num_pages, page_size, Hkv, D]."""

    lengths: tuple[int, ...] = (90, 3, 150)
    counts: tuple[int, ...] = (1, 1, 1)
    page_size: int = 16
    Hq: int = 4
    Hkv: int = 2
    D: int = 32
    Dv: int = 32
    dtype: torch.dtype = torch.float32
    mask: str | None = None
    score: str | None = None
    block: int | tuple[int, int] = 64
    shared: bool = False
    strided: bool = False


@dataclass(frozen=True)
class Drawn:
    """Inputs of a Problem; sequences are at least as long as their queries are many."""

    query: torch.Tensor
    stored: tuple[torch.Tensor, torch.Tensor]
    table: PageTable
    mask: BlockMask | None

    @property
    def kv(self) -> PagedKV:
        return PagedKV(*self.stored, self.table)


def draw(problem: Problem, seed: int = 0, device: str = "cpu") -> Drawn:
    rng = torch.Generator().manual_seed(seed)
    lengths = [max(n, c) for n, c in zip(problem.lengths, problem.counts, strict=True)]
    B, q_len, longest = len(lengths), max(1, *problem.counts), max(lengths)
    query = torch.randn(B, problem.Hq, q_len, problem.D, generator=rng).to(problem.dtype)
    for b, count in enumerate(problem.counts):
        query[b, :, count:] = torch.nan
    page = problem.page_size or max(1, longest + 5)
    used = [-(-n // page) for n in lengths]
    width = max(1, *used) + 1
    pool = 1 if problem.shared else B if not problem.page_size else sum(used) + 3
    numbers = torch.randperm(pool, generator=rng, dtype=torch.int64).int()
    pages = torch.full((B, width), pool + 10**6, dtype=torch.int32)  # never to be read
    stored = tuple(
        torch.full((pool, problem.Hkv, page, d), torch.nan, dtype=problem.dtype)
        for d in (problem.D, problem.Dv)
    )
    at = 0
    for b, (length, count) in enumerate(zip(lengths, used, strict=True)):
        mine = torch.tensor([0 if problem.shared else b])
        if problem.page_size:
            mine = numbers[at : at + count]
            at += count
            pages[b, :count] = mine
        for place, number in enumerate(mine.tolist()):
            rows = min(page, length - place * page)
            for tensor in stored:
                new = torch.randn(problem.Hkv, rows, tensor.size(3), generator=rng)
                tensor[number, :, :rows] = new.to(problem.dtype)
    table = PageTable(
        torch.tensor(lengths, dtype=torch.int32).to(device),
        torch.tensor(problem.counts, dtype=torch.int32).to(device),
        pages.to(device) if problem.page_size else None,
        problem.page_size,
        longest,
    )
    mask = None
    if problem.mask is not None:
        sizes = {"by_head": (None, problem.Hq), "by_batch": (B, None)}.get(
            problem.mask, (None,) * 2
        )
        long = max(256, longest + 1)
        mod = MASKS[problem.mask]
        mask = create_block_mask(mod, *sizes, long, long, "cpu", problem.block).to(device)
    key, value = (t.to(device) for t in stored)
    if problem.strided:
        key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (key, value))
    return Drawn(query.to(device), (key, value), table, mask)


def check(problem: Problem, backend: str, device: str = "cpu") -> None:
    """A backend against the float64 oracle: at most twice the error of the reference in the same
    dtype, and padding exactly 0."""
    drawn = draw(problem, device=device)
    score = None if problem.score is None else SCORES[problem.score](device)
    args = (drawn.query, *drawn.stored, drawn.table, score, drawn.mask)
    want = paged_reference(*args).out
    mask = drawn.mask
    if problem.page_size:
        inputs = (drawn.query, drawn.kv, None)
    else:
        inputs = (drawn.query, *drawn.stored)
        whole = create_block_mask(lambda b, h, q, k: k >= 0, None, None, 1024, 1024, device)
        mask = (mask or whole).for_decode(drawn.table.lengths, drawn.table.counts)
    found = flex_attention(
        *inputs, score, mask, enable_gqa=True, kernel_options={"backend": backend}
    )
    assert found.dtype == problem.dtype
    real = torch.float64 if problem.dtype == torch.float64 else torch.float32
    plain = paged_reference(*args, dtype=real).out.to(problem.dtype)
    budget = 2 * (plain.double() - want).abs().max() + 2e-6 * want.abs().max()
    error = (found.double() - want).abs().max()
    assert error <= budget, f"error {error:.3e} exceeds {budget:.3e}"
    for b, count in enumerate(problem.counts):
        assert (found[b, :, count:] == 0).all()
