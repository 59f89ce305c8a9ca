"""Folders that hold no model, and the command that serves one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnloom.cli.main import main
from attnloom.errors import OptionError
from attnloom.serving import ModelConfig, ModelError, SamplingParams, load_decoder
from attnloom.serving.launch import ServeConfig, build_engine
from tests.serving.models import GEMMA, LLAMA, tiny

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'serve'")


def save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.save_file(weights, folder / "model.safetensors")


def weights_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    named = tiny(config).state_dict().items()
    return {n if n.startswith("lm_head") else f"model.{n}": w.clone() for n, w in named}


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma2"])
def test_weights_come_back(tmp_path: Path, config: dict[str, Any]) -> None:
    save(tmp_path, config, weights_of(config))
    model = load_decoder(tmp_path, dtype=torch.bfloat16)
    want = tiny(config).state_dict()
    assert {*model.state_dict()} == {*want}
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, want[name].bfloat16())
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; attnloom serves llama and gemma2"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type is 'yarn'"),
        ({"hidden_act": "relu"}, "the activation 'relu' is not known"),
        ({"hidden_size": None}, "config.json of a llama model: hidden_size is None"),
        ({"vocab_size": "many"}, "config.json of a llama model: .*many"),
    ],
    ids=["type", "rope", "activation", "null", "text"],
)
def test_configs_that_are_not_served(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        ModelConfig.from_dict({**LLAMA, **change})


def test_a_config_that_lacks_a_size() -> None:
    given = {k: v for k, v in LLAMA.items() if k != "intermediate_size"}
    with pytest.raises(ModelError, match="lacks 'intermediate_size'"):
        ModelConfig.from_dict(given)


def test_old_and_new_names_of_the_rotary_scaling() -> None:
    scaling = {"type": "linear", "factor": 4.0}
    old = ModelConfig.from_dict({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    assert old == ModelConfig.from_dict({**LLAMA, "rope_parameters": new})


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelError, match=r"holds no \*.safetensors"):
        load_decoder(tmp_path)
    weights = weights_of(LLAMA)
    more = {**weights, "model.extra": torch.zeros(1)}
    save(tmp_path, LLAMA, more)
    with pytest.raises(ModelError, match=r"unknown model.extra"):
        load_decoder(tmp_path)
    less = {k: w for k, w in weights.items() if "norm" not in k}
    save(tmp_path, LLAMA, less)
    with pytest.raises(ModelError, match=r"missing layers.0.input_layernorm.weight, .* and 1 more"):
        load_decoder(tmp_path)
    save(tmp_path, {**LLAMA, "num_key_value_heads": 4}, weights)
    with pytest.raises(ModelError, match=r"k_proj.weight is \[32, 32\], .* makes it \[64, 32\]"):
        load_decoder(tmp_path)


def test_a_cache_too_small_for_a_sequence() -> None:
    with pytest.raises(OptionError, match=r"holds 16 pages, but .* 4096 tokens takes 64"):
        build_engine(ServeConfig(cache_bytes=1 << 19))


def test_an_engine_from_a_folder(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'serve'")
    save(tmp_path, LLAMA, weights_of(LLAMA))
    letters = {chr(97 + i): i for i in range(26)}
    tokenizers.Tokenizer(tokenizers.models.BPE(letters, [])).save(str(tmp_path / "tokenizer.json"))
    config = ServeConfig(tmp_path, device="cpu", cache_bytes=1 << 20, speculate=True)
    with pytest.raises(OptionError, match="max_length is 4096, but the model knows 512 positions"):
        build_engine(replace(config, max_length=4096))
    engine = build_engine(config)
    assert engine.limits.max_length == 512  # as many positions as the model knows
    assert engine.tokenizer is not None and engine.tokenizer.encode("cab") == [2, 0, 1]
    (tokens,) = engine.generate([[2, 0, 1]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(tokens) == 8


def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["serve"]) == 2
    assert "give the folder of a model, or --tiny" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "none")]) == 1
    assert "config.json cannot be read" in capsys.readouterr().err
    assert main(["serve", "--tiny", "--cache-gib", "0.0001"]) == 2
    assert "a sequence of 4096 tokens takes" in capsys.readouterr().err
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "fastapi" else find(name)
    )
    assert main(["serve", "--tiny"]) == 2
    error = capsys.readouterr().err
    assert "attnloom serve needs fastapi, which the core" in error
    assert "pip install 'attnloom[serve]'" in error


def test_the_engine_needs_no_extra() -> None:
    """fastapi, pydantic and the like are imported by the endpoint alone."""
    code = "import sys, attnloom.serving, attnloom.cli.serve\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "attnloom" in loaded
    assert not loaded & {"fastapi", "uvicorn", "pydantic", "tokenizers", "safetensors"}
