"""The decoder: layers in the style of Llama and of Gemma 2 over any attention.

Parameters have the names that Hugging Face gives them, without "model." in front. Tokens of all
sequences of a step come as one row, [T]; which of them see each other is the attention's affair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attnloom.errors import OptionError, ShapeError
from attnloom.serving.config import LayerAttention, ModelConfig, Rope
from attnloom.serving.joined import Joined, join_weights
from attnloom.serving.ops import Heads, Norm, Ops, Turn, ops_for


class Attention(Protocol):
    """Attention of a step: keys and values of its tokens are kept, queries see what came before.

    layer: what a LayerAttention says of it: its index, scale, window_left and softcap.
    """

    def __call__(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq * D]."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What layers of a step share. turn: cosines and sines of all tokens, [T, 1, D / 2] each."""

    turn: Turn
    attention: Attention
    ops: Ops


class RmsNorm(nn.Module):
    """x / rms(x) * weight, in Gemma's form or in Llama's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.eps, self.gemma = config.norm_eps, config.gemma

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.norm(x, Norm(self.weight, self.eps, self.gemma))

    def after(self, x: Tensor, added: Tensor | None, ops: Ops) -> tuple[Tensor, Tensor]:
        """x + added, and that normed."""
        if added is None:
            return x, self(x, ops)
        return ops.add_norm(x, added, Norm(self.weight, self.eps, self.gemma))


class SelfAttention(Joined):
    """Projections, rotary embedding, attention, projection."""

    joins = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.layer = config.layer(index)
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        inner, outer = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, inner, bias)
        self.k_proj = nn.Linear(hidden, outer, bias)
        self.v_proj = nn.Linear(hidden, outer, bias)
        self.o_proj = nn.Linear(inner, hidden, bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        query, key, value = step.ops.rotate(self.product(x), step.turn, self.heads)
        found = step.attention(self.layer, query, key, value)
        wanted = (query.size(0), self.heads.num_q * self.heads.dim)
        if not isinstance(found, Tensor) or found.shape != wanted:
            raise ShapeError(self._misshapen(found, query, wanted))
        return self.o_proj(found)

    def _misshapen(self, found: object, query: Tensor, wanted: tuple[int, int]) -> str:
        shape = [*found.shape] if isinstance(found, Tensor) else f"a {type(found).__name__}"
        return (
            f"the attention given to the decoder returned {shape} in layer {self.layer.index}; "
            f"for a query [T, Hq, D] of {[*query.shape]} it must return [T, Hq * D], {[*wanted]}, "
            "as out.flatten(1) of [T, Hq, D] is."
        )


class Mlp(Joined):
    """down(activation(gate(x)) * up(x))."""

    joins = ("gate_proj", "up_proj")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias)
        self.up_proj = nn.Linear(hidden, inner, bias)
        self.down_proj = nn.Linear(inner, hidden, bias)
        self.activation = config.activation

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return self.down_proj(ops.gated(self.product(x), self.activation))


class LlamaLayer(nn.Module):
    """Norms before attention and before the MLP.

    What a block gives is added to x by the norm behind it: a layer takes x and what is still to be
    added, and gives both.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config)
        self.self_attn = SelfAttention(config, index)
        self.post_attention_layernorm = RmsNorm(config)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, added: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        x, normed = self.input_layernorm.after(x, added, step.ops)
        x, normed = self.post_attention_layernorm.after(x, self.self_attn(normed, step), step.ops)
        return x, self.mlp(normed, step.ops)


class GemmaLayer(nn.Module):
    """Norms on both sides of attention and of the MLP; adds as a LlamaLayer does."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config)
        self.self_attn = SelfAttention(config, index)
        self.post_attention_layernorm = RmsNorm(config)
        self.pre_feedforward_layernorm = RmsNorm(config)
        self.mlp = Mlp(config)
        self.post_feedforward_layernorm = RmsNorm(config)

    def forward(self, x: Tensor, added: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        ops = step.ops
        x, normed = self.input_layernorm.after(x, added, ops)
        seen = self.post_attention_layernorm(self.self_attn(normed, step), ops)
        x, normed = self.pre_feedforward_layernorm.after(x, seen, ops)
        return x, self.post_feedforward_layernorm(self.mlp(normed, ops), ops)


class Decoder(nn.Module):
    """Tokens to logits.

    Attributes:
        kernels: whether norms, rotations, activations and what is appended to a cache take a kernel
            each in place of torch's operators; None: where a device has shown them right.
    """

    kernels: bool | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        layer = GemmaLayer if config.gemma else LlamaLayer
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer(config, i) for i in range(config.num_layers))
        self.norm = RmsNorm(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._frequencies: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def ops(self) -> Ops:
        """What runs between products."""
        return ops_for(self.device.type, self.dtype, self.kernels)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None = None
    ) -> Tensor:
        """Logits of some tokens of a step.

        Args:
            tokens, positions: [T] integers.
            rows: [R] which tokens' logits are wanted; all if None.
        Returns:
            [R, vocab_size] float32.
        """
        x = self.embed_tokens(tokens)
        if self.config.gemma:
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype)
        ops, added = self.ops, None
        step = Step(self._turn(positions, x.dtype), attention, ops)
        for layer in self.layers:
            x, added = layer(x, added, step)
        if rows is not None:
            x, added = x[rows], added if added is None else added[rows]
        x = self.norm.after(x, added, ops)[1]
        head = self.embed_tokens.weight if self.config.tied else self.lm_head.weight
        logits = F.linear(x, head)
        cap = self.config.logit_softcap
        return (logits if cap is None else cap * torch.tanh(logits / cap)).float()

    def _turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all tokens, [T, 1, D / 2] each."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            made = rope_frequencies(self.config.rope, self.config.head_dim)
            self._frequencies = made.to(positions.device)
        angles = positions[:, None, None].float() * self._frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle of each pair a position, [D / 2] float32.

    Source: Su et al. 2021, arXiv:2104.09864; the scaling of Llama 3.1 as in its release.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**powers
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # Slow pairs are slowed further by factor, fast ones are kept, between them it is blended.
        turns = rope.original_length * frequencies / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / rope.factor + kept * frequencies
    return frequencies


def check_device(device: torch.device | str) -> None:
    """Raise OptionError where torch has no such device, before anything is read for it."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # of a torch without CUDA
        said = str(error).splitlines()[0].split(". ")[0].rstrip(".")  # torch may go on for long
        raise OptionError(f"device is {str(device)!r}, which torch cannot use: {said}.") from None


def random_decoder(
    config: ModelConfig, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> Decoder:
    """A decoder with normal weights of standard deviation 0.02, made where it will run."""
    check_device(device)
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(0.0 if config.gemma else 1.0)
            else:
                parameter.normal_(0, 0.02, generator=generator)
    join_weights(model)
    return model.requires_grad_(False).eval()
