"""First calls on a Hopper GPU run in a form that is compiled sooner; later ones change over."""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import attnloom
from tests.kernels.gluon_triton import needs_gluon

needs_gluon(also=True)

# ruff: noqa: E402
from triton.runtime.errors import OutOfResources

from attnloom.backends.gluon import configs_forward, first_call, launch_forward, ready_forward
from attnloom.backends.gluon.forward_sm90 import forward_kernel
from attnloom.backends.triton import beside, launch_around
from attnloom.backends.triton.launcher import Launcher
from attnloom.backends.triton.operands import Operands
from benchmarks import prewarm
from tests.kernels.test_gluon_compile_forward import call_of

HEADS, LENGTH = 4, 4096


def causal(b, h, q, kv):
    return q >= kv


def softcap(score, b, h, q, kv):
    return 20 * torch.tanh(score / 20)


class Machine:
    """A Hopper GPU whose compiler waits for `go`, but for quick forms. launched, compiled: warps of
    a consumer, and consumers, of each. quickly: threads that compiled quick forms."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.launched: list[tuple[int, int]] = []
        self.compiled: list[tuple[int, int]] = []
        self.quickly: list[str] = []
        self.on_disk = self.capturing = self.refuses_quick = False
        self.spills = 0
        self.addresses: list[int] = []

    def compile(self, launch: Launcher, args: tuple[Any, ...]) -> Any:
        if beside._thread.look and not self.on_disk:
            raise beside._NotThereError
        if launch.kernel is forward_kernel and _kind(launch) == QUICK:
            self.quickly.append(threading.current_thread().name)
            return mock.Mock(asm={"cubin": b""})
        if not self.on_disk:
            assert self.go.wait(60)
        if launch.kernel is forward_kernel:
            self.compiled.append(_kind(launch))
        return mock.Mock(asm={"cubin": b""})

    def launch(self, launch: Launcher, aligned: bool, *args: Any) -> None:
        if self.refuses_quick and _kind(launch)[0] == 8:
            raise OutOfResources(2, 1, "shared memory")
        self.launched.append(_kind(launch))
        launch.spills = self.spills

    def finish(self) -> None:
        """The compiler goes on, to the end."""
        self.go.set()
        for job in list(first_call._under_way.values()):
            job.wait()


def _kind(launch: Launcher) -> tuple[int, int]:
    return launch.config.WARPS, launch.config.CONSUMERS


USUAL, QUICK = (4, 2), (8, 1)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    found = Machine()
    monkeypatch.setenv("ATTNLOOM_QUICK_START", "1")
    monkeypatch.setattr(launch_forward, "_ready", {})
    monkeypatch.setattr(first_call, "_under_way", {})
    monkeypatch.setattr(first_call, "spills_of", lambda _: found.spills)
    for module in (first_call, ready_forward):
        monkeypatch.setattr(module, "is_capturing", lambda _: found.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    with (
        prewarm.without_a_device(),
        mock.patch.object(Launcher, "compile", lambda self, args: found.compile(self, args)),
        mock.patch.object(Launcher, "__call__", lambda self, *args: found.launch(self, *args)),
    ):
        beside._met.clear()
        yield found
        found.finish()


def inputs(length: int = LENGTH, D: int = 128, grad: bool = False) -> list[torch.Tensor]:
    return [
        torch.empty(4, HEADS, length, D, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)
    ]


def mask(length: int = LENGTH, block: int = 128) -> attnloom.BlockMask:
    return attnloom.create_block_mask(
        causal, None, None, length, length, device="cpu", BLOCK_SIZE=block
    )


def test_a_first_call_is_quick_and_later_ones_change_over(machine: Machine) -> None:
    x, blocks = inputs(), mask()
    for _ in range(3):
        attnloom.flex_attention(*x, block_mask=blocks)
    assert (machine.launched, machine.compiled) == ([QUICK] * 3, [])
    assert machine.quickly[0] != threading.current_thread().name  # while lists are derived
    machine.finish()
    for _ in range(3):
        attnloom.flex_attention(*x, block_mask=blocks)
    assert machine.launched == [QUICK] * 3 + [USUAL] * 3
    assert machine.compiled == [USUAL]


@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("score_mod", [None, softcap])
def test_all_head_dimensions_have_a_quick_form(D: int, score_mod: Any, machine: Machine) -> None:
    attnloom.flex_attention(*inputs(D=D), score_mod=score_mod)
    assert machine.launched == [QUICK]


def test_no_call_waits_for_a_kernel_that_is_under_way(machine: Machine) -> None:
    """Of another length, which the same kernel serves."""
    for length in (LENGTH, LENGTH + 1024, LENGTH):
        attnloom.flex_attention(*inputs(length), block_mask=mask(length))
    assert machine.launched == [QUICK] * 3
    machine.finish()
    attnloom.flex_attention(*inputs(LENGTH + 1024), block_mask=mask(LENGTH + 1024))
    assert (machine.launched[3:], machine.compiled) == ([USUAL], [USUAL])


def test_a_kernel_on_disk_is_used_at_once(machine: Machine) -> None:
    machine.on_disk = True
    attnloom.flex_attention(*inputs(), block_mask=mask())
    assert (machine.launched, machine.compiled) == ([USUAL], [USUAL])
    assert not first_call._under_way


def test_calls_with_gradients_have_the_usual_form(machine: Machine) -> None:
    machine.go.set()
    attnloom.flex_attention(*inputs(grad=True), block_mask=mask())
    beside.wait_for_all()
    assert USUAL in machine.launched
    assert QUICK not in machine.launched


def test_gradients_wait_for_a_kernel_that_is_under_way(machine: Machine) -> None:
    attnloom.flex_attention(*inputs(), block_mask=mask())
    threading.Timer(0.2, machine.go.set).start()
    length = LENGTH + 1024
    attnloom.flex_attention(*inputs(length, grad=True), block_mask=mask(length))
    beside.wait_for_all()
    assert machine.launched == [QUICK, USUAL]
    assert machine.compiled.count(USUAL) == 1


def test_graphs_hold_the_usual_form(machine: Machine) -> None:
    x, blocks = inputs(), mask()
    attnloom.flex_attention(*x, block_mask=blocks)
    machine.capturing = True
    threading.Timer(0.2, machine.go.set).start()
    attnloom.flex_attention(*x, block_mask=blocks)
    assert (machine.launched, machine.compiled) == ([QUICK, USUAL], [USUAL])


def test_a_first_call_in_a_graph_has_the_usual_form(machine: Machine) -> None:
    machine.capturing = True
    attnloom.flex_attention(*inputs(), block_mask=mask())
    assert machine.launched == [USUAL]


def test_the_variable_turns_it_off(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLOOM_QUICK_START", "0")
    machine.go.set()
    attnloom.flex_attention(*inputs(), block_mask=mask())
    assert machine.launched == [USUAL]


def test_blocks_of_one_consumer_have_no_quick_form(machine: Machine) -> None:
    """Blocks of 64 queries: its lists are of whole tiles."""
    machine.go.set()
    blocks = attnloom.create_block_mask(
        causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=(64, 128)
    )
    attnloom.flex_attention(*inputs(), block_mask=blocks)
    assert QUICK not in machine.launched


def test_a_device_without_room_has_the_usual_form(machine: Machine) -> None:
    machine.refuses_quick = True
    machine.go.set()
    attnloom.flex_attention(*inputs(), block_mask=mask())
    assert machine.launched == [USUAL]


def test_forms_that_follow_one_that_spills_are_compiled_beside_too(machine: Machine) -> None:
    x, blocks = inputs(), mask()
    machine.spills = 30
    attnloom.flex_attention(*x, block_mask=blocks)
    machine.finish()
    forms = configs_forward.forms(128, 128, 128, plain=True)
    compiled = len(machine.compiled)
    assert compiled == len(forms) > 2
    attnloom.flex_attention(*x, block_mask=blocks)
    assert machine.launched == [QUICK] + [USUAL] * len(forms)


def test_a_compile_beside_holds_no_memory_of_the_caller(machine: Machine) -> None:
    x = inputs()
    table = torch.zeros(HEADS)
    attnloom.flex_attention(*x, score_mod=lambda s, b, h, q, kv: s * table[h], block_mask=mask())
    assert machine.launched == [QUICK]
    assert not machine.compiled
    arguments = [a for job in first_call._under_way.values() for a in _tensors(job)]
    assert arguments
    assert [t.numel() for t in arguments if not t.is_meta] == [1]  # a counter


def _tensors(job: beside.Job) -> Iterator[torch.Tensor]:
    launches, _ = job._thread._args  # type: ignore[attr-defined]
    stack: list[Any] = [args for _, args in launches]
    while stack:
        part = stack.pop()
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, tuple):
            stack += part
        elif hasattr(part, "base"):
            stack.append(part.base)


def test_whether_a_kernel_is_on_disk_is_told_without_compiling_it(tmp_path: Any) -> None:
    """By Triton itself, in a process that has not met the kernel."""
    code = (
        "import sys, torch\n"
        "from benchmarks import prewarm\n"
        "from attnloom.backends.triton import beside\n"
        "with prewarm.without_a_device():\n"
        "    from tests.kernels.test_quick_start import smallest_launch\n"
        "    for look in (True, False):\n"
        "        job = beside.Job([smallest_launch()], look=look)\n"
        "        job.wait()\n"
        "        print(job.missed)\n"
    )
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert said == [["True", "False"], ["False", "False"]]


def test_a_process_waits_for_jobs_that_a_thread_of_autograd_began() -> None:
    """Threads that Python did not start are daemons to it, and so was what they started: a process
    that ended within Triton died of it ("exception not rethrown")."""
    found: list[bool] = []
    done = threading.Event()

    def start() -> None:
        assert threading.current_thread().daemon
        job = beside.Job([])
        found.append(job._thread.daemon)
        job.wait()
        done.set()

    _thread.start_new_thread(start, ())
    assert done.wait(60)
    assert found == [False]


def smallest_launch() -> beside.Launch:
    """Of a small kernel, which is compiled in half a second."""
    call = call_of(64, None, None)
    lse = torch.empty(call.query.shape[:3])
    operands = Operands.expected(call, call.query, lse)
    return launch_around.statistics_first(operands, launch_around.empty_statistics(operands))
