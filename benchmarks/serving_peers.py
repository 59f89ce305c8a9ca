"""Who decodes in benchmarks.serving: the same decoder over three caches, each step greedy.

`attnloom` is the whole engine: scheduler, paged cache, sampling. The peers are bare loops over one
batch whose sequences begin and end together, the best case for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex

from attnloom.serving import Decoder, Engine, Limits, Request, SamplingParams
from attnloom.serving.config import LayerAttention

PAGE_SIZE = 128  # torch's masks are made of blocks of 128


@dataclass(frozen=True, slots=True)
class Workload:
    """prompts: of different lengths; num_tokens of output for each."""

    prompts: list[list[int]]
    num_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence at the end, in whole pages."""
        longest = max(map(len, self.prompts)) + self.num_tokens
        return -(-longest // PAGE_SIZE) * PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Decoded:
    """tokens: output of each sequence. seconds: of all steps after the first token."""

    tokens: list[list[int]]
    seconds: float


Decode = Callable[[Decoder, Workload], Decoded]


@torch.inference_mode()
def attnloom_engine(model: Decoder, work: Workload) -> Decoded:
    """Our engine, from the moment at which every sequence has its first token."""
    num, pages = len(work.prompts), work.longest // PAGE_SIZE
    # All prompts in the first step, so that all decode together as the peers' do.
    limits = Limits(num, sum(map(len, work.prompts)), num, work.longest)
    engine = Engine(model, None, limits, num_pages=num * pages, page_size=PAGE_SIZE)
    engine.warm_up()
    found: dict[str, list[int]] = {}
    for prompt in work.prompts:
        params = SamplingParams(temperature=0, max_tokens=work.num_tokens, ignore_eos=True)
        found[engine.add(Request(tuple(prompt), params))] = []

    def step() -> None:
        for output in engine.step():
            found[output.name] += output.tokens

    step()
    assert all(map(len, found.values()))
    begin = now(model)
    while engine.busy:
        step()
    return Decoded(list(found.values()), now(model) - begin)


class PaddedCache:
    """Keys and values in [B, Hkv, MAX_LEN, D] tensors, attended by SDPA with a mask of lengths."""

    def __init__(self, model: Decoder, work: Workload) -> None:
        config, num = model.config, len(work.prompts)
        shape = (config.num_layers, 2, num, config.num_kv_heads, work.longest, config.head_dim)
        self._stored = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._entries = torch.arange(num, device=model.device)
        self._at = torch.arange(work.longest, device=model.device)
        self._positions = self._entries
        self._mask = self._at

    def fill(self, layer: LayerAttention, b: int, key: Tensor, value: Tensor) -> None:
        """Keys and values [L, Hkv, D] of a prompt."""
        for side, new in enumerate((key, value)):
            self._stored[layer.index, side, b, :, : len(new)] = new.transpose(0, 1)

    def begin(self, positions: Tensor) -> None:
        """Before the layers of a step: the position of each sequence's token."""
        self._positions = positions
        self._mask = (self._at <= positions[:, None])[:, None, None]

    def __call__(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._stored[layer.index]
        keys[self._entries, :, self._positions] = key
        values[self._entries, :, self._positions] = value
        out = functional.scaled_dot_product_attention(
            query[:, :, None],
            keys,
            values,
            attn_mask=self._mask,
            scale=layer.scale,
            enable_gqa=True,
        )
        return out.flatten(1)


class TorchPagedCache:
    """torch's experimental PagedAttention with compiled flex_attention."""

    def __init__(self, model: Decoder, work: Workload) -> None:
        from torch.nn.attention.experimental._paged_attention import PagedAttention

        config, num = model.config, len(work.prompts)
        width = work.longest // PAGE_SIZE
        self._device = model.device
        self._paged: Any = PagedAttention(num * width, PAGE_SIZE, num, device=str(model.device))
        for b in range(num):
            entry = torch.tensor([b], device=model.device)
            self._paged.reserve(entry, torch.tensor([work.longest], device=model.device))
        shape = (config.num_layers, 2, 1, config.num_kv_heads, num * work.longest, config.head_dim)
        self._stored = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._entries = torch.arange(num, device=model.device)
        self._blocks = torch.arange(width, device=model.device, dtype=torch.int32)
        self._positions = self._entries
        self._mask: Any = None
        self._flex: Any = torch.compile(torch_flex.flex_attention, dynamic=False)
        self._kv_len = torch.full((num,), work.longest, device=model.device)

    def fill(self, layer: LayerAttention, b: int, key: Tensor, value: Tensor) -> None:
        """Keys and values [L, Hkv, D] of a prompt."""
        entry = torch.tensor([b], device=self._device)
        places = torch.arange(len(key), device=self._device)[None]
        keys, values = self._stored[layer.index]
        new = (x.transpose(0, 1)[None] for x in (key, value))
        self._paged.assign(entry, places, *new, keys, values)

    def begin(self, positions: Tensor) -> None:
        """Before the layers of a step: a mask of the blocks that hold tokens."""
        self._positions = positions
        num = len(positions)

        def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return kv_idx <= positions[b]

        used = (positions // PAGE_SIZE + 1).int()[:, None, None]
        logical = torch_flex.BlockMask.from_kv_blocks(
            used,
            self._blocks.expand(num, 1, 1, -1).contiguous(),
            BLOCK_SIZE=(PAGE_SIZE, PAGE_SIZE),
            mask_mod=causal,
            seq_lengths=(1, PAGE_SIZE * len(self._blocks)),
        )
        self._mask = self._paged.convert_logical_block_mask(logical, kv_len=self._kv_len)

    def __call__(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._stored[layer.index]
        new = (x[:, :, None] for x in (key, value))
        self._paged.assign(self._entries, self._positions[:, None], *new, keys, values)
        out = self._flex(
            query[:, :, None],
            keys,
            values,
            block_mask=self._mask,
            scale=layer.scale,
            enable_gqa=True,
        )
        return out.flatten(1)


class _Prompt:
    """Attention of one prompt by SDPA, whose keys and values are kept."""

    def __init__(self, cache: Any, b: int) -> None:
        self._cache, self._b = cache, b

    def __call__(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._cache.fill(layer, self._b, key, value)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=layer.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


@torch.inference_mode()
def _loop(
    cache_type: Callable[[Decoder, Workload], Any], model: Decoder, work: Workload
) -> Decoded:
    assert not any(model.config.windows) and model.config.softcap is None
    cache = cache_type(model, work)
    first = []
    for b, prompt in enumerate(work.prompts):
        tokens = torch.tensor(prompt, device=model.device)
        places = torch.arange(len(prompt), device=model.device)
        logits = model(tokens, places, _Prompt(cache, b), places[-1:])
        first.append(logits.argmax(-1))
    tokens = torch.cat(first)
    positions = torch.tensor([len(p) for p in work.prompts], device=model.device)
    found = [tokens.tolist()]
    begin = now(model)
    for _ in range(work.num_tokens - 1):
        cache.begin(positions)
        tokens = model(tokens, positions, cache).argmax(-1)
        positions = positions + 1
        found.append(tokens.tolist())  # as a server would need it
    seconds = now(model) - begin
    return Decoded([list(row) for row in zip(*found, strict=True)], seconds)


def sdpa(model: Decoder, work: Workload) -> Decoded:
    """A contiguous cache, padded to the longest sequence."""
    return _loop(PaddedCache, model, work)


def torch_paged(model: Decoder, work: Workload) -> Decoded:
    """torch's flex_attention over its own pages."""
    return _loop(TorchPagedCache, model, work)


PEERS: dict[str, Decode] = {"sdpa": sdpa, "torch-flex": torch_paged}


def now(model: Decoder) -> float:
    """Seconds, once the device is done; of this process alone where it has one thread, which other
    processes disturb less."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()
