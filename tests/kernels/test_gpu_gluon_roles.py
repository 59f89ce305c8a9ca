"""The Gluon backward of heads of 129 to 192 whose one kernel has dq, dk and dv, on a Hopper GPU
against the oracle; `pytest -m gpu`.

Each in a process that can be given up: barriers that were waited for in vain would hold all others.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.harness.case import Case
from tests.harness.draw import Sizes
from tests.kernels.apart import apart

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=150, KV_LEN=290, D=192, Dv=192)
OPTIONS = {"backend": "gluon"}
OWN_KEYS = replace(SIZES, Hkv=4)


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _is_hopper(), reason="needs a Hopper GPU"),
]


def check(*cases: Case) -> None:
    from attnloom.backends.gluon import launch_roles
    from tests.kernels.gluon_backward import check_gradients

    for case in cases:
        ran = mock.Mock(wraps=launch_roles.backward)
        with (
            mock.patch.object(launch_roles, "FEW_SPILLS", 1 << 20),
            mock.patch.object(launch_roles, "backward", ran),
        ):
            check_gradients(case)
        assert ran.called, str(case)


@pytest.mark.parametrize("half", [False, True], ids=["bf16", "fp16"])
def test_mods(half: bool) -> None:
    """Documents are looked up; rows without a key; masks without a block."""
    apart(check_mods, half, limit=300.0)


def check_mods(half: bool) -> None:
    dtype = FP16 if half else BF16
    mods = "plain", "causal", "document", "window_with_sinks", "every_second_row", "nothing"
    check(*(Case(mod, SIZES, dtype, block_size=128) for mod in mods))
    check(Case("dilated_by_head", OWN_KEYS, dtype, block_size=128))


def test_head_dims() -> None:
    apart(check_head_dims, limit=300.0)


def check_head_dims() -> None:
    dims = (192, 128), (136, 192), (160, 160), (192, 64), (144, 24)
    check(
        *(
            Case("causal", replace(SIZES, D=D, Dv=Dv), BF16, scale=-0.3, block_size=128)
            for D, Dv in dims
        )
    )


def test_lengths() -> None:
    apart(check_lengths, limit=300.0)


def check_lengths() -> None:
    """Keys that end in the first, second and third piece of a tile, and with one."""
    lengths = (1, 1), (1, 63), (63, 1), (129, 257), (17, 1000), (1000, 17), (200, 96), (65, 160)
    for mod in ("plain", "causal"):
        for q_len, kv_len in lengths:
            sizes = replace(SIZES, Q_LEN=q_len, KV_LEN=kv_len)
            check(Case(mod, sizes, BF16, block_size=128))


def test_scores_that_overflow_where_keys_end() -> None:
    apart(check_overflow)


def check_overflow() -> None:
    """exp(0 - lse) is infinite there."""
    for mod in ("plain", "causal", "every_second_row"):
        check(Case(mod, SIZES, BF16, magnitude=30.0, block_size=128))


def test_blocks_larger_than_tiles_and_keys_of_one_batch_entry() -> None:
    apart(check_blocks, limit=200.0)


def check_blocks() -> None:
    """Queries of the last block may be past the lines of their head."""
    sizes = replace(SIZES, Q_LEN=700, KV_LEN=600)
    for block_size in ((64, 128), (512, 256)):
        check(Case("sliding_window", sizes, BF16, block_size=block_size))
    check(
        Case("causal", replace(SIZES, B=3), BF16, kv_batch=1, block_size=128),
        Case("causal", SIZES, BF16, layout="transposed", block_size=128),
    )


def gradients_of(leaves: list[torch.Tensor], dout: torch.Tensor, mask) -> tuple:
    import attnloom

    out = attnloom.flex_attention(*leaves, block_mask=mask, kernel_options=OPTIONS)
    return torch.autograd.grad(out, leaves, dout)


def check_call(leaves: list[torch.Tensor], dout: torch.Tensor, mask, seen: torch.Tensor) -> None:
    """Behind a portable forward, whatever the size of the problem."""
    import attnloom
    from attnloom.backends.gluon import launch_roles
    from tests.kernels.gluon_backward import gluon_backward

    ran = mock.Mock(wraps=launch_roles.backward)
    with gluon_backward(), mock.patch.object(launch_roles, "backward", ran):
        options = {"backend": "triton"}
        out = attnloom.flex_attention(*leaves, block_mask=mask, kernel_options=options)
        found = torch.autograd.grad(out, leaves, dout)
    assert ran.called, "other kernels ran"
    compare(found, leaves, dout, seen)


def drawn(batch: int, heads: int, length: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    size, like = (batch, heads, length, 192), {"dtype": BF16, "device": "cuda"}
    *leaves, dout = (torch.randn(size, generator=draw, **like) for _ in range(4))
    return [x.requires_grad_() for x in leaves], dout


def compare(found: tuple, leaves: list[torch.Tensor], dout: torch.Tensor, seen) -> None:
    """With the gradients in float64 of attention to what is seen, [B or 1, 1, Q_LEN, KV_LEN]."""
    query, key, value = (x.detach().double().requires_grad_() for x in leaves)
    scores = query @ key.mT / query.size(3) ** 0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(3).nan_to_num(0.0)
    wanted = torch.autograd.grad(weights @ value, (query, key, value), dout.double())
    for name, mine, theirs in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        error = (mine.double() - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
        assert error < 4e-3, f"{name}: {error:.1e}"


def test_blocks_say_what_is_seen() -> None:
    apart(check_blocks_alone)


def check_blocks_alone() -> None:
    """A tile of 96 keys has parts of two blocks: one that is live and one that is not, or one that
    is full and one that is partial. The mask_mod holds where there is no block, and does not in
    full ones."""
    import attnloom

    length = 1024  # full blocks past the last key ask the mask_mod
    leaves, dout = drawn(2, 2, length)
    place = torch.arange(8, device="cuda")
    kind = (place[:, None] + 2 * place) % 3  # 0 dead, 1 partial, 2 full
    rows, keys = torch.arange(length, device="cuda")[:, None], torch.arange(length, device="cuda")
    of_block = kind[rows // 128, keys // 128]
    for mask_mod, holds in (
        (lambda b, h, q, kv: (q + kv) % 3 != 0, (rows + keys) % 3 != 0),
        (None, torch.ones(1, 1, dtype=torch.bool, device="cuda")),
    ):
        mask = attnloom.BlockMask.from_block_bool(
            kind != 0, kind == 2, 128, mask_mod, (length, length)
        )
        check_call(leaves, dout, mask, (of_block == 2) | (of_block == 1) & holds)


def test_masks_by_batch_entry_in_repeated_calls_on_two_streams_and_in_a_graph() -> None:
    apart(check_repeated, limit=200.0)


def check_repeated() -> None:
    """dk and dv bit for bit; dq is a sum in no order. Later calls write addresses alone, and a
    graph derives the lists of its mask when it is replayed."""
    import attnloom
    from attnloom.backends.gluon import launch_roles

    length = 700
    leaves, dout = drawn(2, 4, length)
    starts = torch.tensor([0, 300], device="cuda")

    def mask_of() -> attnloom.BlockMask:
        return attnloom.create_block_mask(
            lambda b, h, q, kv: (q >= kv) & (kv >= starts[b]), 2, None, length, length, "cuda"
        )

    place = torch.arange(length, device="cuda")
    seen = (place[:, None] >= place) & (place >= starts[:, None, None, None])
    mask = mask_of()
    ran = mock.Mock(wraps=launch_roles.backward)
    with mock.patch.object(launch_roles, "backward", ran):
        first = gradients_of(leaves, dout, mask)
        assert ran.called
        compare(first, leaves, dout, seen)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        later = []
        before = ran.call_count
        for turn in range(20):
            with torch.cuda.stream(streams[turn % 2]):
                later.append(gradients_of(leaves, dout, mask))
        torch.cuda.synchronize()
        assert ran.call_count < before + 20, "no call was started anew with other addresses"
        fresh = mask_of()  # whose lists for keys nobody has derived yet
        query, key, value = (x.detach() for x in leaves)
        attnloom.flex_attention(query, key, value, block_mask=fresh, kernel_options=OPTIONS)
        # leaves that no stream has seen: autograd remembers that of their first use
        own = [x.detach().clone().requires_grad_() for x in leaves]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = gradients_of(own, dout, fresh)
        for gradient in recorded:
            gradient.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        later.append(recorded)
    for found in later:
        assert torch.equal(found[1], first[1]) and torch.equal(found[2], first[2])
        compare(found, leaves, dout, seen)


def test_weights_of_long_rows_keep_their_digits() -> None:
    apart(check_long_rows)


def check_long_rows() -> None:
    """Steps of float16 below 2^-14 are 2^-24: weights of 2^-17 would keep seven bits."""
    draw = torch.Generator("cuda").manual_seed(0)
    like = {"generator": draw, "dtype": BF16, "device": "cuda"}
    query, dout = (torch.randn(1, 1, 64, 192, **like) for _ in range(2))
    key, value = (torch.randn(1, 1, 1 << 17, 192, **like) for _ in range(2))
    leaves = [x.requires_grad_() for x in (query * 0.05, key, value)]
    check_call(leaves, dout, None, torch.ones(1, 1, dtype=torch.bool, device="cuda"))
