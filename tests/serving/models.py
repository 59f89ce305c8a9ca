"""Tiny random models, with weights that make their texts varied."""

from __future__ import annotations

from typing import Any

import torch

from attnloom.serving import Decoder, ModelConfig, random_decoder
from attnloom.serving.text import ByteTokenizer

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": ByteTokenizer.SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": ByteTokenizer.BOS,
    "eos_token_id": ByteTokenizer.EOS,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}
GEMMA: dict[str, Any] = {
    **LLAMA,
    "model_type": "gemma2",
    "num_hidden_layers": 3,
    "sliding_window": 24,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny(given: dict[str, Any] | None = None, seed: int = 0) -> Decoder:
    """A decoder whose weights are wide enough that attention matters."""
    model = random_decoder(ModelConfig.from_dict(given or LLAMA), "cpu", torch.float32, seed)
    widen(model, seed)
    return model


def widen(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw all weights anew, with a deviation of 0.3; norms around what they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * 0.3
            weight.copy_(weight + noise if "norm" in name else noise)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens, none of which ends a text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()
