"""Weights of a decoder from *.safetensors files with Hugging Face's names."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from torch import nn

from attnloom.errors import ModelError
from attnloom.serving.config import ModelConfig
from attnloom.serving.decoder import Decoder
from attnloom.serving.joined import join_weights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_decoder(
    folder: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Decoder:
    """A decoder with the weights of a folder that save_pretrained wrote.

    Args:
        folder: with config.json and *.safetensors.
        dtype: of weights, activations and cache; default: that of the files.
    Raises:
        ModelError: files are missing, or do not hold the weights that config.json describes.
    """
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder} holds no *.safetensors; weights in other forms are not read. Save the model "
            "with save_pretrained."
        )
    with torch.device("meta"):
        model = Decoder(config)
    lacking = {name: tuple(p.shape) for name, p in model.named_parameters()}
    unknown: list[str] = []
    read = _reader()
    for path in files:
        with read(str(path), framework="pt", device=str(device)) as stored:
            for full_name in stored.keys():  # noqa: SIM118
                name = full_name.removeprefix("model.")
                if (name == "lm_head.weight" and config.tied) or name.endswith("inv_freq"):
                    continue
                if name not in lacking:
                    unknown.append(full_name)
                    continue
                tensor = stored.get_tensor(full_name)
                _check_shape(full_name, tuple(tensor.shape), lacking.pop(name))
                _put(model, name, tensor.to(dtype or tensor.dtype))
    if lacking or unknown:
        raise ModelError(
            f"the weights in {folder} are not those of its config.json: "
            f"{_some('missing', sorted(lacking))}{_some('unknown', sorted(unknown))}"
            "Save both with save_pretrained."
        )
    join_weights(model)
    return model.requires_grad_(False).eval()


def _reader():
    try:
        return importlib.import_module("safetensors").safe_open
    except ImportError:
        raise ModelError(
            "reading weights needs the package safetensors: pip install 'attnloom[serve]'."
        ) from None


def _put(model: Decoder, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ModelError(
            f"weight {name} is {list(found)}, but config.json makes it {list(wanted)}."
        )


def _some(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{what} {shown}. " if names else ""
