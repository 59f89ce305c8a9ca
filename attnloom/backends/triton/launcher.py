"""A kernel, its configuration and its grid: launched by Triton once, then directly.

Triton's own launch binds and specialises every argument anew, some 60 us for these kernels. What it
specialises on is known here to be the same from call to call (`aligned`, and what launches are
remembered by), so that the compiled kernel is started with the arguments as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.runtime import driver

from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.config import INTERPRETED, KernelConfig
from attnloom.stats import count

_ALIGNMENT = 16
# Said aloud, since Triton 3.10 stops fusing multiplications and additions by itself.
OPTIONS = {"enable_fp_fusion": True}


class Launcher:
    """Launches `kernel` with a configuration as its last argument.

    kernel: a jit function. grid: number of programs. options: num_warps and num_stages.
    spills: registers that each thread of the kernel keeps in memory; known after the first launch.
    """

    __slots__ = ("_compiled", "config", "grid", "kernel", "options", "spills")

    def __init__(
        self, kernel: Any, config: KernelConfig, grid: int, options: dict[str, int]
    ) -> None:
        self.kernel = kernel
        self.config = config
        self.grid = grid
        self.options = options
        self.spills = 0
        self._compiled: Any = None

    def __call__(self, aligned: bool, *args: object) -> None:
        """Launch on the current device and stream.

        Args:
            aligned: the addresses of all tensors that this launcher is not remembered by are
                multiples of 16, and their types those of the first launch.
        """
        compiled = self._compiled
        if compiled is None or not aligned:
            compiled = self.kernel[(self.grid,)](*args, self.config, **OPTIONS, **self.options)
            if not INTERPRETED:
                self.spills = compiled.n_spills
                self._compiled = compiled if aligned else None
            return
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        grid = (self.grid, 1, 1)
        metadata = compiled.launch_metadata(grid, stream, *args, self.config)
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, metadata,
            knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args, self.config,
        )  # fmt: skip


def addresses_aligned(call: AttentionCall) -> bool:
    """Whether captured tensors and block lists are where and what nearly all are: at multiples of
    16, with fewer than 2**31 live blocks."""
    blocks = call.blocks
    if blocks is not None:
        entries = blocks.entries
        if entries.data_ptr() % _ALIGNMENT or not 0 < entries.numel() < 2**31:
            return False
    for bound in (call.score, call.mask):
        if bound is not None:
            for tensor in bound.tensors:
                if tensor.data_ptr() % _ALIGNMENT:
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
