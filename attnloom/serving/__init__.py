"""A small engine that serves decoders: continuous batching over a paged cache.

    engine = Engine(load_decoder(folder), FolderTokenizer(folder))
    engine.add(Request(prompt, SamplingParams(max_tokens=100)))
    while engine.busy:
        for output in engine.step(): ...

`attnloom serve` puts it behind an HTTP endpoint in the form of OpenAI's.
"""

from attnloom.errors import (
    CaptureError,
    CopyError,
    ModelError,
    NotFiniteError,
    OverlapError,
    OverloadedError,
    RequestError,
)
from attnloom.serving.config import ModelConfig, Rope
from attnloom.serving.decoder import Decoder, random_decoder
from attnloom.serving.drafts import Drafter, DraftTree, NgramDrafter
from attnloom.serving.engine import Engine
from attnloom.serving.request import Finish, Logprob, Output, Request, SamplingParams
from attnloom.serving.scheduler import Limits
from attnloom.serving.text import ByteTokenizer, FolderTokenizer, Tokenizer
from attnloom.serving.weights import load_decoder

__all__ = [
    # the engine
    "Engine",
    "Limits",
    "Request",
    "SamplingParams",
    "Output",
    "Logprob",
    "Finish",
    # models
    "ModelConfig",
    "Rope",
    "Decoder",
    "load_decoder",
    "random_decoder",
    # text
    "Tokenizer",
    "ByteTokenizer",
    "FolderTokenizer",
    # drafts
    "Drafter",
    "DraftTree",
    "NgramDrafter",
    # errors
    "ModelError",
    "RequestError",
    "NotFiniteError",
    "OverloadedError",
    "OverlapError",
    "CaptureError",
    "CopyError",
]
