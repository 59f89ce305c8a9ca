"""Queries that stand before the first token of their sequence, which no key is there for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from attnloom import AuxRequest, PagedKV, PageTable, create_block_mask, flex_attention
from attnloom.api import cached
from tests.paged.draw import MASKS, SCORES

H, HKV, LONGEST = 4, 2, 96


@dataclass(frozen=True)
class Rows:
    """Sequences of some lengths, each with as many queries as query has rows."""

    lengths: tuple[int, ...]
    q_len: int
    page_size: int = 16
    mask: str | None = None
    score: str | None = None
    block: int = 16
    counted: bool = False
    dtype: torch.dtype = torch.float32
    D: int = 16


def check_rows(problem: Rows, backend: str, device: str = "cpu") -> None:
    """Row i stands at lengths - counts + i: below 0 it gives 0 and -inf, else what attention
    written out gives."""
    rng = torch.Generator().manual_seed(0)
    lengths, batch, page = problem.lengths, len(problem.lengths), problem.page_size
    query = torch.randn(batch, H, problem.q_len, problem.D, generator=rng).to(problem.dtype)
    stored = torch.randn(2, batch, HKV, LONGEST, problem.D, generator=rng).to(problem.dtype)
    inputs, pages = stored.to(device), None
    if page:
        cut = inputs.unflatten(3, (-1, page)).transpose(2, 3).flatten(1, 2)
        inputs, pages = cut.contiguous(), torch.arange(cut.size(1)).int().view(batch, -1).to(device)
    table = PageTable(
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.full((batch,), problem.q_len, dtype=torch.int32, device=device)
        if problem.counted
        else None,
        pages,
        page,
        LONGEST,
    )
    mask = None
    if problem.mask is not None or not page:
        keep = MASKS[problem.mask] if problem.mask else lambda b, h, q, kv: kv >= 0
        sizes = (batch if problem.mask == "by_batch" else None, H)
        mask = create_block_mask(keep, *sizes, LONGEST, LONGEST, "cpu", problem.block).to(device)
    score = SCORES[problem.score](device) if problem.score else None
    given = (PagedKV(*inputs, table), None) if page else tuple(inputs)
    mask = mask if page or mask is None else mask.for_decode(table.lengths, table.counts)
    out, aux = flex_attention(
        query.to(device), *given, score, mask, enable_gqa=True, return_aux=AuxRequest(lse=True),
        kernel_options={"backend": backend},
    )  # fmt: skip
    want, lse = _written_out(problem, query.double(), stored.double())
    far = 2e-2 if problem.dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(out.cpu().double(), want, rtol=far, atol=far)
    assert aux is not None and aux.lse is not None
    torch.testing.assert_close(aux.lse.cpu().double(), lse, rtol=far, atol=far)
    before = torch.tensor(lengths)[:, None] - problem.q_len + torch.arange(problem.q_len) < 0
    assert (out.cpu().transpose(1, 2)[before] == 0).all()


def _written_out(
    problem: Rows, query: torch.Tensor, stored: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = stored.repeat_interleave(H // HKV, dim=2)
    b, h, i, kv = torch.meshgrid(
        torch.arange(query.size(0)), torch.arange(H), torch.arange(problem.q_len),
        torch.arange(LONGEST), indexing="ij",
    )  # fmt: skip
    length = torch.tensor(problem.lengths)[b]
    q = length - problem.q_len + i
    scores = query @ key.transpose(2, 3) * problem.D**-0.5
    if problem.score:
        scores = SCORES[problem.score]("cpu")(scores, b, h, q, kv)
    live = (q >= 0) & (kv < length)
    if problem.mask:
        live = live & MASKS[problem.mask](b, h, q, kv)
    lse = scores.masked_fill(~live, -math.inf).logsumexp(-1)
    weights = torch.where(live, (scores - lse[..., None]).exp(), 0.0)
    return weights @ value, lse


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables on the CPU go to the kernels as they are, as those on a device do."""
    monkeypatch.setattr(cached, "check_contents", lambda *_: None)


SOME = [
    Rows((2, 40, 0, 17), 3),
    Rows((2, 40, 0, 17), 3, mask="causal"),
    Rows((5, 33, 1, 96), 20, mask="window", score="alibi"),
    Rows((5, 33, 1, 96), 20, mask="by_head", block=32, score="bias"),
    Rows((7, 39, 16), 40, mask="by_batch", counted=True),
    Rows((7, 39, 16), 40, page_size=0, score="alibi"),
    Rows((31, 33, 96, 32), 70, page_size=0, mask="window", block=32),
    Rows((31, 33, 96, 32), 70, page_size=32, mask="bidirectional", block=32, counted=True),
    Rows((0, 5), 1, mask="causal"),
]
