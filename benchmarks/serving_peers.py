"""Who serves in benchmarks.serving: the same decoder over three caches, each step greedy.

`attnloom` is the whole engine with its defaults: scheduler, paged cache, sampling, graphs. Peers
are bare loops: a batch of as many sequences, whose prompts are computed one by one without padding
and which then decode until the last one is done. They get what helps them: requests sorted by
output, and steps as CUDA graphs where torch can capture them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex

from attnloom.serving import Decoder, Engine, Limits, Request, SamplingParams
from attnloom.serving.config import LayerAttention
from benchmarks.serving_work import PAGE_SIZE, Contender, Run, Served, Workload

_WARM_UP = 3  # eager steps before a capture


def attnloom_engine(model: Decoder, work: Workload, **options: Any) -> Run:
    """Our engine; requests are queued at once. options: of the engine, else its defaults."""
    num, pages = len(work.prompts), work.longest // PAGE_SIZE
    limits = Limits(work.running, work.step_tokens, num, work.longest)
    sizes = {"num_pages": work.running * pages, "page_size": PAGE_SIZE}
    engine = Engine(model, None, limits, **sizes, **options)
    engine.warm_up()

    def run(limit: float) -> Served:
        found: dict[str, list[int]] = {}
        start, until = now(model), time.perf_counter() + limit
        for prompt, count in zip(work.prompts, work.counts, strict=True):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            found[engine.add(Request(tuple(prompt), params))] = []
        begun = start
        while engine.busy and time.perf_counter() < until:
            decoding = all(found.values())
            for output in engine.step():
                found[output.name] += output.tokens
            if not decoding:
                begun = now(model)
        end = now(model)
        return Served(list(found.values()), end - start, end - begun)

    return run


class PaddedCache:
    """Keys and values in [B, Hkv, MAX_LEN, D] tensors, attended by SDPA with a mask of lengths."""

    def __init__(self, model: Decoder, num: int, longest: int) -> None:
        config = model.config
        shape = (config.num_layers, 2, num, config.num_kv_heads, longest, config.head_dim)
        self._stored = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._entries = torch.arange(num, device=model.device)
        self._at = torch.arange(longest, device=model.device)
        self._positions = self._entries
        self._bias = torch.zeros(())

    def fill(self, layer: LayerAttention, b: int, key: Tensor, value: Tensor) -> None:
        """Keys and values [L, Hkv, D] of a prompt."""
        for side, new in enumerate((key, value)):
            self._stored[layer.index, side, b, :, : len(new)] = new.transpose(0, 1)

    def begin(self, positions: Tensor) -> None:
        """Before the layers of a step: the position of each sequence's token."""
        self._positions = positions
        hidden = (self._at > positions[:, None])[:, None, None]
        self._bias = torch.zeros_like(hidden, dtype=self._stored.dtype).masked_fill(
            hidden, -torch.inf
        )

    def __call__(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._stored[layer.index]
        keys[self._entries, :, self._positions] = key
        values[self._entries, :, self._positions] = value
        # Heads that share keys as rows of one query: no copies of keys, and SDPA's fused kernels,
        # which take a mask or groups of heads, but not both.
        groups = query.unflatten(1, (keys.size(1), -1))  # [B, Hkv, G, D]
        bias = self._bias.expand(-1, keys.size(1), groups.size(2), -1)
        out = functional.scaled_dot_product_attention(
            groups, keys, values, attn_mask=bias, scale=layer.scale
        )
        return out.flatten(1)


class TorchPagedCache:
    """torch's experimental PagedAttention with compiled flex_attention."""

    def __init__(self, model: Decoder, num: int, longest: int) -> None:
        from torch.nn.attention.experimental._paged_attention import PagedAttention

        config, width = model.config, longest // PAGE_SIZE
        self._device = model.device
        self._paged: Any = PagedAttention(num * width, PAGE_SIZE, num, device=str(model.device))
        for b in range(num):
            entry = torch.tensor([b], device=model.device)
            self._paged.reserve(entry, torch.tensor([longest], device=model.device))
        shape = (config.num_layers, 2, 1, config.num_kv_heads, num * longest, config.head_dim)
        self._stored = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._entries = torch.arange(num, device=model.device)
        self._blocks = torch.arange(width, device=model.device, dtype=torch.int32)
        self._positions = self._entries
        self._mask: Any = None
        self._flex: Any = torch.compile(torch_flex.flex_attention, dynamic=False)
        self._kv_len = torch.full((num,), longest, device=model.device)

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


class _Batch:
    """Sequences that are served from their prompts to the end of the longest, over one cache."""

    def __init__(self, model: Decoder, cache: Any, num: int) -> None:
        assert not any(model.config.windows) and model.config.softcap is None
        self._model, self._cache = model, cache
        self._tokens = torch.zeros(num, dtype=torch.int64, device=model.device)
        self._positions = torch.zeros(num, dtype=torch.int64, device=model.device)
        self._graph = _captured(self._step) if model.device.type == "cuda" else None
        if self._graph is None:
            self._step()  # compiles

    def _step(self) -> None:
        """The tokens that follow, in place."""
        self._cache.begin(self._positions)
        logits = self._model(self._tokens, self._positions, self._cache)
        self._tokens.copy_(logits.argmax(-1))
        self._positions += 1

    def prompt(self, prompts: list[list[int]]) -> list[list[int]]:
        """The first token of each."""
        device = self._model.device
        for b, prompt in enumerate(prompts):
            tokens = torch.tensor(prompt, device=device)
            places = torch.arange(len(prompt), device=device)
            logits = self._model(tokens, places, _Prompt(self._cache, b), places[-1:])
            self._tokens[b] = logits[0].argmax()
        self._positions.copy_(torch.tensor([len(p) for p in prompts]))
        return [[token] for token in self._tokens.tolist()]

    def decode(self, found: list[list[int]], counts: list[int], until: float) -> None:
        """Go on until the last sequence has its tokens, or until a time."""
        for at in range(1, max(counts)):
            if time.perf_counter() > until:
                return
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
            tokens = self._tokens.tolist()  # as a server would need it
            for row, token, count in zip(found, tokens, counts, strict=True):
                if at < count:
                    row.append(token)


def _captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """A step as a graph; None, with a note, where torch cannot capture it."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        print(f"not captured: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return graph


def _in_batches(cache_type: Callable[[Decoder, int, int], Any], one_length: bool) -> Contender:
    """A contender that serves batch after batch.

    one_length: all caches are as long as the longest, as a compiler wants it; else each as its
    batch needs.
    """

    @torch.inference_mode()
    def prepare(model: Decoder, work: Workload) -> Run:
        batches = work.batches()
        parts = [work.part(requests) for requests in batches]
        sizes = [(len(part.prompts), (work if one_length else part).longest) for part in parts]
        made = {size: _Batch(model, cache_type(model, *size), size[0]) for size in {*sizes}}
        made[sizes[0]].prompt(parts[0].prompts[:1])  # kernels are loaded

        @torch.inference_mode()
        def run(limit: float) -> Served:
            tokens: list[list[int]] = [[] for _ in work.prompts]
            start, decoding = now(model), 0.0
            until = time.perf_counter() + limit
            for requests, part, size in zip(batches, parts, sizes, strict=True):
                if time.perf_counter() > until:
                    break
                batch = made[size]
                found = batch.prompt(part.prompts)
                begun = now(model)
                batch.decode(found, part.counts, until)
                decoding += now(model) - begun
                for i, row in zip(requests, found, strict=True):
                    tokens[i] = row
            return Served(tokens, now(model) - start, decoding)

        return run

    return prepare


PEERS: dict[str, Contender] = {
    "sdpa": _in_batches(PaddedCache, one_length=False),
    "torch-flex": _in_batches(TorchPagedCache, one_length=True),
}


def now(model: Decoder) -> float:
    """Seconds, once the device is done; of this process alone where it has one thread, which other
    processes disturb less."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()
