"""What this machine offers attnloom, what is missing, and how to get it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from attnloom.api.attention import flex_attention
from attnloom.api.masks import create_block_mask
from attnloom.backends.cpu import cache, toolchain
from attnloom.backends.folder import check_parents, check_trusted, default_folder
from attnloom.backends.reference import reference_attention
from attnloom.errors import AttnloomError, CacheError, counted
from attnloom.stats import compile_stats
from attnloom.tools.setting import Progress, silent

# What the kernels and compilers make use of, as /proc/cpuinfo calls it, and what it is good for.
_FEATURES = {
    "avx2": "256-bit vectors",
    "fma": "fused multiply-add",
    "f16c": "conversion of float16",
    "avx512f": "512-bit vectors",
    "avx512bw": "512-bit vectors of small integers",
    "avx512_bf16": "bfloat16 products",
    "avx512_fp16": "float16 arithmetic",
    "amx_bf16": "bfloat16 matrix tiles",
    "asimd": "128-bit vectors",
    "sve": "scalable vectors",
    "bf16": "bfloat16 products",
}
_PACKAGES = ("torch", "numpy", "triton", "ziglang", "rich", "matplotlib")
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Compiler:
    """The C++ compiler. problem: "" if it runs; else path or version may be empty."""

    path: str
    version: str
    problem: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA or ROCm device and the limits that kernels are fitted to."""

    name: str
    capability: str
    memory_bytes: int
    num_multiprocessors: int
    shared_memory_bytes: int
    registers: int


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """The kernels on disk. problem: "" if the folder can be used, or can be made."""

    path: str
    exists: bool
    num_kernels: int
    total_bytes: int
    problem: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    """One small call, forward and backward, compared with the oracle.

    backend_warning: what attnloom warned of, "" for nothing. compiled: kernels the compiler ran
    for; 0 if all were in the cache. first_seconds, next_seconds: of the first and of another call.
    """

    compiled: int
    first_seconds: float
    next_seconds: float
    largest_error: float
    backend_warning: str
    problem: str


