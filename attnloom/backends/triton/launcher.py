"""A kernel, its configuration and its grid: compiled by Triton, then started directly (direct.py).

Triton's own launch binds and specialises every argument anew, some 60 us for these kernels. What it
specialises on is known here to be the same from call to call (`aligned`, and what launches are
remembered by), so that the compiled kernel is started with the arguments as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

from attnloom.backends.collecting import uncollected
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.binaries import binaries_alone
from attnloom.backends.triton.config import KernelConfig, value_of
from attnloom.backends.triton.direct import Direct, direct
from attnloom.backends.triton.hasty import hastily
from attnloom.backends.triton.installation import hashed_once
from attnloom.backends.triton.interpreter import INTERPRETED
from attnloom.backends.triton.kernel_keys import give_key
from attnloom.backends.triton.read_once import compiled_with
from attnloom.backends.triton.restart import Restart
from attnloom.stats import count

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Anywhere:
    """What a kernel is compiled for in place of a tensor whose address may be any."""

    dtype: torch.dtype

    @staticmethod
    def data_ptr() -> int:
        return 1


def are_aligned(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all begin at multiples of 16 bytes, as nearly all tensors do."""
    places = 0
    for tensor in tensors:
        places |= tensor.data_ptr()
    return places % _ALIGNMENT == 0


def _alike(args: tuple[object, ...]) -> tuple[object, ...]:
    """The same, of whose tensors, in tuples or outside, all are aligned or may begin anywhere."""
    tuples = [arg for arg in args if isinstance(arg, tuple)]
    if not are_aligned(arg for arg in args if isinstance(arg, torch.Tensor)):
        args = _anywhere(args)
    if are_aligned(part for arg in tuples for part in arg if isinstance(part, torch.Tensor)):
        return args
    return tuple(_anywhere(arg) if isinstance(arg, tuple) else arg for arg in args)


