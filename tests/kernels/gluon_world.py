"""What gluon_protocol.py runs a kernel's source in: numbers, shared memory, barriers, copies and
products that stand in for the language's."""

from __future__ import annotations

import ast
import contextlib
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from triton.experimental.gluon import language as gl

from tests.kernels.gluon_values import Int, Nothing, Pointer, Vec

PATIENCE_S = 20.0
NUM_BARRIERS = 16  # of the processor, for a program
FIRST_FREE = 4  # of them: one for each partition of more than a warp, and one for all


class ProtocolError(Exception):
    """The kernel would hang or compute something else."""


@dataclass(eq=False)
class Slot:
    """One entry of an allocation in shared memory. version: counts what was written to it."""

    dtype: Any = None
    name: str = ""
    content: Any = None
    version: int = 0
    size: int = 0
    # as a barrier
    count: int = 0
    pending: int = 0
    transfers: int = 0
    completed: int = 0
    threads: int = 0  # that have come by a barrier of the processor, and
    expected: int = 0  # how many are to

    def permute(self, _: Any) -> Slot:
        return self

    def slice(self, *_: Any, **__: Any) -> Slot:
        return self

    def store(self, content: Any) -> None:
        if self.count:
            raise ProtocolError(f"{self.name} is a barrier and was written to")
        self.content, self.version = content, self.version + 1

    def load(self, _: Any) -> Any:
        return self.content if isinstance(self.content, Vec) else Nothing()


class Memory:
    """An allocation; `index` gives the same entries again."""

    def __init__(self, dtype: Any, shape: list[int], _: Any) -> None:
        self.slots = [Slot(dtype) for _ in range(shape[0])]

    def index(self, at: int) -> Slot:
        return self.slots[at]