@dataclass(frozen=True, slots=True)
class Finding:
    """serious: attention fails or is several times slower. what: the fact. fix: what to do."""

    serious: bool
    what: str
    fix: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `doctor` found; versions maps a package to its version, "" if it is not installed."""

    python: str
    system: str
    versions: dict[str, str]
    cpu_features: tuple[str, ...]
    num_cores: int
    num_threads: int
    compiler: Compiler
    gpus: tuple[Gpu, ...]
    cache: CacheFolder
    self_test: SelfTest | None
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return not any(f.serious for f in self.findings)


def doctor(*, run: bool = True, progress: Progress = silent) -> Diagnosis:
    """Look at the compiler, the processor, the GPUs, the kernel cache and the installed packages.

    Args:
        run: also run a small attention and compare it with the oracle (a second where its kernels
            have to be compiled).
        progress: called with the name of each stage as it begins.
    Returns:
        Diagnosis; its `healthy` is True if nothing serious is wrong. Nothing is raised for what is
        missing: that is a Finding.
    """
    progress("looking at the compiler")
    compiler = _compiler()
    folder = inspect_cache(default_folder())
    versions = {name: _version(name) for name in _PACKAGES}
    gpus = tuple(_gpu(i) for i in range(torch.cuda.device_count()))
    progress("running a small attention")
    test = _self_test() if run else None
    threads, cores = torch.get_num_threads(), _num_cores()
    findings = (
        *_compiler_findings(compiler),
        *_cache_findings(folder),
        *_gpu_findings(gpus, versions),
        *_thread_findings(threads, cores),
        *_tile_findings(),
        *_test_findings(test),
    )
    return Diagnosis(
        platform.python_version(),
        f"{platform.system()} {platform.release()} {platform.machine()}",
        versions,
        _features(),
        cores,
        threads,
        compiler,
        gpus,
        folder,
        test,
        findings,
    )


def inspect_cache(path: Path) -> CacheFolder:
    """State of a kernel cache: what it holds, and whether kernels may be loaded from it."""
    exists = path.exists()
    problem, kernels, size = "", 0, 0
    try:
        check_parents(path)
        if not exists:
            return CacheFolder(str(path), False, 0, 0, _cannot_make(path))
        check_trusted(path)
        sizes = list(_files(path))
        kernels = sum(name == cache.KERNEL for name, _ in sizes)
        size = sum(size for _, size in sizes)
    except CacheError as error:
        problem = str(error)
    except OSError as error:
        problem = f"the kernel cache '{path}' cannot be read: {error}."
    if not problem and not os.access(path, os.W_OK | os.X_OK):
        problem = f"the kernel cache '{path}' cannot be written by you."
    return CacheFolder(str(path), exists, kernels, size, problem)


def _files(path: Path) -> Iterator[tuple[str, int]]:
    """Name and bytes of each file below `path`, less what other processes remove meanwhile."""
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield name, (Path(folder) / name).lstat().st_size


def _cannot_make(path: Path) -> str:
    parent = next((p for p in path.parents if p.exists()), None)
    if parent is not None and parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
        return ""
    return f"the kernel cache '{path}' does not exist and '{parent}' cannot be written by you."


def _compiler() -> Compiler:
    try:
        tools = toolchain.available()
    except AttnloomError as error:
        return Compiler("", "", str(error))
    if tools is None:
        return Compiler("", "", "no C++ compiler was found.")
    try:
        return Compiler(tools.name, tools.version(), "")
    except AttnloomError as error:
        return Compiler(tools.name, "", str(error))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _features() -> tuple[str, ...]:
    present = set(toolchain.cpu_features().split())
    return tuple(f"{name} ({what})" for name, what in _FEATURES.items() if name in present)


def _num_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    return Gpu(
        found.name,
        f"{found.major}.{found.minor}",
        found.total_memory,
        found.multi_processor_count,
        getattr(found, "shared_memory_per_block_optin", 0),
        getattr(found, "regs_per_multiprocessor", 0),
    )


def _self_test() -> SelfTest:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 96, 32, generator=generator, device="cpu") for _ in range(3))
    dout = torch.randn(q.shape, generator=generator, device="cpu")

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    mask = create_block_mask(causal, None, None, 96, 96, device="cpu", BLOCK_SIZE=32)

    def both(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return reference_attention(q, k, v, None, causal).out

    before = compile_stats().kernels_compiled
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            start = time.perf_counter()
            mine = both(fused, torch.float32)
            middle = time.perf_counter()
            both(fused, torch.float32)
            end = time.perf_counter()
        except AttnloomError as error:
            return SelfTest(0, 0.0, 0.0, float("nan"), "", str(error))
    exact = both(oracle, torch.float64)
    error = max(float((a - e).abs().max()) for a, e in zip(mine, exact, strict=True))
    problem = "" if error <= _TOLERANCE else f"results are {error:.1e} away from the oracle's."
    told = " ".join(dict.fromkeys(str(w.message) for w in caught))
    compiled = compile_stats().kernels_compiled - before
    return SelfTest(compiled, middle - start, end - middle, error, told, problem)


def _compiler_findings(compiler: Compiler) -> list[Finding]:
    if not compiler.problem:
        return []
    fix = (
        "Install g++ (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++) or clang, or "
        "run 'pip install ziglang', which carries one; or set CXX. Without one, attention on the "
        "CPU runs as tiled torch operators, several times slower."
    )
    return [Finding(True, compiler.problem, fix)]


def _cache_findings(folder: CacheFolder) -> list[Finding]:
    found = []
    if folder.problem:
        fix = (
            "Set ATTNLOOM_CACHE_DIR to a folder that belongs to you and that only you can write "
            "to. Until then kernels are compiled again in every process."
        )
        found.append(Finding(True, folder.problem, fix))
    existing = next(
        (p for p in (Path(folder.path), *Path(folder.path).parents) if p.exists()), None
    )
    if existing is not None and (free := shutil.disk_usage(existing).free) < 100 << 20:
        what = f"{free >> 20} MiB are free where kernels are kept ('{existing}')."
        found.append(Finding(True, what, "Free some space, or set ATTNLOOM_CACHE_DIR elsewhere."))
    return found


def _gpu_findings(gpus: tuple[Gpu, ...], versions: dict[str, str]) -> list[Finding]:
    if gpus and not versions["triton"]:
        fix = "Run 'pip install triton' (Linux). Until then CUDA tensors run on torch operators."
        return [Finding(True, "there is a GPU, but the package triton is not installed.", fix)]
    if not gpus and Path("/dev/nvidia0").exists() and not torch.cuda.is_available():
        what = f"there is an NVIDIA GPU, but torch {versions['torch']} cannot use it."
        return [Finding(True, what, "Install a CUDA build of torch, or a driver that fits it.")]
    return []


def _thread_findings(threads: int, cores: int) -> list[Finding]:
    if threads > cores:
        what = (
            f"torch uses {counted(threads, 'thread')}, but this process may run on "
            f"{counted(cores, 'core')}."
        )
        return [Finding(False, what, f"Call torch.set_num_threads({cores}): waiting costs time.")]
    if threads < cores:
        what = f"torch uses {threads} of {counted(cores, 'core')}."
        fix = "Nothing, if meant so; else torch.set_num_threads, or unset OMP_NUM_THREADS."
        return [Finding(False, what, fix)]
    return []


def _tile_findings() -> list[Finding]:
    if "amx_bf16" not in toolchain.cpu_features().split() or toolchain.matrix_tiles_allowed():
        return []
    what = "the processor has matrix tiles (amx_bf16), but this process may not use them."
    fix = (
        "bfloat16 runs on vectors, several times slower. Linux grants tiles from version 5.16 on, "
        "unless a sandbox forbids arch_prctl or a signal handler's stack is too small for them."
    )
    return [Finding(False, what, fix)]


def _test_findings(test: SelfTest | None) -> list[Finding]:
    if test is None:
        return []
    found = []
    if test.problem:
        fix = "Empty the cache folder and run this again; if it stays, report it with this output."
        found.append(Finding(True, f"a small attention failed: {test.problem}", fix))
    if test.backend_warning:
        found.append(Finding(False, test.backend_warning, "See the other findings."))
    return found
