"""Launches of repeated calls, without a device: kernels are given what ordinary calls give them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")

from attnloom import AuxRequest, create_block_mask, flex_attention  # noqa: E402
from attnloom.api import repeats  # noqa: E402
from attnloom.backends.triton import again, beside, choice, launcher  # noqa: E402
from benchmarks.pretended import Gpu, Launch, hopper  # noqa: E402
from tests.kernels.gluon_triton import needs_gluon  # noqa: E402

BF16 = torch.bfloat16
S = 256


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with hopper(records=True) as found:
        yield found


def tensors(q_len: int = S, kv_heads: int = 2, D: int = 64) -> list[torch.Tensor]:
    sizes = ((1, 2, q_len, D), (1, kv_heads, S, D), (1, kv_heads, S, D))
    return [torch.zeros(size, dtype=BF16) for size in sizes]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def of_documents() -> Any:
    ids = torch.arange(S) // 100
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])


def alibi() -> Any:
    slopes = torch.tensor([0.5, 0.25])
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def softcap() -> Any:
    cap = 30.0
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


MODS: dict[str, tuple[Callable[[], Any], Any]] = {
    "full": (lambda: None, None),
    "causal": (lambda: None, causal),
    "alibi": (alibi, causal),
    "softcap": (softcap, None),
    "documents": (lambda: None, of_documents()),
}


class Step:
    """A call with an auxiliary output, its backward, and what the driver was given."""

    def __init__(self, gpu: Gpu, mods: str, backend: str, q_len: int = S, grad: bool = True):
        self.gpu, self.grad, self.backend = gpu, grad, backend
        make, mask_mod = MODS[mods]
        self.make = make
        sizes = (None, None, q_len, S)
        self.mask = mask_mod and create_block_mask(mask_mod, *sizes, device="cpu")

    def __call__(self, inputs: list[torch.Tensor]) -> tuple[list[Launch], list[torch.Tensor]]:
        """The launches, and the results that the caller sees."""
        self.gpu.started.clear()
        leaves = [t.requires_grad_(self.grad) for t in inputs]
        out, aux = flex_attention(
            *leaves, self.make(), self.mask, kernel_options={"backend": self.backend},
            return_aux=AuxRequest(lse=True, max_scores=True), enable_gqa=True,
        )  # fmt: skip
        results = [out, aux.lse, aux.max_scores]
        if self.grad:
            results += torch.autograd.grad(out, leaves, torch.zeros_like(out))
        return list(self.gpu.started), results


def assert_alike(one: list[Launch], other: list[Launch], names: dict[int, int]) -> None:
    """Equal kernels, grids and parameters. Addresses may differ where both are of fresh memory, or
    of inputs and results (names: address of one -> of the other), each always by the same one."""
    assert [(x.kernel, x.grid) for x in one] == [(x.kernel, x.grid) for x in other]
    for a, b in zip(one, other, strict=True):
        for mine, theirs in zip(a.parameters, b.parameters, strict=True):
            if mine != theirs:
                assert len(mine) in (8, 128) and mine[8:] == theirs[8:]
                pair = [int.from_bytes(x[:8], "little") for x in (mine, theirs)]
                assert names.setdefault(pair[0], pair[1]) == pair[1], a.kernel
    assert len(set(names.values())) == len(names)


def places(values: list[torch.Tensor]) -> list[int]:
    return [t.data_ptr() for t in values]


@pytest.mark.parametrize("backend", ["triton", "gluon"])
@pytest.mark.parametrize("mods", list(MODS))
def test_a_repeated_step_gives_kernels_what_an_ordinary_one_does(
    gpu: Gpu, mods: str, backend: str
) -> None:
    _skip_other_gluon(backend)
    compare(gpu, Step(gpu, mods, backend), tensors)


def _skip_other_gluon(backend: str) -> None:
    if backend == "gluon":
        needs_gluon(also=True)


@pytest.mark.parametrize("mods", ["full", "documents"])
@pytest.mark.parametrize("heads", [2, 1])
def test_decode(gpu: Gpu, mods: str, heads: int) -> None:
    """Split keys, and the merging kernel."""
    if mods == "documents":
        ids = torch.arange(S) // 100
        MODS["last"] = lambda: None, lambda b, h, q, kv: ids[kv] == 2
        mods = "last"
    step = Step(gpu, mods, "triton", q_len=1, grad=False)
    compare(gpu, step, lambda: tensors(1, heads))


@pytest.mark.parametrize(
    ("backend", "mods", "main"),
    [
        ("triton", "causal", "row_kernel"),
        ("gluon", "softcap", "wide_kernel"),
        ("gluon", "full", "roles_kernel"),
        ("gluon", "causal", "roles_kernel"),
        ("gluon", "documents", "roles_kernel"),
    ],
)
def test_heads_in_three_chunks(gpu: Gpu, backend: str, mods: str, main: str) -> None:
    """dk and dv apart: in portable kernels, and dk beside dq in one of Gluon's; and all in one."""
    _skip_other_gluon(backend)
    step = Step(gpu, mods, backend)
    compare(gpu, step, lambda: tensors(D=192))
    launched = [launch.kernel for launch in step(tensors(D=192))[0]]
    assert main in launched


