"""Weights of a decoder from *.safetensors files with Hugging Face's names."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnloom.errors import ModelError, OptionError
from attnloom.serving.config import ModelConfig
from attnloom.serving.decoder import Decoder, check_device
from attnloom.serving.joined import join_weights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NAMED = "torch.bfloat16, torch.float16 or torch.float32"


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
        OptionError: torch has no such device, or dtype is none of a decoder's.
    """
    folder = Path(folder)
    check_device(device)
    if dtype is not None and not _is_plain(dtype):
        raise OptionError(f"dtype is {dtype!r}; it must be {_NAMED}, or None: that of the files.")
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
        for full_name, load in _stored(read, path, device):
            name = full_name.removeprefix("model.")
            if (name == "lm_head.weight" and config.tied) or name.endswith("inv_freq"):
                continue
            if name not in lacking:
                unknown.append(full_name)
                continue
            tensor = load()
            _check_weight(full_name, tensor, lacking.pop(name))
            _put(model, name, tensor.to(dtype or tensor.dtype))
    if lacking or unknown:
        raise ModelError(
            f"the weights in {folder} are not those of its config.json: "
            f"{_some('missing', sorted(lacking))}{_some('unknown', sorted(unknown))}"
            "Save both with save_pretrained."
        )
    join_weights(model)
    return model.requires_grad_(False).eval()


def _stored(
    read: Any, path: Path, device: torch.device | str
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Names in a file, each with what loads its tensor.

    Raises:
        ModelError: it is damaged.
    """
    damage = importlib.import_module("safetensors").SafetensorError
    try:
        with read(str(path), framework="pt", device=str(device)) as stored:
            for name in stored.keys():  # noqa: SIM118
                yield name, functools.partial(stored.get_tensor, name)
    except (OSError, damage) as error:
        raise ModelError(
            f"{path} cannot be read: {error}. Download it again, or save the model with "
            "save_pretrained."
        ) from None


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


def _check_weight(name: str, found: torch.Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(found.shape) != wanted:
        raise ModelError(
            f"weight {name} is {list(found.shape)}, but config.json makes it {list(wanted)}."
        )
    if not _is_plain(found.dtype):
        raise ModelError(
            f"weight {name} is {found.dtype}; attnloom serves no quantised weights. Save the model "
            "in bfloat16, float16 or float32."
        )


def _is_plain(dtype: torch.dtype) -> bool:
    """Whether numbers of it are weights as they are."""
    return dtype.is_floating_point and dtype.itemsize >= 2


def _some(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{what} {shown}. " if names else ""
