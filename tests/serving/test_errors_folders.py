"""Folders that hold no model, and packages that are not there; texts of errors are pinned."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnloom.errors import AttnloomError, OptionError
from attnloom.serving import FolderTokenizer, ModelError, RequestError, load_decoder
from attnloom.serving import weights as weights_module
from tests.serving.models import LLAMA, tiny


def _config_file(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA))


def _no_config(folder: Path) -> None:
    load_decoder(folder)


def _no_weights(folder: Path) -> None:
    _config_file(folder)
    load_decoder(folder)


def _stored(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    save = pytest.importorskip("safetensors.torch", reason="needs the extra 'serve'").save_file
    _config_file(folder)
    stored = {f"model.{n}": w.clone() for n, w in tiny(LLAMA).state_dict().items()}
    stored["lm_head.weight"] = stored.pop("model.lm_head.weight")
    change(stored)
    save(stored, folder / "model.safetensors")
    load_decoder(folder)


def _other_weights(folder: Path) -> None:
    def rename(stored: dict[str, torch.Tensor]) -> None:
        stored["model.extra"] = stored.pop("model.norm.weight")

    _stored(folder, rename)


def _other_shape(folder: Path) -> None:
    _stored(folder, lambda stored: stored.update({"model.norm.weight": torch.zeros(3)}))


def _damaged_weights(folder: Path) -> None:
    _config_file(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    load_decoder(folder)


def _quantised_weights(folder: Path) -> None:
    _stored(
        folder, lambda stored: stored.update({"model.norm.weight": torch.zeros(32).to(torch.int8)})
    )


def _whole_numbers(folder: Path) -> None:
    _config_file(folder)
    load_decoder(folder, dtype=torch.int8)


def _no_device(folder: Path) -> None:
    _config_file(folder)
    load_decoder(folder, "cuda:x")


def _no_safetensors(folder: Path) -> None:
    weights_module._reader()


def _no_tokenizer(folder: Path) -> None:
    FolderTokenizer(folder)


def _no_tokenizers(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    FolderTokenizer(folder)


def _tokenizer(folder: Path, template: str) -> FolderTokenizer:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'serve'")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return FolderTokenizer(folder)


def _refusing_template(folder: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    _tokenizer(folder, template).chat([{"role": "user", "content": "a"}])


def _no_jinja(folder: Path) -> None:
    _tokenizer(folder, "{{ messages }}").chat([{"role": "user", "content": "a"}])


def _broken_json(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    _tokenizer(folder, "")


# name -> (what is done in an empty folder, packages that are not there, error, its text)
FOLDERS: dict[str, tuple[Callable[[Path], None], tuple[str, ...], type[AttnloomError], str]] = {
    "no config": (
        _no_config,
        (),
        ModelError,
        "model/config.json cannot be read: [Errno 2] No such file or directory: "
        "'model/config.json'. A model is a folder with config.json and *.safetensors, as "
        "save_pretrained writes it.",
    ),
    "no weights": (
        _no_weights,
        (),
        ModelError,
        "model holds no *.safetensors; weights in other forms are not read. Save the model with "
        "save_pretrained.",
    ),
    "other weights": (
        _other_weights,
        (),
        ModelError,
        "the weights in model are not those of its config.json: missing norm.weight. unknown "
        "model.extra. Save both with save_pretrained.",
    ),
    "other shape": (
        _other_shape,
        (),
        ModelError,
        "weight model.norm.weight is [3], but config.json makes it [32].",
    ),
    "damaged weights": (
        _damaged_weights,
        (),
        ModelError,
        "model/model.safetensors cannot be read: Error while deserializing header: header too "
        "large. Download it again, or save the model with save_pretrained.",
    ),
    "quantised weights": (
        _quantised_weights,
        (),
        ModelError,
        "weight model.norm.weight is torch.int8; attnloom serves no quantised weights. Save the "
        "model in bfloat16, float16 or float32.",
    ),
    "weights of integers": (
        _whole_numbers,
        (),
        OptionError,
        "dtype is torch.int8; it must be torch.bfloat16, torch.float16 or torch.float32, or None: "
        "that of the files.",
    ),
    "no device": (
        _no_device,
        (),
        OptionError,
        "device is 'cuda:x', which torch cannot use: Invalid device string: 'cuda:x'.",
    ),
    "no safetensors": (
        _no_safetensors,
        ("safetensors",),
        ModelError,
        "reading weights needs the package safetensors: pip install 'attnloom[serve]'.",
    ),
    "no tokenizer": (
        _no_tokenizer,
        (),
        ModelError,
        "model holds no tokenizer.json, the only form that is read.",
    ),
    "no tokenizers": (
        _no_tokenizers,
        ("tokenizers",),
        ModelError,
        "reading tokenizer.json needs the package tokenizers: pip install 'attnloom[serve]'.",
    ),
    "refusing template": (
        _refusing_template,
        (),
        RequestError,
        "the model's chat template refuses these messages: roles must alternate",
    ),
    "no jinja": (
        _no_jinja,
        ("jinja2.sandbox",),
        ModelError,
        "the model's chat template needs the package jinja2: pip install 'attnloom[serve]'.",
    ),
    "broken JSON": (
        _broken_json,
        (),
        ModelError,
        "model/tokenizer_config.json is not JSON: Expecting property name enclosed in double "
        "quotes: line 1 column 2 (char 1).",
    ),
}


def in_folder(name: str, folder: Path, patch: pytest.MonkeyPatch) -> str:
    """The text of an error, with the folder called 'model'."""
    act, missing, kind, _ = FOLDERS[name]
    found = importlib.import_module

    def import_module(wanted: str) -> Any:
        if wanted in missing:
            raise ImportError(wanted)
        return found(wanted)

    patch.setattr(importlib, "import_module", import_module)
    with pytest.raises(kind) as caught:
        act(folder)
    return str(caught.value).replace(str(folder), "model")


@pytest.mark.parametrize("name", FOLDERS)
def test_errors_of_folders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_folder(name, tmp_path, monkeypatch) == FOLDERS[name][3]
