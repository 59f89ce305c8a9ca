"""Attention in processes that share a model: FSDP, tensor parallelism. Two processes over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import attnloom
from attnloom.errors import ShapeError, TraceError, UnsupportedError
from tests.harness.agree import normal
from tests.harness.optimised_less import optimised_less

S, D = 40, 8
WINDOWS = torch.tensor([3, 40, 7, 40])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window_by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOWS[h])


class Block(torch.nn.Module):
    """Projections around an attention whose mask is global."""

    def __init__(self, mask: attnloom.BlockMask) -> None:
        super().__init__()
        self.mask = mask
        self.project = torch.nn.Linear(32, 96)
        self.out = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        found = attnloom.flex_attention(q, k, v, block_mask=self.mask)
        return x + self.out(found.transpose(1, 2).flatten(2))


@contextmanager
def group(store: Path, rank: int = 0, size: int = 1) -> Iterator[None]:
    method = f"file://{store}"
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    try:
        yield
    finally:
        distributed.destroy_process_group()


Scenarios = tuple[Callable[[], None], ...]


def _process(rank: int, size: int, folder: Path, scenarios: Scenarios) -> None:
    torch.set_num_threads(1)
    with optimised_less():  # as in the process that starts these: the same kernels
        for number, scenario in enumerate(scenarios):
            with group(folder / f"store{number}", rank, size):
                scenario()


def in_two_processes(folder: Path, *scenarios: Callable[[], None]) -> None:
    """Run the scenarios in turn; an exception in one process fails the test."""
    torch.multiprocessing.spawn(_process, (2, folder, scenarios), nprocs=2)


def fsdp_gradients_are_those_of_one_process() -> None:
    torch.manual_seed(0)
    mask = attnloom.create_block_mask(causal, None, None, S, S)
    model = torch.nn.Sequential(Block(mask), Block(mask))
    x = normal(2, S, 32)
    model(x).square().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for step in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        share = x.chunk(size)[rank]
        step(share).square().mean().backward()
        for name, p in model.named_parameters():
            assert isinstance(p.grad, DTensor)
            torch.testing.assert_close(p.grad.full_tensor(), expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_case_122_fully_sharded_data_parallel(tmp_path: Path) -> None:
    """FSDP with torch.compile failed on any model with a global mask."""
    with group(tmp_path / "store"):
        fsdp_gradients_are_those_of_one_process()


def mask_of(name: str) -> attnloom.BlockMask | None:
    mods = {"causal": causal, "by head": window_by_head}
    by_head = 4 if name == "by head" else None
    if name not in mods:
        return None
    return attnloom.create_block_mask(mods[name], None, by_head, S, S, BLOCK_SIZE=16)


def tilt(table: torch.Tensor, depth: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Tells heads and batch entries apart; learns from both."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h] * (kv_idx - q_idx) / S + depth[b, h]

    return score_mod


Result = dict[str, torch.Tensor]


def attend(
    inputs: list[torch.Tensor], captured: list[torch.Tensor], mask: str, weight: torch.Tensor
) -> Result:
    """out, lse and every gradient, whole."""
    leaves = [*inputs, *captured]
    for leaf in leaves:
        leaf.grad = None
    q, k, v = inputs
    out, aux = attnloom.flex_attention(
        q, k, v, tilt(*captured), mask_of(mask), enable_gqa=k.size(1) != q.size(1),
        return_aux=attnloom.AuxRequest(lse=True),
    )  # fmt: skip
    assert aux.lse is not None
    assert type(out) is type(q)
    ((out * weight).sum() + aux.lse.sum()).backward()
    named = {"out": out, "lse": aux.lse}
    named |= {f"gradient {n}": leaf.grad for n, leaf in enumerate(leaves)}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named.items()}


def problem(B: int, Hq: int, Hkv: int, Bkv: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    shapes = [(B, Hq, S, D), (Bkv, Hkv, S, D), (Bkv, Hkv, S, D), (Hq,), (B, Hq)]
    tensors = [normal(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    return tensors[:3], tensors[3:]


# query, key and value: B, Hq, Hkv, Bkv; placement of query, of key and value; mask
SHARDED: dict[str, tuple[tuple[int, int, int, int], Placement, Placement, str]] = {
    "heads": ((2, 4, 4, 2), Shard(1), Shard(1), "none"),
    "heads, causal": ((1, 4, 4, 1), Shard(1), Shard(1), "causal"),
    "heads, a mask of each": ((2, 4, 4, 2), Shard(1), Shard(1), "by head"),
    "groups of heads": ((1, 4, 2, 1), Shard(1), Shard(1), "by head"),
    "one key head, on every rank": ((2, 4, 1, 2), Shard(1), Replicate(), "causal"),
    "batch": ((2, 4, 4, 2), Shard(0), Shard(0), "by head"),
    "keys of one batch entry": ((2, 4, 4, 1), Shard(0), Replicate(), "causal"),
    "three entries": ((3, 4, 4, 3), Shard(0), Shard(0), "causal"),
    "an idle rank": ((1, 4, 4, 1), Shard(0), Shard(0), "causal"),
    "whole": ((2, 4, 2, 2), Replicate(), Replicate(), "by head"),
}


def sharded_attention_is_that_of_the_whole() -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for name, (sizes, of_query, of_key, mask) in SHARDED.items():
        inputs, captured = problem(*sizes)
        weight = normal(*inputs[0].shape, seed=9)
        expected = attend(inputs, captured, mask, weight)
        places = [of_query, of_key, of_key, Replicate(), Replicate()]
        leaves = [
            distribute_tensor(x.detach(), mesh, [place]).requires_grad_()
            for x, place in zip([*inputs, *captured], places, strict=True)
        ]
        whole = distribute_tensor(weight, mesh, [of_query])
        found = attend(leaves[:3], leaves[3:], mask, whole)
        for what, x in expected.items():
            text = f"{name}, {what}"
            torch.testing.assert_close(found[what], x, rtol=1e-4, atol=1e-5, msg=text)


def refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value), str(caught.value)


def what_needs_communication_is_refused() -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))

    def place(x: torch.Tensor, placement: Placement) -> DTensor:
        return distribute_tensor(x.detach(), mesh, [placement])

    (q, k, _), (table, _) = problem(1, 4, 4, 1)
    heads = place(q, Shard(1))
    flex = attnloom.flex_attention

    def reads(bias):
        return lambda score, b, h, q_idx, kv_idx: score + bias[h]

    along = place(q, Shard(2))
    refused(UnsupportedError, "sharded along its length", lambda: flex(along, along, along))
    refused(UnsupportedError, "key is a Tensor", lambda: flex(heads, k, k))
    refused(
        UnsupportedError,
        "they must be placed alike",
        lambda: flex(heads, place(k, Replicate()), place(k, Replicate())),
    )
    sums = DTensor.from_local(q.detach(), mesh, [torch.distributed.tensor.Partial()])
    refused(UnsupportedError, "query is placed as Partial(sum)", lambda: flex(sums, heads, heads))
    refused(
        UnsupportedError,
        "each rank would get the part of its gradient",
        lambda: flex(heads, heads, heads, reads(table)),
    )
    owner = torch.nn.Linear(4, 1)
    refused(
        UnsupportedError,
        "each rank would get the part of its gradient",
        lambda: flex(heads, heads, heads, lambda s, b, h, q, k: s + owner.weight[0, h]),
    )
    refused(
        UnsupportedError,
        "Capture a replicated one",
        lambda: flex(heads, heads, heads, reads(place(table, Shard(0)))),
    )
    plain = q.detach()
    refused(
        TraceError,
        "which is a DTensor",
        lambda: flex(plain, plain, plain, reads(place(table, Replicate()))),
    )
    if distributed.get_world_size() == 2:
        six, three = (place(normal(1, n, S, D), Shard(1)) for n in (6, 3))
        refused(
            ShapeError,
            "2 query heads share a key head",
            lambda: flex(six, three, three, enable_gqa=True),
        )
    by_head = attnloom.BlockMask.from_dense(torch.ones(1, 3, S, S, dtype=torch.bool))
    refused(ShapeError, "made for heads 3", lambda: flex(heads, heads, heads, block_mask=by_head))
    shared = attnloom.create_block_mask(window_by_head, None, None, S, S)
    refused(ShapeError, "depends on h", lambda: flex(heads, heads, heads, block_mask=shared))
    cache = attnloom.PagedKVCache(num_pages=4, page_size=16, num_kv_heads=4, head_dim=D)
    refused(UnsupportedError, "key is a cache", lambda: flex(heads, cache))


def tensor_parallel() -> None:
    sharded_attention_is_that_of_the_whole()
    what_needs_communication_is_refused()


@pytest.mark.slow
def test_case_125_heads_and_batch_are_sharded(tmp_path: Path) -> None:
    """Tensor parallelism failed, as the mask is no DTensor; and mods that look up their head need
    its number in the whole."""
    with group(tmp_path / "store"):
        tensor_parallel()


@pytest.mark.slow
def test_cases_122_and_125_in_two_processes(tmp_path: Path) -> None:
    """In the same two: they take longer to start than the cases to run."""
    in_two_processes(tmp_path, fsdp_gradients_are_those_of_one_process, tensor_parallel)


def test_case_125_a_mask_is_cut_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting a rank's part out of the lists is not done again by every layer and step."""
    from attnloom.api import sharded

    mask = mask_of("by head")
    share = sharded._Share((0, 2), (1, 2))
    query = normal(1, 4, S, D)
    part = sharded._local_mask(mask, query, query, share)
    assert torch.equal(part.to_mask(), attnloom.create_mask(window_by_head, 1, 4, S, S)[:, 2:])
    assert sharded._local_mask(mask, query, query, share) is part
    mask.mask_mod = causal
    assert torch.equal(
        sharded._local_mask(mask, query, query, share).to_mask()[0, 1],
        attnloom.create_mask(causal, 1, 1, S, S)[0, 0],
    )
