"""Configurations that describe no model."""

from __future__ import annotations

from typing import Any

from tests.serving.models import LLAMA3_ROPE

WHOLE = "it must be a whole number, 1 or more."
LINEAR = {"rope_type": "linear"}
# What a config.json has in place of what a model can be, and what is said of it.
MEANINGLESS: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 0}, f": num_attention_heads is 0; {WHOLE}"),
    ({"num_hidden_layers": -1}, f": num_hidden_layers is -1; {WHOLE}"),
    ({"hidden_size": 32.7}, f": hidden_size is 32.7; {WHOLE}"),
    ({"hidden_size": "32"}, f": hidden_size is '32'; {WHOLE}"),
    ({"intermediate_size": 0}, f": intermediate_size is 0; {WHOLE}"),
    ({"vocab_size": True}, f": vocab_size is True; {WHOLE}"),
    ({"max_position_embeddings": float("inf")}, f": max_position_embeddings is inf; {WHOLE}"),
    ({"head_dim": -1}, f": head_dim is -1; {WHOLE}"),
    ({"head_dim": 15}, ": head_dim is 15; it must be even, as a rotary embedding turns pairs."),
    (
        {"num_key_value_heads": 3},
        ": num_key_value_heads is 3; it must be a divisor of num_attention_heads, 4.",
    ),
    (
        {"hidden_size": 33, "head_dim": None},
        ": hidden_size is 33; it must be a multiple of num_attention_heads, 4, or head_dim be "
        "given.",
    ),
    ({"rms_norm_eps": -1}, ": rms_norm_eps is -1; it must be a number 0 or more."),
    ({"rms_norm_eps": float("nan")}, ": rms_norm_eps is nan; it must be a number 0 or more."),
    ({"rope_theta": 0}, ": rope_theta is 0; it must be a number above 0."),
    ({"rope_scaling": "linear"}, ": rope_scaling is 'linear'; it must be an object."),
    ({"rope_scaling": LINEAR}, ", in rope_scaling lacks 'factor'."),
    (
        {"rope_scaling": {**LINEAR, "factor": 0}},
        ", in rope_scaling: factor is 0; it must be a number above 0.",
    ),
    (
        {"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 4.0}},
        ", in rope_parameters: low_freq_factor is 4.0; it must be below high_freq_factor, 4.0.",
    ),
    (
        {"eos_token_id": "</s>"},
        ": eos_token_id is '</s>'; it must be a token or a list of them.",
    ),
    ({"mlp_bias": "false"}, ": mlp_bias is 'false'; it must be true or false."),
]
