"""What the Gluon backend refuses, in words, and what it leaves to the portable kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnloom import UnsupportedError, create_block_mask
from attnloom.backends.gluon import gate
from attnloom.backends.gluon.launch import GluonBackend
from attnloom.backends.registry import AttentionCall
from attnloom.plan.problem import KernelOptions
from tests.kernels.cross_compile import device_is

pytest.importorskip("triton.experimental.gluon")
from attnloom.backends.gluon import launch_forward

BF16 = torch.bfloat16


def call_of(
    *shape: int, dtype: torch.dtype = BF16, backend: str = "auto", width: int = 64
) -> AttentionCall:
    q, k, v = (torch.zeros(*(shape or (4, 16, 512)), width, dtype=dtype) for _ in range(3))
    return AttentionCall(q, k, v, None, None, None, 0.125, KernelOptions(backend=backend))


@pytest.fixture
def hopper(monkeypatch):
    """As on a machine whose device and versions are the ones that were tested."""
    monkeypatch.setattr(gate, "_device", lambda device: None)
    monkeypatch.setattr(gate, "_version", lambda: None)


def test_a_hopper_problem_is_taken(hopper):
    assert gate.refusal(call_of()) is None
    assert gate.call_refusal(call_of()) is None


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (call_of(dtype=torch.float32), "the kernels take one of float16 and bfloat16 for all"),
        (call_of(width=264), "query has head dimension 264; the kernels take 1 to 256"),
        (replace(call_of(), value=call_of(width=320).value), "value has head dimension 320"),
        (replace(call_of(), key=call_of(dtype=torch.float16).key), "bfloat16, torch.float16 and"),
    ],
)
def test_kinds_that_are_refused(hopper, call, text):
    assert text in str(gate.refusal(call))


def test_devices_that_are_refused(monkeypatch):
    gate._device.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert "cuda:0 has compute capability 8.0" in str(gate._device(torch.device("cuda", 0)))
    gate._device.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "are for NVIDIA GPUs" in str(gate._device(torch.device("cuda", 0)))
    gate._device.cache_clear()


@pytest.mark.parametrize(("found", "refused"), [("3.6.0", False), ("3.7.1", True), ("3.5", True)])
def test_versions(monkeypatch, found: str, refused: bool):
    gate._version.cache_clear()
    monkeypatch.setattr("importlib.metadata.version", lambda name: found)
    why = gate._version()
    gate._version.cache_clear()
    assert (why is not None) == refused
    assert why is None or why == f"triton {found} is installed; the kernels were tested with 3.6."


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 16, 512, 67, dtype=BF16)[..., :64],  # rows of 134 bytes
        torch.zeros(4, 16, 512, 72, dtype=BF16)[..., 1:65],  # starts 2 bytes late
        torch.zeros(4, 16, 64, 512, dtype=BF16).mT,  # neighbours are far apart
        torch.zeros(4, 1, 512, 64, dtype=BF16).expand(4, 16, 512, 64),
    ],
    ids=["odd rows", "odd start", "column major", "expanded"],
)
def test_strides_that_tma_cannot_take(tensor):
    call = replace(call_of(), key=tensor)
    assert "TMA cannot read key, whose strides are" in str(gate.call_refusal(call))


def test_strides_of_single_entries_do_not_matter():
    tensor = torch.zeros(1, 1, 512, 64, dtype=BF16).as_strided((1, 1, 512, 64), (3, 5, 64, 1))
    assert gate.call_refusal(replace(call_of(), query=tensor)) is None


def test_small_problems_are_left_to_the_portable_kernels():
    with device_is("sm_90"):
        assert "fewer tiles of queries" in str(launch_forward.forward(call_of(1, 4, 256), False))
        assert "there are few queries" in str(launch_forward._slower(call_of(64, 8, 1)))
        assert "heads are narrower" in str(launch_forward._slower(call_of(4, 16, 4096, width=32)))
        short = replace(call_of(4, 16, 4096), key=call_of(4, 16, 64).key)
        assert "fewer keys than a tile" in str(launch_forward._slower(short))
        assert launch_forward._slower(call_of(4, 16, 4096)) is None
        for width, is_slower in (
            (64, False),
            (96, False),
            (128, False),
            (136, True),
            (160, False),
            (192, False),
            (200, False),
            (256, False),
        ):
            why = launch_forward._slower(call_of(4, 16, 4096, width=width))
            assert (why is not None) == is_slower, f"width {width}: {why}"
        mixed = replace(
            call_of(4, 16, 4096, width=192), value=call_of(4, 16, 4096, width=128).value
        )
        assert "heads are narrower" in str(launch_forward._slower(mixed))


BIAS = torch.zeros(512, 512)
PADDED = torch.zeros(512, 520)[:, :512]
UNEVEN = torch.zeros(512, 511)
BY_DISTANCE = torch.zeros(16, 1024)
SLOPES = torch.zeros(16)
IDS = torch.zeros(512, dtype=torch.int32)
ROWS = torch.zeros(512, 4)


@pytest.mark.parametrize(
    ("score_mod", "is_slower", "without_pieces"),
    [
        (lambda s, b, h, q, kv: s + BIAS[q, kv], False, True),
        (lambda s, b, h, q, kv: s + PADDED[q, kv], False, True),
        (lambda s, b, h, q, kv: s + UNEVEN[q, kv], True, True),
        (lambda s, b, h, q, kv: s + BIAS[kv, q], True, True),
        (lambda s, b, h, q, kv: s + BIAS[q, kv] + BIAS[q, kv // 2], True, True),
        (lambda s, b, h, q, kv: s + BY_DISTANCE[h, q - kv + 511], True, True),
        (lambda s, b, h, q, kv: s + (ROWS[q] * ROWS[kv]).sum(), True, True),
        (lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q), False, False),
        (lambda s, b, h, q, kv: s * ROWS[q, 0] + ROWS[kv, 1], False, False),
        (lambda s, b, h, q, kv: 30 * torch.tanh(s / 30), False, False),
        (lambda s, b, h, q, kv: torch.where(IDS[q] == IDS[kv], s, -1e4), False, False),
    ],
)
def test_mods_that_look_up_each_score_lane_by_lane_are_left_to_the_portable_kernels(
    score_mod, is_slower: bool, without_pieces: bool
):
    """A [B, H, Q, KV] bias took 1.31 times their time lane by lane, less than theirs in pieces.
    without_pieces: where heads are too wide for these."""
    from attnloom.ir.node import DType
    from attnloom.trace.tracer import trace_score

    score = trace_score(score_mod, DType.F32, torch.device("cpu"))
    with device_is("sm_90"):
        for width, expected in ((64, is_slower), (128, is_slower), (256, without_pieces)):
            call = replace(call_of(width=width), score=score)
            assert (launch_forward._slower_mods(call, True) is not None) == expected


def test_elements_come_in_pieces_first():
    """A backend chosen by name has the other forms behind them: a kernel that fits."""
    from attnloom.ir.node import DType
    from attnloom.trace.tracer import trace_score

    def bias(s, b, h, q, kv):
        return s + BIAS[q, kv]

    def capped(s, b, h, q, kv):
        return 30 * torch.tanh(s / 30)

    for score_mod, num_pieces in ((bias, 1), (capped, 0)):
        score = trace_score(score_mod, DType.F32, torch.device("cpu"))
        for width, ahead in ((64, False), (128, True)):
            with device_is("sm_90"):
                auto, named = (
                    launch_forward._in_order(
                        replace(call_of(backend=backend, width=width), score=score), True
                    )
                    for backend in ("auto", "gluon")
                )
            in_pieces = num_pieces * (1 + ahead)  # with named barriers, and without
            assert [form.pieces for form in named[:in_pieces]] == [True] * in_pieces
            assert len(named) > in_pieces
            assert not any(form.pieces for form in named[in_pieces:])
            assert named[0].prefetch == (ahead and num_pieces == 1)
            assert auto == named[:in_pieces] if num_pieces else auto == named


def test_masks_that_look_up_each_score_are_left_to_the_portable_kernels(monkeypatch):
    """Under auto only; what was decided is remembered for each."""
    from attnloom.trace.tracer import trace_mask

    def near(b, h, q, kv):
        return BIAS[q, kv] > 0

    mask = create_block_mask(near, None, None, 512, 512, device="cpu", BLOCK_SIZE=128)
    bound = trace_mask(near, torch.device("cpu"))
    call = replace(call_of(), blocks=mask.lists(), mask=bound)
    chosen: list[str] = []

    def choose(call, tensors, fixed, given):
        chosen.append(call.options.backend)
        return "chosen"

    monkeypatch.setattr(launch_forward, "_ready", {})
    monkeypatch.setattr(launch_forward, "_choose", choose)
    with device_is("sm_90"):
        for _ in range(2):
            assert "for each score" in str(launch_forward.forward(call, False))
            by_name = replace(call, options=KernelOptions(backend="gluon"))
            assert launch_forward.forward(by_name, False) == "chosen"
    assert chosen == ["gluon"]


def test_blocks_that_are_too_small_are_refused_by_name():
    def causal(b, h, q, kv):
        return q >= kv

    mask = create_block_mask(causal, None, None, 512, 512, device="cpu", BLOCK_SIZE=32)
    call = replace(call_of(backend="gluon"), blocks=mask.lists())
    with device_is("sm_90"):
        assert "blocks of the mask are 32 x 32 tokens" in str(launch_forward._refusal(call))


def test_a_backend_chosen_by_name_never_falls_back():
    call = replace(call_of(backend="gluon"), key=torch.zeros(4, 16, 512, 67, dtype=BF16)[..., :64])
    with pytest.raises(UnsupportedError) as caught:
        GluonBackend().forward(call, False)
    assert str(caught.value).startswith("backend 'gluon' cannot run this: TMA cannot read key")
    assert str(caught.value).endswith("Use backend='auto' to let attnloom choose.")


def test_numbers_are_written_into_the_first_kernel_only(monkeypatch):
    from attnloom.ir.node import BoundProgram, DType
    from attnloom.trace.tracer import trace_score

    monkeypatch.setattr(launch_forward, "_first_numbers", {})
    cap = 30.0
    bound = trace_score(
        lambda s, b, h, q, kv: cap * torch.tanh(s / cap), DType.F32, torch.device("cpu")
    )
    call = replace(call_of(), score=bound)
    assert launch_forward.has_first_numbers(call)
    assert bound.numbers
    other = BoundProgram(bound.program, bound.tensors, tuple(n + 1 for n in bound.numbers))
    assert not launch_forward.has_first_numbers(replace(call, score=other))
    assert launch_forward.has_first_numbers(call)
