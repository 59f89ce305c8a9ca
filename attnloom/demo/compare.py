"""One training step through attnloom and through dense SDPA, each in a process of its own.

A fresh process makes peaks of resident memory comparable. SDPA cannot soft-cap, so its steps
compute less than attnloom's: either the mask alone, or the mask with the learned bias, both as
[B, H, S, S] tensors, which is how SDPA takes them.

    python -m attnloom.demo.compare '{"attention": "sdpa_mask", "rows": 1, "length": 2048, ...}'
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional

from attnloom.demo import memory
from attnloom.demo.corpus import Batch, pack_batches, read_documents
from attnloom.demo.model import Attend, Decoder, ModelConfig
from attnloom.demo.train import fused_attend, make_optimisers, train_step
from attnloom.demo.variant import Variant

CONTENDERS = {
    "attnloom": "attnloom: mask, learned bias, soft-cap",
    "sdpa_mask": "dense SDPA: mask only",
    "sdpa_mask_bias": "dense SDPA: mask and learned bias",
}
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class StepCost:
    """seconds: median of a few steps, batch preparation (masks) included.
    extra_bytes: peak resident memory of the first step over what was resident before it;
    None where the system does not tell."""

    attention: str
    seconds: float
    extra_bytes: int | None


def measure_step(attention: str, rows: int, length: int, threads: int) -> StepCost:
    """Run a few training steps in a new process; attention: a key of CONTENDERS.

    Raises:
        RuntimeError: the process failed; carries the last lines that it wrote.
    """
    request = json.dumps(
        {"attention": attention, "rows": rows, "length": length, "threads": threads}
    )
    command = [sys.executable, "-m", "attnloom.demo.compare", request]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"measuring a step of '{attention}' failed (exit code {done.returncode}):\n"
            + "\n".join(done.stderr.splitlines()[-8:])
        )
    return StepCost(**json.loads(done.stdout.splitlines()[-1]))


def _measure_here(attention: str, rows: int, length: int, threads: int) -> StepCost:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = ModelConfig()
    model = Decoder(config)
    optimisers = make_optimisers(model)
    documents = read_documents(limit_bytes=1_000_000)

    def step(batch: Batch) -> float:
        start = time.perf_counter()
        attend = _ATTENDS[attention](config.variant, batch)
        train_step(model, batch, attend, optimisers)
        return time.perf_counter() - start

    step(next(pack_batches(documents, rows, 128, seed=0)))  # builds kernels and optimiser state
    batches = pack_batches(documents, rows, length, seed=1)
    before = memory.resident_bytes()
    memory.reset_peak()
    step(next(batches))
    peak = memory.peak_bytes()
    extra = None if before is None or peak is None else peak - before
    return StepCost(
        attention, statistics.median(step(next(batches)) for _ in range(_REPEATS)), extra
    )


def _fused(variant: Variant, batch: Batch) -> Attend:
    return fused_attend(variant, variant.block_mask(batch.documents))


def _sdpa_mask(variant: Variant, batch: Batch) -> Attend:
    mask = _dense_mask(variant, batch.documents)

    def attend(query, key, value, bias):
        # The bias takes part with weight 0, so that its parameter has a gradient as elsewhere.
        query = query + 0 * bias.sum()
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return attend


def _sdpa_mask_bias(variant: Variant, batch: Batch) -> Attend:
    mask = _dense_mask(variant, batch.documents)
    position = torch.arange(batch.documents.shape[1])
    distance = (position[:, None] - position).clamp(0, variant.window_left)  # [S, S]

    def attend(query, key, value, bias):
        dense = torch.where(mask, bias[:, distance], float("-inf"))  # [B, H, S, S]
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)

    return attend


def _dense_mask(variant: Variant, documents: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, S] bool."""
    rows, length = documents.shape
    position = torch.arange(length)
    return variant.mask_mod(documents)(
        torch.arange(rows)[:, None, None, None], 0, position[:, None], position
    )


_ATTENDS = {"attnloom": _fused, "sdpa_mask": _sdpa_mask, "sdpa_mask_bias": _sdpa_mask_bias}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_measure_here(**json.loads(sys.argv[1])))) + "\n")
