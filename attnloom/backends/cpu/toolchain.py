"""The C++ compiler of this machine, the flags it takes and what its output depends on.

Looked for, in this order: the CXX environment variable, g++, clang++, c++, and the compiler that
the `ziglang` package carries. Nothing is run to find one: a compiler is known by its path, size and
time of change, and asked for its version once (cache.py remembers the answer).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from attnloom.errors import CompileError

_NAMES = ("g++", "clang++", "c++")
# -O2 compiles a forward in 0.4 s, -O3 in 0.6 s, a backward in 0.4 s instead of 1.1 s, and both run
# equally fast: kernels are vectorised by hand.
# Contraction to fused multiply-add is asked for, since clang does less of it by itself.
# -fno-trapping-math and -fno-math-errno keep NaN, infinities and signed zeros, unlike -ffast-math.
_FLAGS = (
    "-O2",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fwrapv",
    "-fno-exceptions",
    "-fno-rtti",
    "-w",
    "-Wno-psabi",
)
_NATIVE = {"x86_64": "-march=native", "AMD64": "-march=native"}
# Kernels may use matrix tiles (kernels/gemm_amx.h), if the compiler knows them.
MATRIX_TILES = "-DUSE_AMX=1"
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18  # numbers of Linux on x86-64
_TIMEOUT_S = 300
_MAX_LINES, _MAX_WIDTH = 12, 300  # of a compiler's words in a message


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler and all that its output depends on but the source.

    command: the program and leading arguments. name: how messages call it.
    identity: changes when the compiler is replaced. cpu: instruction sets of this machine, which
        `-march=native` compiles for.
    """

    command: tuple[str, ...]
    name: str
    identity: str
    cpu: str

    def flags(self, target: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Flags of a shared object; target: instruction sets to use instead of this machine's."""
        native = (_NATIVE.get(platform.machine(), "-mcpu=native"),)
        if matrix_tiles_allowed():
            native = (MATRIX_TILES, *native)
        extra = ("-fno-sanitize=undefined",) if "ziglang" in self.command else ()
        return (*_FLAGS, *extra, *(native if target is None else target))

    def version(self) -> str:
        """First line of `--version`. Runs the compiler.

        Raises:
            CompileError: it does not run.
        """
        done = self._run("--version")
        return done.stdout.strip().partition("\n")[0]

    def compile(self, source: str, output: Path, flags: tuple[str, ...], include: Path) -> None:
        """Compile C++ text to a shared object.

        Args:
            output: file to write. include: folder of the headers.
        Raises:
            CompileError: the compiler refused or could not be run; its own words are in the text.
        """
        path = output.with_suffix(".cpp")
        path.write_text(source, encoding="utf-8")
        done = self._run(*flags, f"-I{include}", str(path), "-o", str(output))
        if not output.is_file():
            raise CompileError(_refusal(self.name, done, "wrote no kernel"))

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = (*self.command, *arguments)
        try:
            done = _run_to_end(command)
        except OSError as error:
            raise CompileError(
                f"could not run the C++ compiler {self.name}: {error}. Set CXX to another "
                'compiler, or use kernel_options={"backend": "tiled"}, which needs none.'
            ) from error
        except subprocess.TimeoutExpired as error:
            raise CompileError(
                f"the C++ compiler {self.name} was stopped after {_TIMEOUT_S} s. A kernel takes it "
                "about a second; is the machine out of memory? Set CXX to another compiler, or use "
                f'kernel_options={{"backend": "tiled"}}, which needs none. The command was:\n'
                f"{shlex.join(command)}"
            ) from error
        if done.returncode != 0:
            raise CompileError(_refusal(self.name, done, _how_it_ended(done.returncode)))
        return done


def _run_to_end(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run a program and collect what it says. If it has to be stopped, so are the programs that it
    started, which would hold its output open."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},  # messages that a search engine knows
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _refusal(name: str, done: subprocess.CompletedProcess[str], problem: str) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    said = "\n".join(line[:_MAX_WIDTH] for line in lines[:_MAX_LINES])
    return (
        f"the C++ compiler {name} {problem}. "
        "attnloom needs gcc 9, clang 12 or later, or ziglang. Set CXX to another compiler, or use "
        f'kernel_options={{"backend": "tiled"}}, which needs none. The command was:\n'
        f"{shlex.join(done.args)}\nIt said:\n{said or '(nothing)'}"
    )


@functools.cache
def available() -> Toolchain | None:
    """The compiler to use, or None where there is none (always None on Windows).

    Raises:
        CompileError: CXX names a compiler that does not exist.
    """
    if sys.platform == "win32":
        return None
    command = _command()
    if command is None:
        return None
    name = command[0] if len(command) == 1 else " ".join(command)
    return Toolchain(command, name, _identity(command), cpu_features())


def _command() -> tuple[str, ...] | None:
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        try:
            words = shlex.split(chosen)
        except ValueError as error:
            raise CompileError(
                f"CXX is {chosen!r}, which is no command: {error}. Set CXX to a C++ compiler, or "
                "unset it to let attnloom look for g++ and clang++."
            ) from None
        found = shutil.which(words[0])
        if found is None:
            raise CompileError(
                f"CXX is '{chosen}', but there is no such program. Set CXX to a C++ compiler, or "
                "unset it to let attnloom look for g++ and clang++."
            )
        return (found, *words[1:])
    for name in _NAMES:
        found = shutil.which(name)
        if found is not None:
            return (found,)
    if importlib.util.find_spec("ziglang") is not None:
        # Not `c++`, which builds its standard library first, for a minute; kernels use none of it.
        return (sys.executable, "-m", "ziglang", "cc")
    return None


def _identity(command: tuple[str, ...]) -> str:
    """Path, size and time of change of every file that the command names."""
    parts = [platform.machine(), *command]
    # `ccache g++` and the like name the compiler by a later word.
    places = (shutil.which(word) for word in command if not word.startswith("-"))
    files = [Path(place) for place in places if place is not None]
    spec = importlib.util.find_spec("ziglang") if "ziglang" in command else None
    if spec is not None and spec.origin is not None:
        files.append(Path(spec.origin).parent / "zig")
    for file in files:
        real = file.resolve()
        if real.is_file():
            status = real.stat()
            parts.append(f"{real}:{status.st_size}:{status.st_mtime_ns}")
    return "|".join(parts)


def cpu_features() -> str:
    """Instruction sets of this machine, by name; what `-march=native` may use."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            for line in file:  # the first processor only: the file can be large
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return " ".join(sorted(value.split()))
    except OSError:
        pass
    return f"{platform.machine()} {_sysctl('machdep.cpu.brand_string') or platform.processor()}"


@functools.cache
def matrix_tiles_allowed() -> bool:
    """Whether this process may use matrix tiles of bfloat16 (AMX). Linux gives them to processes
    that ask, as they enlarge what is saved of a thread; it refuses where a signal handler's stack
    is too small for it. A process forked off keeps the permission."""
    if sys.platform != "linux" or not {"amx_tile", "amx_bf16"} <= set(cpu_features().split()):
        return False
    ask = ctypes.CDLL(None).syscall
    arguments = (_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA)
    return ask(*(ctypes.c_long(number) for number in arguments)) == 0


def _sysctl(name: str) -> str | None:
    """A string that macOS keeps about the machine."""
    if sys.platform != "darwin":
        return None
    size = ctypes.c_size_t(256)
    buffer = ctypes.create_string_buffer(size.value)
    call = ctypes.CDLL(None).sysctlbyname
    failed = call(name.encode(), buffer, ctypes.byref(size), None, 0)
    return None if failed else buffer.value.decode()
