"""An engine from what the command line says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from attnloom.errors import OptionError, counted
from attnloom.serving.config import ModelConfig
from attnloom.serving.decoder import Decoder, check_device, random_decoder
from attnloom.serving.drafts import NgramDrafter
from attnloom.serving.engine import Engine
from attnloom.serving.scheduler import Limits
from attnloom.serving.static import CudaGraphs
from attnloom.serving.text import ByteTokenizer, FolderTokenizer, Tokenizer
from attnloom.serving.weights import DTYPES, load_decoder

DEFAULT_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What to serve and how much of it at once.

    Attributes:
        folder: of the model; None: a tiny random one.
        max_length: None: DEFAULT_LENGTH, or the positions that the model knows if they are fewer.
        cache_bytes: of keys and values of all layers.
        cuda_graphs: see Engine.
    """

    folder: Path | None = None
    device: str | None = None
    dtype: str | None = None
    max_length: int | None = None
    max_running: int = 64
    max_step_tokens: int = 512
    max_waiting: int = 256
    page_size: int = 64
    cache_bytes: int = 1 << 30
    speculate: bool = False
    cuda_graphs: CudaGraphs = "auto"


def build_engine(config: ServeConfig) -> Engine:
    """Load the model and make its cache.

    Raises:
        ModelError: the folder holds no model that can be served.
        OptionError: the cache would not hold one sequence, or the device not the cache; there is
            no such device.
    """
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    dtype = DTYPES[config.dtype] if config.dtype else None
    tokenizer: Tokenizer
    if config.folder is None:
        model = random_decoder(tiny_config(), device, dtype or torch.float32)
        tokenizer = ByteTokenizer()
    else:
        # What is read at once comes first, so that its mistakes are told before weights are read.
        shape = ModelConfig.from_folder(config.folder)
        tokenizer = FolderTokenizer(config.folder, shape.eos_tokens)
        model = load_decoder(config.folder, device, dtype)
    max_length = config.max_length
    if max_length is None:
        max_length = min(DEFAULT_LENGTH, model.config.max_length)
    limits = Limits(config.max_running, config.max_step_tokens, config.max_waiting, max_length)
    num_pages = config.cache_bytes // page_bytes(model, config.page_size)
    # A length beyond the model's positions is the engine's to refuse.
    longest = -(-min(limits.max_length, model.config.max_length) // config.page_size)
    if num_pages < longest:
        needed = longest * page_bytes(model, config.page_size) / (1 << 30)
        raise OptionError(
            f"a cache of {config.cache_bytes / (1 << 30):.3g} GiB holds "
            f"{counted(num_pages, 'page')}, but a sequence of "
            f"{counted(limits.max_length, 'token')} takes {longest}. Give it {needed:.3g} GiB or "
            "more, or lower max_length."
        )
    _check_room(config.cache_bytes, model.device)
    return Engine(
        model,
        tokenizer,
        limits,
        num_pages=num_pages,
        page_size=config.page_size,
        drafter=NgramDrafter() if config.speculate else None,
        cuda_graphs=config.cuda_graphs,
    )


def _check_room(cache_bytes: int, device: torch.device) -> None:
    """Raise OptionError where a cache is larger than the device's memory."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        room, what = torch.cuda.mem_get_info(device)[0] + unused, f"that are free on {device}"
    elif device.type == "cpu" and hasattr(os, "sysconf"):  # not on Windows
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        what = "of memory that this machine has"
    else:
        return
    if cache_bytes > room:
        raise OptionError(
            f"a cache of {cache_bytes / (1 << 30):.3g} GiB is larger than the "
            f"{room / (1 << 30):.3g} GiB {what}. Give it less."
        )


def page_bytes(model: Decoder, page_size: int) -> int:
    """Memory of a page in all layers, keys and values."""
    config = model.config
    row = config.num_kv_heads * config.head_dim * model.embed_tokens.weight.element_size()
    return 2 * config.num_layers * page_size * row


def tiny_config() -> ModelConfig:
    """A model of bytes, small enough for any machine."""
    return ModelConfig(
        vocab_size=ByteTokenizer.SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_length=4096,
        windows=(None, None),
        scale_dim=16,
        eos_tokens=(ByteTokenizer.EOS,),
    )
