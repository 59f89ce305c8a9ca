"""ModelConfig: the shape of a decoder, read from the config.json that Hugging Face writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnloom.errors import ModelError
from attnloom.serving.config_fields import Fields

MODEL_TYPES = ("llama", "gemma2")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. kind: default, linear or llama3; the last four are llama3's, linear takes
    factor alone."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What is special about the attention of one layer.

    Attributes:
        index: of the layer, which is also that of its keys and values in the cache.
        scale: factor on query @ key^T.
        window_left: keys before the query that it sees, itself excluded; None: all.
        softcap: scores are kept within -softcap .. softcap; None: as they are.
    """

    index: int
    scale: float
    window_left: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder in the style of Llama or of Gemma 2.

    Attributes:
        gemma: norms after attention and MLP as well, weights of norms as 1 + w, embeddings times
            sqrt(hidden_size).
        windows: window_left of each layer, None where it sees everything.
        scale_dim: scores are divided by its square root.
        attention_bias: of q, k, v and o.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    windows: tuple[int | None, ...]
    scale_dim: float
    activation: str = "silu"
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    softcap: float | None = None
    logit_softcap: float | None = None
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    gemma: bool = False
    eos_tokens: tuple[int, ...] = ()

    def layer(self, index: int) -> LayerAttention:
        """The attention of layer `index`."""
        return LayerAttention(index, self.scale_dim**-0.5, self.windows[index], self.softcap)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read folder/config.json.

        Raises:
            ModelError: there is none, or it describes a model that is not known here.
        """
        path = folder / "config.json"
        try:
            given = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{path} cannot be read: {error}. A model is a folder with config.json and "
                "*.safetensors, as save_pretrained writes it."
            ) from None
        return cls.from_dict(given)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ModelConfig:
        """Read what config.json holds.

        Raises:
            ModelError: a model_type, a rotary scaling or an activation that is not known here,
                quantised weights, or a value that is missing or means nothing.
        """
        if not isinstance(given, Mapping):
            raise ModelError(f"config.json holds a {type(given).__name__}, not an object.")
        kind = given.get("model_type")
        if kind not in MODEL_TYPES:
            raise ModelError(
                f"model_type is {kind!r}; attnloom serves {' and '.join(MODEL_TYPES)}. Another "
                "architecture needs a decoder of its own in attnloom/serving."
            )
        if given.get("quantization_config"):
            raise ModelError(
                f"quantization_config is {given['quantization_config']!r}; attnloom serves no "
                "quantised weights. Save the model in bfloat16, float16 or float32."
            )
        gemma, fields = kind == "gemma2", Fields(f"a {kind} model", given)
        num_layers, head_dim = fields.whole("num_hidden_layers"), _read_head_dim(fields, gemma)
        return cls(
            vocab_size=fields.whole("vocab_size"),
            hidden_size=fields.whole("hidden_size"),
            intermediate_size=fields.whole("intermediate_size"),
            num_layers=num_layers,
            num_heads=fields.whole("num_attention_heads"),
            num_kv_heads=_read_kv_heads(fields),
            head_dim=head_dim,
            max_length=fields.whole("max_position_embeddings"),
            windows=_read_windows(fields, num_layers) if gemma else (None,) * num_layers,
            scale_dim=fields.above_0("query_pre_attn_scalar", 256) if gemma else head_dim,
            activation=_read_activation(given, gemma),
            norm_eps=fields.number("rms_norm_eps", 1e-6, lambda eps: eps >= 0, "0 or more"),
            rope=_read_rope(fields),
            softcap=fields.cap("attn_logit_softcapping", 50.0) if gemma else None,
            logit_softcap=fields.cap("final_logit_softcapping", 30.0) if gemma else None,
            tied=fields.truth("tie_word_embeddings", gemma),
            attention_bias=fields.truth("attention_bias"),
            mlp_bias=fields.truth("mlp_bias"),
            gemma=gemma,
            eos_tokens=_read_tokens(fields),
        )


def _read_head_dim(fields: Fields, gemma: bool) -> int:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim = fields.whole_or("head_dim", 256 if gemma else hidden // heads)
    if not gemma and not fields.given.get("head_dim") and hidden % heads:
        wanted = f"a multiple of num_attention_heads, {heads}, or head_dim be given"
        raise fields.refusal("hidden_size", hidden, wanted)
    if head_dim % 2 or head_dim < 1:
        raise fields.refusal("head_dim", head_dim, "even, as a rotary embedding turns pairs")
    return head_dim


def _read_kv_heads(fields: Fields) -> int:
    heads = fields.whole("num_attention_heads")
    found = fields.whole_or("num_key_value_heads", heads)
    if heads % found:
        wanted = f"a divisor of num_attention_heads, {heads}"
        raise fields.refusal("num_key_value_heads", found, wanted)
    return found


def _read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    given = fields.given
    window = None
    if given.get("sliding_window", 4096) is not None:
        window = fields.whole_or("sliding_window", 4096)
    kinds = given.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)
    ]
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(k not in known for k in kinds)
    ):
        raise ModelError(
            f"layer_types is {kinds}; each of the {num_layers} layers is 'full_attention' or "
            "'sliding_attention'."
        )
    # Hugging Face's window counts the query itself.
    return tuple(
        window - 1 if window is not None and kind == "sliding_attention" else None for kind in kinds
    )


def _read_activation(given: Mapping[str, Any], gemma: bool) -> str:
    name = given.get("hidden_activation") if gemma else None
    name = name or given.get("hidden_act") or ("gelu_pytorch_tanh" if gemma else "silu")
    if name not in ACTIVATIONS:
        raise ModelError(f"the activation {name!r} is not known; known are {ACTIVATIONS}.")
    return name


def _read_rope(fields: Fields) -> Rope:
    # Up to version 4 of transformers: rope_theta and rope_scaling; then both in rope_parameters.
    given = fields.given
    name = "rope_parameters" if given.get("rope_parameters") else "rope_scaling"
    scaling = given.get(name) or {}
    if not isinstance(scaling, Mapping):
        raise fields.refusal(name, scaling, "an object")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(
            f"rope_type is {kind!r}; attnloom serves 'default', 'linear' and 'llama3'."
        )
    inner = Fields(f"{fields.of}, in {name}", scaling)
    theta = (inner if scaling.get("rope_theta") else fields).above_0("rope_theta", 10000.0)
    if kind == "default":
        return Rope(theta)
    factor = inner.above_0("factor")
    if kind == "linear":
        return Rope(theta, kind, factor)
    low, high = inner.above_0("low_freq_factor"), inner.above_0("high_freq_factor")
    if low >= high:
        raise inner.refusal("low_freq_factor", low, f"below high_freq_factor, {high}")
    length = "original_max_position_embeddings"
    original = inner.whole_or(length, fields.whole("max_position_embeddings"))
    return Rope(theta, kind, factor, low, high, original)


def _read_tokens(fields: Fields) -> tuple[int, ...]:
    value = fields.given.get("eos_token_id")
    found = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in found):
        raise fields.refusal("eos_token_id", value, "a token or a list of them")
    return tuple(found)