def compare(gpu: Gpu, step: Step, make: Callable[[], list[torch.Tensor]]) -> None:
    """Of other tensors, a repeated step and one that is not looked up."""
    kept = []
    for _ in range(4):
        kept.append(make())
        step(kept[-1])
    inputs = make()
    with mock.patch.object(launcher.Launcher, "__call__", side_effect=AssertionError):
        repeated, shown = step(inputs)
    others = make()
    with mock.patch.object(repeats, "key_of", lambda _: None):
        ordinary, expected = step(others)
    assert [(t.shape, t.dtype, t.stride()) for t in shown] == [
        (t.shape, t.dtype, t.stride()) for t in expected
    ]
    names = dict(zip(places([*inputs, *shown]), places([*others, *expected]), strict=True))
    assert_alike(repeated, ordinary, names)


def test_the_same_tensor_three_times(gpu: Gpu) -> None:
    """Which argument came from where is not told by identity."""
    same, (q, k, v) = tensors()[0], tensors()
    for _ in range(4):
        flex_attention(same, same, same, kernel_options={"backend": "gluon"})
    gpu.started.clear()
    flex_attention(q, k, v, kernel_options={"backend": "gluon"})
    maps = [p for p in gpu.started[0].parameters if len(p) == 128]
    assert [int.from_bytes(m[:8], "little") for m in maps[:3]] == places([q, k, v])


def test_what_a_repeated_launch_does_not_fit_goes_the_ordinary_way(gpu: Gpu) -> None:
    """Addresses that are no multiples of 16, ids that become large, and somebody who listens."""
    ids = torch.arange(S) // 100
    mask = create_block_mask(causal, None, None, S, S, device="cpu")
    ordinary, seen = launcher.Launcher.__call__, []

    def noted(self: launcher.Launcher, *args: Any) -> None:
        seen.append(launcher.is_watched())
        if not launcher.is_watched():
            ordinary(self, *args)

    def run(inputs: list[torch.Tensor]) -> list[bool]:
        seen.clear()
        flex_attention(
            *inputs, lambda s, b, h, q, kv: s + ids[kv], mask, kernel_options={"backend": "triton"}
        )
        return list(seen)

    with mock.patch.object(launcher.Launcher, "__call__", noted):
        assert [run(tensors()) for _ in range(5)] == [[False]] * 3 + [[]] * 2
        room = torch.zeros(2 * S * 64 + 1, dtype=BF16)
        assert run([room[1:].view(1, 2, S, 64), *tensors()[1:]]) == [False]
        with mock.patch.object(launcher.knobs.runtime, "launch_enter_hook", print):
            assert run(tensors()) == [True]
        assert run(tensors()) == []
        ids += 2**40
        assert run(tensors()) == [False]


def test_the_stream_is_that_of_the_moment(gpu: Gpu) -> None:
    inputs = tensors()
    streams = [0, 0, 0, 7, 9]
    for gpu.stream in streams:
        flex_attention(*inputs, kernel_options={"backend": "triton"})
    assert [launch.stream for launch in gpu.started] == streams


def test_descriptors_are_made_once_an_address(gpu: Gpu) -> None:
    layers = [tensors() for _ in range(5)]

    def model() -> int:
        before = gpu.encoded
        for inputs in layers:
            flex_attention(*inputs, kernel_options={"backend": "triton"})
        return gpu.encoded - before

    first = [model() for _ in range(3)]
    assert max(first) > 0 and [model(), model()] == [0, 0]