def _anywhere(args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(_Anywhere(arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args)


def with_fusion(config: KernelConfig, options: dict[str, Any]) -> dict[str, Any]:
    """Launch options that say whether a multiplication and an addition may be one operation.

    Not in kernels that owe their results all of float32 or float64 (NATURAL): of `a * b + c * d`
    the compiler fuses one product or the other, by how often each is used around it. The backward
    would round a score of 800 otherwise than the forward did, by 6e-5 of its probability, which
    goes into gradients. Products of matrices stay fused, and are all their time.
    """
    # Said aloud either way, since Triton 3.10 stops fusing by itself.
    natural = hasattr(config, "NATURAL") and value_of(config, "NATURAL")
    return {"enable_fp_fusion": not natural} | options


class Launcher:
    """Launches `kernel` with a configuration as its last argument.

    Triton would compile a kernel for each combination of tensors that happen to begin at multiples
    of 16 bytes, to no use. Here the first `operands` begin there if the configuration says so; of
    the others either all of a kind do, those in tuples or those outside, or nothing is assumed of
    where any of them begins.

    kernel: a jit function. grid: number of programs. options: num_warps and num_stages.
    operands: of how many first parameters the configuration's ALIGNED speaks.
    hasty: see hasty.py; of configurations that nothing else has, since kernels are kept by them.
    spills: registers that each thread of the kernel keeps in memory; known after the first launch.
    """

    __slots__ = (
        "_anywhere",
        "_compiled",
        "_device",
        "_direct",
        "_hasty",
        "_hint",
        "_num_operands",
        "_unaligned",
        "config",
        "grid",
        "kernel",
        "options",
        "spills",
    )

    def __init__(
        self,
        kernel: Any,
        config: KernelConfig,
        grid: int,
        options: dict[str, int],
        operands: int = 0,
        hasty: bool = False,
    ) -> None:
        self.kernel = kernel
        self.config = config
        self.grid = grid
        self.options = with_fusion(config, options)
        self._num_operands = operands
        self._anywhere = operands > 0 and not value_of(config, "ALIGNED")
        self._hint = value_of(config, "HINT") if hasattr(config, "HINT") else ""
        self._hasty = hasty
        self.spills = 0
        self._compiled: Any = None
        self._direct: Direct | None = None
        self._unaligned: tuple[Any, Direct | None] = (None, None)
        self._device = 0

    @property
    def takes_tensors(self) -> bool:
        """Whether aligned launches take tensors in place of their descriptors."""
        if self._direct is None or is_watched():
            return False
        return torch._C._cuda_getDevice() == self._device

    def restart(self, args: tuple[object, ...], sources: Sequence[torch.Tensor]) -> Restart | None:
        """A launch with these arguments but for the addresses of `sources`; None where Triton's
        launcher has to do it."""
        return None if self._direct is None else Restart(self._direct, args, sources)

    def __call__(self, aligned: bool, *args: object) -> None:
        """Launch on the current device and stream.

        Args:
            aligned: the addresses of all tensors that this launcher is not remembered by are
                multiples of 16, and their types those of the first launch.
        """
        if self._direct is not None and aligned and not is_watched():
            if torch._C._cuda_getDevice() != self._device:
                self._start_first(args)  # kernels are loaded by device
            else:
                self._direct(stream_of(self._device), args)
        elif self._compiled is not None and aligned:
            self._start_compiled(self._compiled, args)
        elif INTERPRETED:
            self._start_anew(args)
        elif aligned:
            self._start_first(args)
        else:
            self._start_unaligned(args)

    def compile(self, args: tuple[object, ...]) -> Any:
        """The kernel for arguments like these, as Triton keeps it for the next who asks."""
        operands, others = args[: self._num_operands], args[self._num_operands :]
        args = (*(_anywhere(operands) if self._anywhere else operands), *_alike(others))
        give_key(self.kernel)
        with hashed_once(), binaries_alone(), uncollected(), self._compiled_so():
            return self.kernel.run(
                *args, self.config, grid=(self.grid,), warmup=True, **self.options
            )

    @contextlib.contextmanager
    def _compiled_so(self) -> Iterator[None]:
        with compiled_with(self._hint), hastily(self._hasty):
            yield

    def _start_anew(self, args: tuple[object, ...]) -> None:
        """By Triton, whatever the arguments are."""
        give_key(self.kernel)
        with hashed_once(), binaries_alone(), self._compiled_so():
            compiled = self.kernel[(self.grid,)](*args, self.config, **self.options)
        if not INTERPRETED:
            self.spills = compiled.n_spills

    def _start_first(self, args: tuple[object, ...]) -> None:
        self._device = driver.active.get_current_device()
        compiled = self.compile(args)
        found = direct(compiled, self.grid, args)
        if found is not None:
            self.spills = found.spills
            found(stream_of(self._device), args)
        elif self._anywhere:  # Triton itself would look at addresses
            self._start_compiled(compiled, args)
            self.spills = compiled.n_spills
        else:
            self._start_anew(args)
        self._compiled, self._direct = compiled, found

    def _start_unaligned(self, args: tuple[object, ...]) -> None:
        """A kernel of its own, whichever tensors begin elsewhere."""
        compiled = self.compile(args)
        known, found = self._unaligned
        if compiled is not known:
            found = direct(compiled, self.grid, args)
            self._unaligned = compiled, found
        if found is None or is_watched():
            self._start_compiled(compiled, args)
            self.spills = compiled.n_spills
        else:
            found(stream_of(driver.active.get_current_device()), args)
            self.spills = found.spills

    def _start_compiled(self, compiled: Any, args: tuple[object, ...]) -> None:
        """As Triton does, but without looking at the arguments."""
        grid = (self.grid, 1, 1)
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        metadata = compiled.launch_metadata(grid, stream, *args, self.config)
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, metadata,
            knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args, self.config,
        )  # fmt: skip


def is_watched() -> bool:
    """Whether somebody, a profiler say, wants to hear of launches: Triton's launcher tells."""
    hooks = knobs.runtime.launch_enter_hook  # None, or a chain that may be empty
    return hooks is not None and bool(getattr(hooks, "calls", True))


def stream_of(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def addresses_aligned(call: AttentionCall) -> bool:
    """Whether captured tensors and block lists are where and what nearly all are: at multiples of
    16, with fewer than 2**31 live blocks."""
    blocks = call.blocks
    if blocks is not None:
        entries = blocks.entries
        if entries.data_ptr() % _ALIGNMENT or not 0 < entries.numel() < 2**31:
            return False
    for bound in (call.score, call.mask):
        if bound is not None and not are_aligned(bound.tensors):
            return False
    return True


def _counting(earlier: Callable[..., None] | None) -> Callable[..., None]:
    """A compilation listener that counts our kernels for `attnloom.compile_stats`."""

    def listener(*, src: Any, cache_hit: bool, **others: Any) -> None:
        kernel = getattr(getattr(src, "fn", None), "fn", None)
        if getattr(kernel, "__module__", "").startswith("attnloom."):
            count("kernels_loaded")
            if not cache_hit:
                count("kernels_compiled")
        if earlier is not None:
            earlier(src=src, cache_hit=cache_hit, **others)

    return listener


knobs.compilation.listener = _counting(knobs.compilation.listener)
