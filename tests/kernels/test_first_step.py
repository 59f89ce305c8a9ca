"""Kernels of a first forward and backward on a Hopper GPU: compiled beside each other, in threads,
and no other than those that are launched."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import attnloom
from attnloom.backends.triton.launcher import Launcher

triton = pytest.importorskip("triton")
if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 6):
    pytest.skip("the Gluon kernels are for Triton 3.6", allow_module_level=True)

# ruff: noqa: E402
from attnloom.backends.gluon import backward_ahead, first_call, launch_wide
from attnloom.backends.triton import beside
from attnloom.backends.triton.launch import backward_launches
from benchmarks import prewarm
from benchmarks.signatures import type_of

HEADS, LENGTH = 4, 4096
SLOPES = torch.full((HEADS,), 0.5)


def causal(b, h, q, kv):
    return q >= kv


def alibi(score, b, h, q, kv):
    return score + SLOPES[h] * (kv - q)


LEARNED = torch.full((HEADS,), 0.5, requires_grad=True)


def learned_alibi(score, b, h, q, kv):
    return score + LEARNED[h] * (kv - q)


def capped_alibi(score, b, h, q, kv):
    return 30 * torch.tanh(alibi(score, b, h, q, kv) / 30)


class Compiler:
    """In place of Triton: what was compiled, by whom, and what was launched."""

    def __init__(self) -> None:
        self.compiled: dict[Any, threading.Thread] = {}
        self.launched: list[Any] = []
        self.prepared = threading.Event()  # portable kernels, for one that may spill

    def compile(self, launch: Launcher, args: tuple[object, ...]) -> Any:
        kind = launch.kernel.__name__, launch.config, tuple(type_of(a) for a in args)
        self.compiled.setdefault(kind, threading.current_thread())
        if launch.kernel.__name__ in self.spilling:  # not on disk
            beside._thread.read.set()
            assert self.prepared.wait(60), "nothing was prepared for a kernel that may spill"
        return mock.Mock(asm={"cubin": b""})

    def launch(self, launch: Launcher, aligned: bool, *args: object) -> None:
        kind = launch.kernel.__name__, launch.config, tuple(type_of(a) for a in args)
        self.launched.append(kind)
        launch.spills = self.spills_of(launch.kernel.__name__)

    spilling: frozenset[str] = frozenset()

    def prepare(self, *args: Any) -> Any:
        launches = backward_launches(*args)
        self.prepared.set()
        return launches

    def spills_of(self, name: str) -> int:
        return 100 if name in self.spilling else 0

    def names(self) -> list[str]:
        return sorted(name for name, _, _ in self.compiled)


@contextmanager
def installed(compiler: Compiler) -> Iterator[None]:
    patches = [
        prewarm.without_a_device(),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: False),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, create=True),
        mock.patch.object(Launcher, "compile", lambda self, args: compiler.compile(self, args)),
        mock.patch.object(Launcher, "__call__", lambda self, *args: compiler.launch(self, *args)),
        mock.patch.object(backward_ahead, "backward_launches", compiler.prepare),
        mock.patch.object(
            backward_ahead, "spills_of", lambda _: max(map(compiler.spills_of, compiler.spilling))
        ),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        beside._met.clear()
        yield
        beside.wait_for_all()


def inputs(
    head_dim: int, grad: bool = True, groups: int = 4, length: int = LENGTH
) -> list[torch.Tensor]:
    """groups: 1: one head of keys, and one batch entry, for all query heads."""
    batch = groups
    sizes = [(batch, length, n, head_dim) for n in (HEADS, groups, groups)]
    # heads lie as a projection leaves them
    laid = (torch.empty(size, dtype=torch.bfloat16).transpose(1, 2) for size in sizes)
    return [x.requires_grad_(grad) for x in laid]


def step(head_dim: int, score_mod: Any, compiler: Compiler, groups: int = 4, **kwargs: Any):
    """Kernels by name that were compiled before the backward."""
    mask = attnloom.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    with installed(compiler):
        out = attnloom.flex_attention(
            *inputs(head_dim, groups=groups), score_mod=score_mod, block_mask=mask, **kwargs
        )
        beside.wait_for_all()
        ahead = compiler.names()
        out.backward(torch.empty_like(out))
    return ahead


GLUON = ["backward_kernel", "finish_kernel", "forward_kernel", "prepare_kernel"]
WIDE = ["delta_kernel", "finish_kernel", "forward_kernel", "key_kernel", "wide_kernel"]
ROLES = ["finish_kernel", "forward_kernel", "prepare_kernel", "roles_kernel"]
PORTABLE = ["delta_kernel", "key_kernel", "row_kernel"]


@pytest.mark.parametrize("score_mod", [None, alibi, capped_alibi])
@pytest.mark.parametrize(("head_dim", "names"), [(64, GLUON), (128, GLUON), (192, WIDE)])
def test_a_step_compiles_what_it_launches_and_before_it_does(
    head_dim: int, names: list[str], score_mod: Any
):
    compiler = Compiler()
    names = ROLES if names is WIDE and score_mod is None else names
    assert step(head_dim, score_mod, compiler) == names
    assert sorted(name for name, _, _ in compiler.launched) == names
    assert set(compiler.launched) == set(compiler.compiled)
    assert threading.main_thread() not in compiler.compiled.values()


def test_captured_gradients_have_their_memory_before_their_kernel():
    """What stands beside the main kernel is compiled ahead."""
    compiler = Compiler()
    assert step(64, learned_alibi, compiler) == sorted(set(GLUON) - {"backward_kernel"})
    assert sorted(name for name, _, _ in compiler.launched) == GLUON
    assert set(compiler.compiled) <= set(compiler.launched)


def test_a_backward_that_spills_has_its_portable_kernels_compiled_too():
    compiler = Compiler()
    compiler.spilling = frozenset({"backward_kernel"})
    assert step(128, capped_alibi, compiler) == sorted(GLUON + PORTABLE)
    assert set(compiler.launched) == set(compiler.compiled)


def test_one_kernel_for_wide_heads_has_others_compiled_too_if_it_spills():
    """Under a mask that looks something up."""
    ids = torch.arange(LENGTH) // 100
    compiler = Compiler()
    compiler.spilling = frozenset({"roles_kernel"})
    expected = launch_wide.expected_launches

    def prepared(operands):
        launches = expected(operands)
        compiler.prepared.set()
        return launches

    mask = attnloom.create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), None, None, LENGTH, LENGTH, "cpu"
    )
    with installed(compiler), mock.patch.object(launch_wide, "expected_launches", prepared):
        query, key, value = inputs(192)
        out = attnloom.flex_attention(query, key, value, block_mask=mask)
        beside.wait_for_all()
        ahead = compiler.names()
        out.backward(torch.empty_like(out))
    # the kernel that puts dq in order has two forms: one waits for the kernel before
    assert ahead == sorted([*WIDE, "finish_kernel", "prepare_kernel", "roles_kernel"])
    assert set(compiler.launched) == set(compiler.compiled)


def test_kernels_on_disk_have_none_prepared_beside_them(monkeypatch):
    """They are there at once, and what spills is rare."""
    compiler = Compiler()
    monkeypatch.setattr(Compiler, "prepare", lambda *_: pytest.fail("portable kernels"))
    assert step(128, capped_alibi, compiler) == GLUON


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_prepared_for_one_that_may_spill_held_the_callers_memory(fails: bool):
    """As long as the job was remembered, which without a backward is until the next one."""
    job = mock.Mock(read=threading.Event(), made=Future())
    job.read.set()
    x = torch.empty(1)
    held = weakref.ref(x)
    backward_ahead._compile_if_spilled(job, lambda x=x: [(mock.Mock(), (x,))])
    del x
    if fails:
        job.made.set_exception(RuntimeError())
    else:
        with mock.patch.object(backward_ahead, "spills_of", lambda _: 0):
            job.made.set_result(mock.Mock(asm={"cubin": b""}))
    assert held() is None


def test_a_job_that_began_beside_another_was_forgotten(monkeypatch):
    """Nobody waited for it, so that the launch compiled the same once more."""
    other = threading.Thread(target=beside.compile_for_later)

    class Jobs(list):  # type: ignore[type-arg]
        def __setitem__(self, *given: Any) -> None:
            if other.ident is None:
                other.start()
                other.join(0.2)
            super().__setitem__(*given)

    monkeypatch.setattr(beside, "_jobs", Jobs())
    monkeypatch.setattr(beside, "Job", lambda _: mock.Mock(is_running=lambda: True))
    beside.compile_for_later()
    other.join()
    assert len(beside._jobs) == 2


def test_wide_heads_that_spill_have_theirs_too():
    compiler = Compiler()
    compiler.spilling = frozenset({"wide_kernel"})
    assert step(192, capped_alibi, compiler) == sorted(WIDE + PORTABLE)
    assert set(compiler.launched) == set(compiler.compiled)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_another_length_is_not_compiled_ahead_again(backend: str):
    """Where the same kernels serve it."""
    compiler = Compiler()
    options = {"backend": backend}
    with installed(compiler):
        for length in (LENGTH, LENGTH + 1024):
            xs = inputs(64, length=length)
            out = attnloom.flex_attention(*xs, score_mod=alibi, kernel_options=options)
            out.backward(torch.empty_like(out))
            beside.wait_for_all()
            if length == LENGTH:
                assert compiler.compiled
                compiler.compiled.clear()
    assert compiler.compiled == {}


def test_a_forward_without_gradients_compiles_itself_alone():
    compiler = Compiler()
    with installed(compiler):
        attnloom.flex_attention(*inputs(64, grad=False), score_mod=alibi)
    assert [name for name, _, _ in compiler.launched] == ["forward_kernel"]
    assert compiler.compiled == {}


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_lists_are_derived_while_the_forward_is_compiled(head_dim: int, monkeypatch):
    """Without gradients too. The kernel is compiled for lists that are not there yet."""
    mask = attnloom.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    compiler = Compiler()
    compiling, derived = threading.Event(), threading.Event()
    derive, compile_ = first_call.lists_of, compiler.compile

    def lists(*args: Any) -> Any:
        assert compiling.wait(60), "the kernel waited for its lists"
        found = derive(*args)
        derived.set()
        return found

    def compiled(*args: Any) -> Any:
        compiling.set()
        assert derived.wait(60), "the lists waited for the kernel"
        return compile_(*args)

    monkeypatch.setattr(first_call, "lists_of", lists)
    compiler.compile = compiled
    with installed(compiler):
        attnloom.flex_attention(*inputs(head_dim, grad=False), block_mask=mask)
    assert [name for name, _, _ in compiler.launched] == ["forward_kernel"]
    assert set(compiler.compiled) == set(compiler.launched)
    assert threading.main_thread() not in compiler.compiled.values()


@pytest.mark.parametrize("groups", [4, 1])
def test_portable_kernels_of_a_backward_are_compiled_beside_each_other(groups: int):
    """groups = 1: queries of a key head are divided among programs, whose parts are summed."""
    compiler = Compiler()
    options = {"backend": "triton"}
    ahead = step(
        128, capped_alibi, compiler, groups, enable_gqa=groups == 1, kernel_options=options
    )
    assert ahead == []
    assert compiler.names() == PORTABLE
    assert set(compiler.compiled) <= set(compiler.launched)
    threads = compiler.compiled.values()
    assert len({id(thread) for thread in threads}) == 3


def test_what_does_not_compile_ahead_raises_where_it_is_launched(monkeypatch):
    compiler = Compiler()

    def fails(*_: Any) -> None:
        raise RuntimeError("ptxas is not there")

    monkeypatch.setattr(compiler, "compile", fails)
    step(64, alibi, compiler)  # threads end quietly
    monkeypatch.setattr(compiler, "launch", fails)
    with pytest.raises(RuntimeError, match="ptxas is not there"):
        step(64, alibi, compiler)


def test_a_source_that_cannot_be_read_tells_so():
    class Source:
        def make_ir(self) -> None:
            raise ValueError("no such function")

    read = threading.Event()
    with mock.patch.object(beside._thread, "read", read, create=True), pytest.raises(ValueError):
        beside._telling(Source)().make_ir()
    assert read.is_set()
