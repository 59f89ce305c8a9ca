"""Logits of our decoders against those of transformers, the same weights in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attnloom.paged import PagedKVCache
from attnloom.serving import Request, load_decoder
from attnloom.serving.drafts import DraftTree
from attnloom.serving.request import Sequence
from attnloom.serving.runner import ModelRunner
from attnloom.serving.scheduler import Chunk, Limits
from tests.serving.models import GEMMA, LLAMA, LLAMA3_ROPE, prompt, widen

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama3-rope": {**LLAMA, "rope_parameters": LLAMA3_ROPE},
    "linear-rope": {
        **LLAMA,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
    "biased-tied-mha": {
        **LLAMA,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "gemma2": GEMMA,
    "gemma2-mqa": {**GEMMA, "num_key_value_heads": 1, "head_dim": 24},
}


def _theirs(given: dict[str, Any], folder: Path) -> Any:
    """A random model of transformers, saved to a folder."""
    transformers = pytest.importorskip("transformers", reason="needs the extra 'dev'")
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    }
    config, model = kinds[given["model_type"]]
    values = {k: v for k, v in given.items() if k != "model_type"}
    made = model(config(**values, attn_implementation="eager")).eval()
    widen(made)
    made.save_pretrained(folder)
    return made


def _ours(folder: Path, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of all tokens, computed in chunks: [T, V]."""
    model = load_decoder(folder)
    cache = PagedKVCache(
        16, 16, model.config.num_kv_heads, model.config.head_dim, num_layers=model.config.num_layers
    )
    runner = ModelRunner(model, cache, Limits(max_length=256))
    rows = []
    sequence = Sequence.of(Request(tuple(tokens)))
    sequence.cached, sequence.tokens = cache.new(), []
    for size in sizes:
        # Drafts that are a chain: logits come out at all of them.
        start = len(sequence.tokens)
        sequence.tokens = tokens[: start + 1]
        rest = tokens[start + 1 : start + size]
        draft = DraftTree(tuple(rest), tuple(range(-1, len(rest) - 1))) if rest else None
        chunk = Chunk(sequence, 1, draft)
        rows.append(runner.run([chunk]).rows)
        sequence.tokens = tokens[: start + size]
        sequence.num_computed = start + size
    return torch.cat(rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Longer than the window, prompts whole and in chunks, single tokens at the end."""
    theirs = _theirs(CONFIGS[name], tmp_path)
    tokens = prompt(100)
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0]
    scale = want.abs().max()
    for sizes in ([100], [33, 1, 40, 24, 1, 1]):
        found = _ours(tmp_path, tokens, sizes)
        assert (found - want).abs().max() < 2e-5 * scale
    model = load_decoder(tmp_path)
    last = _last_logits(model, tokens)
    assert (last - want[-1]).abs().max() < 2e-5 * scale


def _last_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Through the path of prompts, without drafts."""
    cache = PagedKVCache(
        16, 16, model.config.num_kv_heads, model.config.head_dim, num_layers=model.config.num_layers
    )
    sequence = Sequence.of(Request(tuple(tokens)))
    sequence.cached = cache.new()
    runner = ModelRunner(model, cache, Limits(max_length=256))
    return runner.run([Chunk(sequence, len(tokens), None)]).rows[-1]