@dataclass
class World:
    """Everything that warps of all programs share. own: of a thread: program, job, groups, log, and
    whether it is a laggard."""

    seed: int
    drains: bool = True  # nobody has come by a barrier in vain at the end
    copies: list[Callable[[], None]] = field(default_factory=list)
    waits: dict[int, tuple[Slot, int]] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)  # barriers, by the names of their allocations
    used: set[str] = field(default_factory=set)
    alive: int = 0
    sleeping: int = 0
    error: Exception | None = None
    # barriers of the processor, by program and number
    numbered: dict[tuple[int, int], Slot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.draw = random.Random(self.seed)
        self.own = threading.local()

    def start(self, barrier: Slot, count: int) -> None:
        if barrier.dtype != "int64":
            raise ProtocolError(f"{barrier.name} is to be a barrier in memory of {barrier.dtype}")
        barrier.count = barrier.pending = count
        self.started.add(barrier.name.partition("[")[0])

    def _use(self, barrier: Slot) -> None:
        if not barrier.count:
            raise ProtocolError(f"{barrier.name} is no barrier")
        self.used.add(barrier.name.partition("[")[0])

    def check_barriers(self) -> None:
        """After steps have been played.

        Raises:
            ProtocolError: nobody uses a barrier, so that its memory is given away.
        """
        left = [slot.name for slot in self.numbered.values() if slot.threads]
        if left and self.drains:
            raise ProtocolError(f"nobody waits any more at {', '.join(sorted(left))}")
        if unused := sorted(self.started - self.used):
            raise ProtocolError(f"nobody waits for {', '.join(unused)}, or arrives there")

    def wait(self, barrier: Slot, phase: int, pred: Any = True) -> None:
        self._use(barrier)
        if not pred:
            return
        with self.changed:
            self._let_others()
            self._wait_while(barrier, phase)

    def _wait_while(self, barrier: Slot, phase: int) -> None:
        me = threading.get_ident()
        while barrier.completed & 1 == phase:
            if self.error is not None:
                raise ProtocolError("another warp failed")
            self.waits[me] = (barrier, phase)
            self._pause()
        self.waits.pop(me, None)

    def signal(self, number: int, threads: int) -> None:
        """Come by a barrier of the processor."""
        with self.changed:
            self._let_others()
            self._come_by(number, threads)

    def meet(self, number: int, threads: int) -> None:
        """Wait at a barrier of the processor."""
        with self.changed:
            self._let_others()
            barrier = self._barrier(number)
            phase = barrier.completed & 1
            self._come_by(number, threads)
            self._wait_while(barrier, phase)

    def signal_if(self, live: Any, number: int, threads: int) -> None:
        if live:
            self.signal(number, threads)

    def meet_if(self, live: Any, number: int, threads: int) -> None:
        if live:
            self.meet(number, threads)

    def _barrier(self, number: int) -> Slot:
        if not FIRST_FREE <= number < NUM_BARRIERS:
            raise ProtocolError(f"barrier {number} is none, or the compiler's")
        key = (self.own.program, int(number))
        return self.numbered.setdefault(key, Slot(name=f"barrier {int(number)}"))

    def _come_by(self, number: int, threads: int) -> None:
        barrier = self._barrier(number)
        if barrier.threads and barrier.expected != threads:
            raise ProtocolError(f"{barrier.name} is of {barrier.expected} and of {threads} threads")
        barrier.expected = threads
        barrier.threads += self.own.threads
        if barrier.threads > threads:
            raise ProtocolError(f"{barrier.name} of {threads} sees {barrier.threads} threads")
        if barrier.threads == threads:
            barrier.threads = 0
            barrier.completed += 1
            self.changed.notify_all()

    def _let_others(self) -> None:
        """A laggard sleeps until all others, those that lag elsewhere included, are stuck."""
        if not self.own.lags:
            return
        self.sleeping += 1
        while self.error is None and (self.copies or not self._are_stuck(self.sleeping)):
            if self._are_stuck(self.sleeping):
                self.copies.pop(self.draw.randrange(len(self.copies)))()
            else:
                self.changed.wait(0.05)
        self.sleeping -= 1

    def _are_stuck(self, sleeping: int) -> bool:
        return len(self.waits) + sleeping == self.alive and all(
            barrier.completed & 1 == phase for barrier, phase in self.waits.values()
        )

    def _pause(self) -> None:
        """Copies land when nobody can go on, or by chance before."""
        stuck = self._are_stuck(0)
        if self.sleeping:
            self.changed.notify_all()
        if self.copies and (stuck or self.draw.random() < 0.3):
            self.copies.pop(self.draw.randrange(len(self.copies)))()
        elif stuck:
            names = sorted(f"{barrier.name} {int(phase)}" for barrier, phase in self.waits.values())
            raise ProtocolError(f"every warp waits: {', '.join(names)}")
        else:
            self.changed.wait(PATIENCE_S)

    def run(self, warp: Callable[[], None], program: int, lags: bool, warps: int = 1) -> None:
        """The thread of a warp, or of several that go together."""
        self.own.program, self.own.groups, self.own.live = program, [], True
        self.own.lags, self.own.threads = lags, 32 * warps
        try:
            warp()
        except Exception as error:
            self.error = self.error or error
        with self.changed:
            self.alive -= 1
            self.waits.pop(threading.get_ident(), None)
            self.changed.notify_all()

    def arrive(self, barrier: Slot, count: int = 1, pred: Any = True) -> None:
        self._use(barrier)
        if pred:
            with self.changed:
                self._let_others()
                self._complete(barrier, count, 0)

    def arrive_by_warp(self, block: Memory, number: int, live: Any = True) -> None:
        """Each warp of those that go together, at a barrier by its number in a block."""
        for _ in range(self.own.threads // 32):
            self.arrive(block.index(number), pred=live)

    def expect(self, barrier: Slot, size: int) -> None:
        self._use(barrier)
        with self.changed:
            barrier.transfers += size
            self._complete(barrier, 1, 0)

    def _complete(self, barrier: Slot, arrivals: int, size: int) -> None:
        barrier.pending -= arrivals
        barrier.transfers -= size
        if barrier.pending < 0:
            raise ProtocolError("a barrier is arrived at more often than it counts")
        if barrier.pending == 0 and barrier.transfers == 0:
            barrier.completed += 1
            barrier.pending = barrier.count
            self.changed.notify_all()

    def copy(self, tensor: str, place: list[int], barrier: Slot, slot: Slot) -> None:
        self._use(barrier)
        size = slot.size

        def land() -> None:
            slot.store((tensor, *map(int, place)))
            self._complete(barrier, 0, size)

        with self.changed:
            self.copies.append(land)

    def multiply(self, left: Any, right: Slot, acc: Any, **_: Any) -> Nothing:
        """A product: a group of its own, that reads until it is waited for."""
        reads = [slot for slot in (left, right) if isinstance(slot, Slot)]
        self.own.groups.append([(slot, slot.version, self.own.live) for slot in reads])
        self.own.log.append([slot.content for slot in reads])
        return Nothing()

    def finish(self, outstanding: int, values: list[Any]) -> Any:
        while len(self.own.groups) > outstanding:
            for slot, version, counts in self.own.groups.pop(0):
                if slot.version != version and counts:
                    raise ProtocolError(f"{slot.content} was copied over what a product reads")
        return values[0] if len(values) == 1 else tuple(values)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, Vec):
        return Vec(
            (yes[i] if isinstance(yes, Vec) else yes)
            if c
            else (no[i] if isinstance(no, Vec) else no)
            for i, c in enumerate(condition)
        )
    return yes if condition else no


class Language:
    """`gl`: what the kernel's functions ask of the language; layouts are nothing."""

    def __init__(self, world: World, programs: int) -> None:
        self._world, self._programs = world, programs

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    int8, int32, int64, float32 = "int8", "int32", "int64", "float32"
    where = staticmethod(_where)

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        return Slot(dtype) if len(shape) == 1 else Memory(dtype, shape, layout)

    def program_id(self, _: int) -> Int:
        return Int(self._world.own.program)

    def num_programs(self, _: int) -> Int:
        return Int(self._programs)

    def num_warps(self) -> int:
        return 4

    def atomic_add(self, pointer: Pointer, value: int, sem: str = "") -> Int:
        with self._world.changed:
            pointer.memory[pointer.offset] += value
            return Int(pointer.memory[pointer.offset] - value)

    def load(self, pointer: Pointer, mask: Any = True, other: int = 0) -> Int:
        return Int(pointer.memory[pointer.offset] if mask else other)

    def store(self, pointer: Pointer, value: int) -> None:
        pointer.memory[pointer.offset] = value

    def minimum(self, left: int, right: int) -> Int:
        return Int(min(left, right))

    def maximum(self, left: int, right: int) -> Int:
        return Int(max(left, right))

    def arange(self, start: int, stop: int, _: Any = None) -> Vec:
        return Vec(Int(i) for i in range(start, stop))

    def full(self, shape: list[int], value: int, *_: Any) -> Vec:
        return Vec([value] * shape[0])

    def sum(self, values: Vec, _: int) -> Int:
        if isinstance(values, Nothing):
            return Int(777)  # a tile without steps reads what nobody wrote
        return Int(sum(values))

    def zeros(self, *_: Any) -> Nothing:
        return Nothing()

    def static_range(self, *args: int) -> Iterator[Int]:
        return map(Int, range(*args))

    def convert_layout(self, value: Any, *_: Any) -> Any:
        return value


def stand_ins(world: World, programs: int, modules: Sequence[ModuleType]) -> dict[str, Any]:
    """What a kernel's modules hold in place of the language's, and their own functions as they
    are before they are compiled. One of the modules defines Shared."""
    found: dict[str, Any] = {
        "gl": Language(world, programs),
        "mbarrier": SimpleNamespace(
            wait=world.wait, arrive=world.arrive, expect=world.expect, init=world.start,
            MBarrierLayout=lambda: None,
        ),
        "tma": SimpleNamespace(store_wait=lambda _: None),
        "bi": SimpleNamespace(
            reinterpret=_reinterpreted, async_load=world.copy, scalar=lambda value, _: Int(value),
            unknown=lambda value: value, signal=world.signal, signal_if=world.signal_if,
            meet=world.meet, meet_if=world.meet_if, barrier=lambda: None,
        ),
        "addresses": SimpleNamespace(
            arrive=world.arrive_by_warp,
            arrive_if=lambda live, block, number: world.arrive_by_warp(block, number, live),
            wait=lambda block, number, phase: world.wait(block.index(number), phase),
            wait_if=lambda live, block, number, phase: world.wait(block.index(number), phase, live),
            new_block=_new_block,
            find=lambda block, *_: (block, Int(0)),  # a block of barriers stands for its address
            find_all=lambda block, tiles: (block, *(Int(0) for _ in tiles)),
            barriers=_barriers,
        ),
        "Shared": lambda *parts: _named(dict(zip(_fields(modules), parts, strict=True))),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": world.multiply,
        "warpgroup_mma_wait": world.finish,
        "range": lambda *args: map(Int, range(*args)),
    }  # fmt: skip
    for module in modules:
        for name, value in vars(module).items():
            function = getattr(value, "fn", None)
            if name in found:
                continue
            if inspect.isfunction(function):
                found[name] = function
            elif isinstance(value, gl.constexpr) and isinstance(value.value, int):
                found[name] = value.value
    return found


def _fields(modules: Sequence[ModuleType]) -> list[str]:
    """Of the class that holds a program's shared memory."""
    for module in modules:
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef) and node.name == "Shared":
                return [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]  # type: ignore[union-attr]
    raise AssertionError("no module defines Shared")


