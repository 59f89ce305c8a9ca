"""Training: one BlockMask from each packed batch, shared by every layer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

import attnloom
from attnloom.demo.corpus import Batch, pack_batches
from attnloom.demo.model import Attend, Decoder, ModelConfig
from attnloom.demo.muon import Muon
from attnloom.demo.variant import Variant


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """What to train and for how long; the first limit reached ends it.

    rows, length: shape of a batch in tokens. seconds: wall time of training, start-up excluded.
    steps: optimiser steps, None for no limit.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    rows: int = 1
    length: int = 2048
    seconds: float = 120.0
    steps: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step: loss in nats a byte, seconds since training began, share of tiles
    that the mask skips, in percent."""

    index: int
    loss: float
    seconds: float
    tokens: int
    skipped_percent: float


def fused_attend(variant: Variant, block_mask) -> Attend:
    """Attention of the demo through attnloom, under a BlockMask built once a batch."""

    def attend(query, key, value, bias):
        return attnloom.flex_attention(
            query, key, value, score_mod=variant.score_mod(bias), block_mask=block_mask
        )

    return attend


def make_optimisers(model: Decoder) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices inside layers, AdamW for embeddings and attention biases."""
    matrices = [p for n, p in model.layers.named_parameters() if not n.endswith("bias")]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return (
        Muon(matrices, lr=0.01),
        torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
    )


def train_step(
    model: Decoder, batch: Batch, attend: Attend, optimisers: tuple[torch.optim.Optimizer, ...]
) -> float:
    """Forward, backward and update; the loss in nats a byte."""
    loss = model.loss(batch, attend)
    loss.backward()
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return loss.item()


def train(model: Decoder, documents: list[bytes], config: TrainConfig) -> Iterator[Step]:
    """Train in place, one Step at a time, until config.seconds or config.steps are used up."""
    optimisers = make_optimisers(model)
    peak_rates = [[g["lr"] for g in o.param_groups] for o in optimisers]
    start = time.perf_counter()
    for index, batch in enumerate(
        pack_batches(documents, config.rows, config.length, config.seed), start=1
    ):
        elapsed = time.perf_counter() - start
        progress = max(elapsed / config.seconds, (index - 1) / config.steps if config.steps else 0)
        if progress >= 1:
            return
        factor = _rate_factor(index, progress)
        for optimiser, rates in zip(optimisers, peak_rates, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        block_mask = config.model.variant.block_mask(batch.documents)
        loss = train_step(model, batch, fused_attend(config.model.variant, block_mask), optimisers)
        yield Step(
            index=index,
            loss=loss,
            seconds=time.perf_counter() - start,
            tokens=index * config.rows * config.length,
            skipped_percent=float(block_mask.sparsity()),
        )


def _rate_factor(index: int, progress: float) -> float:
    # Warm up over ten steps; the second half of the run decays to 5%.
    return min(1.0, index / 10) * min(1.0, 0.05 + 1.9 * (1 - progress))
