"""ModelConfig: the shape of a decoder, read from the config.json that Hugging Face writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnloom.errors import ModelError

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
            ModelError: a model_type, a rotary scaling or an activation that is not known here, or a
                value that is missing.
        """
        kind = given.get("model_type")
        if kind not in MODEL_TYPES:
            raise ModelError(
                f"model_type is {kind!r}; attnloom serves {' and '.join(MODEL_TYPES)}. Another "
                "architecture needs a decoder of its own in attnloom/serving."
            )
        gemma = kind == "gemma2"
        try:
            hidden, heads = int(given["hidden_size"]), int(given["num_attention_heads"])
            num_layers = int(given["num_hidden_layers"])
            head_dim = int(given.get("head_dim") or (256 if gemma else hidden // heads))
            scalar = given.get("query_pre_attn_scalar", 256) if gemma else head_dim
            return cls(
                vocab_size=int(given["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(given["intermediate_size"]),
                num_layers=num_layers,
                num_heads=heads,
                num_kv_heads=int(given.get("num_key_value_heads") or heads),
                head_dim=head_dim,
                max_length=int(given["max_position_embeddings"]),
                windows=_read_windows(given, num_layers) if gemma else (None,) * num_layers,
                scale_dim=float(scalar),
                activation=_read_activation(given, gemma),
                norm_eps=float(given.get("rms_norm_eps", 1e-6)),
                rope=_read_rope(given),
                softcap=given.get("attn_logit_softcapping", 50.0) if gemma else None,
                logit_softcap=given.get("final_logit_softcapping", 30.0) if gemma else None,
                tied=bool(given.get("tie_word_embeddings", gemma)),
                attention_bias=bool(given.get("attention_bias", False)),
                mlp_bias=bool(given.get("mlp_bias", False)),
                gemma=gemma,
                eos_tokens=_read_tokens(given.get("eos_token_id")),
            )
        except KeyError as error:
            raise ModelError(f"config.json of a {kind} model lacks {error}.") from None
        except (TypeError, ValueError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"config.json of a {kind} model: {error}.") from None


def _read_windows(given: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = given.get("sliding_window", 4096)
    kinds = given.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)
    ]
    if len(kinds) != num_layers or not {*kinds} <= {"full_attention", "sliding_attention"}:
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


def _read_rope(given: Mapping[str, Any]) -> Rope:
    # Up to version 4 of transformers: rope_theta and rope_scaling; then both in rope_parameters.
    scaling = given.get("rope_parameters") or given.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(
            f"rope_type is {kind!r}; attnloom serves 'default', 'linear' and 'llama3'."
        )
    theta = float(scaling.get("rope_theta") or given.get("rope_theta") or 10000.0)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, float(scaling["factor"]))
    original = scaling.get("original_max_position_embeddings")
    return Rope(
        theta,
        kind,
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(original or given["max_position_embeddings"]),
    )


def _read_tokens(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