def _named(memory: dict[str, Any]) -> SimpleNamespace:
    for name, part in memory.items():
        if not isinstance(part, Slot | Memory):
            continue
        for i, slot in enumerate([part] if isinstance(part, Slot) else part.slots):
            slot.name = slot.name or f"{name}[{i}]"  # what stands in for others has its own
    return SimpleNamespace(**memory)


def _new_block() -> Memory:
    return Memory("int64", [64, 1], None)


def _barriers(block: Memory, first: int, count: int, has_block: bool) -> Memory:
    found = Memory("int64", [count, 1], None)
    if has_block:
        found.slots = block.slots[first : first + count]
    return found


def _reinterpreted(memory: Slot, dtype: Any, shape: list[int], _: Any) -> Slot:
    memory.size = (4 if dtype == "float32" else 2) * shape[-1] * shape[-2]
    return memory


@contextlib.contextmanager
def held(modules: Sequence[ModuleType], names: dict[str, Any]) -> Iterator[None]:
    """Inside, the modules hold these."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.dict(vars(module), names))
        yield


def play(world: World, warps: Sequence[tuple[Any, ...]]) -> None:
    """Run warps to the end: (what one does, its program, whether it lags, of how many warps it is
    if not of one).

    Raises:
        ProtocolError: what the first to fail met, or copies that are left.
    """
    world.alive = len(warps)
    threads = [threading.Thread(target=world.run, args=warp, daemon=True) for warp in warps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if world.error is not None:
        raise world.error
    if world.copies:
        raise ProtocolError(f"{len(world.copies)} copies are under way at the end")
