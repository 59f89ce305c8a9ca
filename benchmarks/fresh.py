"""Measurements that need a process of their own: first calls, peak memory.

python -m benchmarks.fresh '{"action": "first_call", "contender": "attnloom", ...}'
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, causal, causal_window, document_ids
from benchmarks.contenders import CONTENDERS

MIB = 2**20


def measure(action: str, cache: Path, threads: int, **arguments: Any) -> dict[str, float]:
    """Run one action in a new process whose kernel caches lie in `cache`.

    Raises:
        RuntimeError: the process failed; carries the last lines that it wrote.
    """
    if isinstance(arguments.get("case"), Case):
        arguments["case"] = asdict(arguments["case"])
    request = json.dumps({"action": action, "threads": threads, **arguments})
    environment = os.environ | {
        "ATTNLOOM_CACHE_DIR": str(cache / "attnloom"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fresh", request],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-8:])
        raise RuntimeError(f"{action} failed (exit code {done.returncode}): {request}\n{tail}")
    return json.loads(done.stdout.splitlines()[-1])


def _first_call(contender: str, case: Case, backward: bool) -> dict[str, float]:
    if contender == "torch-flex":
        importlib.import_module("torch._inductor.compile_fx")  # not the cost of a variant
    attention = CONTENDERS[contender].prepare(case)
    assert attention is not None
    inputs = [x.requires_grad_(backward) for x in case.inputs()]
    start = time.perf_counter()
    with torch.set_grad_enabled(backward):
        out = attention(*inputs)
    if backward:
        out.sum().backward()
    return {"ms": (time.perf_counter() - start) * 1e3}


def _memory(contender: str, case: Case) -> dict[str, float]:
    """Peak of forward and backward over what was resident before: results and masks included,
    but not what it took to build the masks."""
    small = replace(case, q_len=256, kv_len=256)
    for current in (small, case):
        inputs = [x.requires_grad_() for x in current.inputs()]
        dout = torch.ones_like(inputs[0])
        before = _start_peak()
        attention = CONTENDERS[contender].prepare(current)
        assert attention is not None
        _start_peak()
        attention(*inputs).backward(dout)
        extra = _peak_since(before)
    return {"mib": extra / MIB}


def _build_mask(module: str, kind: str, length: int) -> dict[str, float]:
    create_block_mask = _mask_builder(module)
    mask_mod = MASKS[kind](length)
    create_block_mask(MASKS[kind](256), None, None, 256, 256, device="cpu")
    before = _start_peak()
    start = time.perf_counter()
    create_block_mask(mask_mod, None, None, length, length, device="cpu")
    seconds = time.perf_counter() - start
    return {"ms": seconds * 1e3, "mib": _peak_since(before) / MIB}


def _mask_builder(module: str):
    if module == "attnloom":
        import attnloom

        return attnloom.create_block_mask
    from torch.nn.attention import flex_attention

    return flex_attention.create_block_mask


def _start_peak() -> int:
    from attnloom.demo import memory

    before = memory.resident_bytes()
    if before is None:
        raise RuntimeError("this system does not tell how much memory is resident")
    memory.reset_peak()
    return before


def _peak_since(before: int) -> int:
    from attnloom.demo import memory

    peak = memory.peak_bytes()
    assert peak is not None
    return peak - before


def _window(length: int):
    return causal_window(length, window_left=1024)


def _packed_documents(length: int):
    """1,000 uneven causal documents (fewer where the length is small)."""
    ids = document_ids(length, num_documents=min(1000, length // 8))
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


MASKS = {"causal": causal, "window1024": _window, "documents1000": _packed_documents}
_ACTIONS = {"first_call": _first_call, "memory": _memory, "build_mask": _build_mask}


def _main(request: dict[str, Any]) -> None:
    torch.set_num_threads(request.pop("threads"))
    if "case" in request:
        request["case"] = Case(**request["case"])
    result = _ACTIONS[request.pop("action")](**request)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
