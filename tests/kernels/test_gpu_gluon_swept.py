"""Programs of the Hopper backward for masks whose queries see few keys, against the oracle; `pytest
-m gpu`. Each test is a process that can be given up: a barrier may never come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.harness.case import Case
from tests.harness.draw import Sizes
from tests.kernels.apart import apart
from tests.kernels.hopper import ON_HOPPER

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=4, Q_LEN=700, KV_LEN=700, D=64, Dv=64)

pytestmark = ON_HOPPER


@contextlib.contextmanager
def swept(programs: int) -> Iterator[None]:
    """Inside, so many programs of a backward sweep over all heads."""
    from attnloom.backends.gluon import few_keys, ready_backward

    with (
        mock.patch.object(ready_backward, "_ready", {}),
        mock.patch.object(few_keys, "_MOST_KEYS", 1 << 30),
        mock.patch.object(few_keys, "_MOST_KEYS_OF_FEW", 1 << 30),
        mock.patch.object(few_keys, "_fills", lambda heads, device: True),
        mock.patch.object(ready_backward, "programs_of", lambda form, key: programs),
    ):
        yield
        assert all(ready.finish is None for ready in ready_backward._ready.values())
        assert ready_backward._ready


@contextlib.contextmanager
def not_swept(programs: int) -> Iterator[None]:
    """Inside, so many programs draw tiles of few steps, whose results leave late."""
    from attnloom.backends.gluon import few_keys, ready_backward

    with (
        mock.patch.object(ready_backward, "_ready", {}),
        mock.patch.object(few_keys, "sweeps", lambda call: False),
        mock.patch.object(ready_backward, "programs_of", lambda form, key: programs),
    ):
        yield
        found = [ready.main.config for ready in ready_backward._ready.values()]
        assert found
        assert all(cfg.LEAVES_LATE and cfg.ROWS_APART and not cfg.SWEEPS for cfg in found)


WAYS = {"swept": swept, "not swept": not_swept}


def check(case: Case, programs: int = 3, way: str = "swept") -> None:
    from tests.kernels.gluon_backward import check_gradients

    with WAYS[way](programs):
        check_gradients(replace(case, block_size=128))


def check_mod(mod: str, head_dim: int, value_dim: int, fp16: bool) -> None:
    sizes = replace(SIZES, D=head_dim, Dv=value_dim)
    check(Case(mod, sizes, FP16 if fp16 else BF16))


_MODS = (
    "causal",
    "document",
    "document_unsorted_per_batch",
    "window_with_sinks",
    "every_second_row",
    "dilated_by_head",
)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (96, 128), (48, 64)])
@pytest.mark.parametrize("mod", _MODS)
def test_mods(mod: str, head_dim: int, value_dim: int) -> None:
    apart(check_mod, mod, head_dim, value_dim, _MODS.index(mod) % 2 == 1)


def check_lengths(head_dim: int) -> None:
    """One program has all heads, or each of more than there are one or none."""
    for programs in (1, 64):
        for q_len, kv_len in ((1, 1), (1, 200), (63, 1), (129, 257), (17, 1000), (1000, 17)):
            sizes = replace(SIZES, Q_LEN=q_len, KV_LEN=kv_len, D=head_dim, Dv=head_dim)
            check(Case("causal", sizes, BF16), programs)


def check_documents(way: str, mod: str, head_dim: int) -> None:
    """In steps of 64 queries, those left out that see nothing of a tile, where enough are."""
    from attnloom.backends.gluon import few_keys, launch_backward

    blocks = []

    def finer(call):
        found = few_keys.finer(call)
        blocks.append(found.blocks.q_block)
        return found

    for length, programs in ((700, 1), (700, 7), (1024, 7)):
        sizes = replace(SIZES, Q_LEN=length, KV_LEN=length, D=head_dim, Dv=128)
        with mock.patch.object(launch_backward, "finer", finer):
            check(Case(mod, sizes, FP16 if head_dim == 96 else BF16), programs, way)
    assert (64 in blocks) == (mod == "document")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mod", ["document", "document_unsorted_per_batch"])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_documents(way: str, mod: str, head_dim: int) -> None:
    apart(check_documents, way, mod, head_dim)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(head_dim: int) -> None:
    apart(check_lengths, head_dim)


def check_repeats(head_dim: int) -> None:
    """All gradients are bitwise the same each time, on two streams too."""
    from tests.kernels.gluon_backward import repeated

    ids = torch.arange(1000, device="cuda") // 170
    with swept(50):
        first, *others = repeated(
            lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx]), head_dim
        )
    for results in others:
        assert all(torch.equal(x, y) for x, y in zip(results, first, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_repeats(head_dim: int) -> None:
    apart(check_repeats, head_dim)


def check_changing_ids(way: str) -> None:
    """Smaller blocks follow from the ids, in calls that repeat earlier ones as well. A graph asks
    nobody when it is replayed, and keeps the given blocks."""
    import attnloom
    from attnloom.backends.reference import reference_attention
    from tests.harness.agree import close, qkv

    torch.set_default_device("cuda")
    length = 1500
    ids = torch.arange(length) // 130

    def mask_mod(b, h, q, kv):
        return ids[q] == ids[kv]

    place = torch.arange(-(-length // 128))
    near = (place[:, None] - place).abs() < 3
    mask = attnloom.BlockMask.from_block_bool(near, None, 128, mask_mod, (length, length))
    leaves = qkv(2, 4, length, 128, dtype=BF16)
    dout = torch.ones_like(leaves[0])

    def gradients() -> tuple[torch.Tensor, ...]:
        options = {"backend": "gluon"}
        out = attnloom.flex_attention(*leaves, block_mask=mask, kernel_options=options)
        return torch.autograd.grad(out, leaves, dout)

    def compare(found: tuple[torch.Tensor, ...]) -> None:
        out = reference_attention(*leaves, None, mask_mod, None)[0]
        for mine, wanted in zip(found, torch.autograd.grad(out, leaves, dout), strict=True):
            close(mine, wanted, BF16)

    with WAYS[way](8):
        for _ in range(4):
            compare(gradients())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gradients()
        for shift in (0, 64, 100):
            ids.copy_((torch.arange(length) + shift) // 130)
            graph.replay()
            compare(captured)
            for _ in range(4):
                compare(gradients())


@pytest.mark.parametrize("way", WAYS)
def test_ids_that_change_inside_blocks_that_the_caller_chose(way: str) -> None:
    apart(check_changing_ids, way)