def test_nothing_outlives_a_mask(gpu: Gpu) -> None:
    step = Step(gpu, "documents", "triton")
    for _ in range(4):
        step(tensors())
    gone = weakref.ref(step.mask), weakref.ref(step.mask.lists().entries)
    from attnloom.masking import reuse

    reuse.forget()
    del step
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_nothing_is_prepared_while_a_graph_is_captured(gpu: Gpu) -> None:
    """Lists that are derived then are filled by its replay alone, but would have served every later
    call of a model whose layers share a mask."""
    step = Step(gpu, "causal", "triton")
    with mock.patch("attnloom.api.launch.may_keep", lambda _: False):
        for _ in range(3):
            step(tensors())
    (bucket,) = repeats._buckets.values()
    kept = bucket.seen[0].launch.again
    assert kept is not None
    assert not kept.forwards and not kept.backwards
    step(tensors())
    assert len(kept.forwards) == len(kept.backwards) == 1


@pytest.mark.parametrize("captures", [True, False])
def test_a_graph_kept_smaller_blocks_of_ids_that_changed_before_its_replay(captures: bool) -> None:
    """Gradients were wrong: only the given blocks hold whatever the ids are."""
    ids, start = torch.arange(S), mock.Mock()
    kept = object.__new__(again.BackwardAgain)
    kept._blanks, kept._starts = (again._blank(ids),) * 3, (start,)
    kept._device, kept._narrow, kept._no_captured = 0, (), ()
    kept._of_mask = ((0, weakref.ref(ids), ids._version),)
    with (
        mock.patch.object(again, "_as_expected", lambda *_: True),
        mock.patch.object(again, "stream_of", lambda _: 0),
        mock.patch.object(again, "is_capturing", lambda _: captures),
    ):
        found = kept((ids,), (ids,))
    assert (found is None) == captures
    assert start.call_count == (0 if captures else 1)


def test_saved_tensors_that_come_back_with_other_strides(gpu: Gpu) -> None:
    """As torch.autograd.graph.save_on_cpu gives them back."""
    mask = create_block_mask(causal, None, None, S, S, device="cpu")

    def step() -> list[Launch]:
        x = [torch.zeros(1, S, 2, 64, dtype=BF16).transpose(1, 2).requires_grad_() for _ in "qkv"]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t, lambda t: t.contiguous() if hooked else t
        ):
            out = flex_attention(*x, None, mask, kernel_options={"backend": "triton"})
            gpu.started.clear()
            torch.autograd.grad(out, x, torch.zeros_like(out))
        return list(gpu.started)

    hooked = False
    for _ in range(4):
        plain = step()
    hooked = True
    steps = [step() for _ in range(4)]
    strides = [[p for p in launch.parameters if len(p) == 4] for launch in plain]
    others = [[[p for p in launch.parameters if len(p) == 4] for launch in s] for s in steps]
    assert strides != others[0] and others == [others[0]] * 4


def test_a_full_memory_of_launches_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_KEPT", 2)
    memory: dict[tuple[Any, ...], Any] = {}
    for number in range(3):
        choice.keep(memory, (number,), f"launch {number}")
    assert memory == {(2,): "launch 2"}


@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_statistics_that_nobody_reads_lie_in_memory_that_stays(gpu: Gpu, backend: str) -> None:
    """Outputs are their own, lse is where every such call has it, and never where one is read."""
    _skip_other_gluon(backend)
    options: Any = {"backend": backend}
    q, k, v = tensors()
    with torch.no_grad():
        for _ in range(4):
            flex_attention(q, k, v, kernel_options=options)
            beside.wait_for_all()  # for the form that takes over
        seen = []
        for _ in range(3):
            gpu.started.clear()
            out = flex_attention(q, k, v, kernel_options=options)
            (launch,) = gpu.started
            words = [int.from_bytes(p[:8], "little") for p in launch.parameters if len(p) >= 8]
            seen.append((out, set(words)))
        unread = again.unread_rows(torch.empty(1))
        assert unread is not None
        for out, words in seen:
            assert unread in words and out.data_ptr() in words
        assert len({out.data_ptr() for out, _ in seen}) == 3
        gpu.started.clear()
        _, aux = flex_attention(
            q, k, v, kernel_options=options, return_aux=AuxRequest(lse=True)
        )  # fmt: skip
        (launch,) = gpu.started
        words = {int.from_bytes(p[:8], "little") for p in launch.parameters if len(p) >= 8}
        assert aux.lse is not None and aux.lse.data_ptr() in words and unread not in words


def test_more_statistics_than_there_is_room_for_have_memory_of_their_own() -> None:
    row = torch.zeros(1)
    assert again.unread_rows(row.expand(2**18)) == again.unread_rows(row)
    assert again.unread_rows(row.expand(2**18 + 1)) is None
