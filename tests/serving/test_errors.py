"""Users' mistakes in serving; texts are pinned."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch

from attnloom.errors import CopyError, OptionError
from attnloom.serving import (
    ByteTokenizer,
    DraftTree,
    Engine,
    Limits,
    ModelConfig,
    ModelError,
    NgramDrafter,
    NotFiniteError,
    OverloadedError,
    Request,
    RequestError,
    SamplingParams,
    random_decoder,
)
from attnloom.serving.launch import ServeConfig, build_engine
from attnloom.serving.ops import ops_for
from attnloom.serving.service import Service, StepFailedError, StoppedError
from tests.harness.pinned import Pinned, assert_says
from tests.serving.meaningless import MEANINGLESS
from tests.serving.models import GEMMA, LLAMA, tiny

LIMITS = Limits(max_running=1, max_waiting=1, max_length=64)
ONE = SamplingParams(max_tokens=1)


def engine(limits: Limits = LIMITS, **options: Any) -> Engine:
    return Engine(tiny(LLAMA), limits=limits, page_size=16, **options)


def config(**change: Any) -> ModelConfig:
    return ModelConfig.from_dict({**LLAMA, **change})


def lacking(name: str) -> ModelConfig:
    return ModelConfig.from_dict({k: v for k, v in LLAMA.items() if k != name})


def twice(name: str) -> None:
    served = engine()
    for _ in range(2):
        served.add(Request((1,), ONE, name))


def nan_logits() -> None:
    model = tiny(LLAMA)
    with torch.no_grad():
        model.embed_tokens.weight[1] = torch.nan
    served = Engine(model, limits=LIMITS, page_size=16)
    served.add(Request((1,), ONE, "mine"))
    (output,) = served.step()
    assert output.error is not None
    raise output.error


def overload() -> None:
    served = engine()
    for _ in range(2):
        served.add(Request((1,), ONE))


def submit(close: bool) -> None:
    """To a service that is closed, or whose queue is full."""
    served = engine()
    service = Service(served)
    try:
        if close:
            service.close()
        else:
            served.scheduler.waiting.append(None)  # type: ignore[arg-type]
        asyncio.run(_submitted(service))
    finally:
        served.scheduler.waiting.clear()
        service.close()


async def _submitted(service: Service) -> None:
    await service.submit(Request((1,), ONE))


def failing_step(message: str) -> None:
    served = engine()
    service = Service(served)

    def fail(*_: Any) -> None:
        raise MemoryError(message)

    served._runner.run = fail

    async def first_output() -> None:
        async for _ in await service.submit(Request((1,), ONE)):
            pass

    try:
        asyncio.run(first_output())
    finally:
        service.close()


def with_little_memory() -> None:
    with mock.patch("os.sysconf", return_value=1 << 16):  # bytes of a page, and pages
        build_engine(ServeConfig(device="cpu", cache_bytes=8 << 30))


NOT_COPIED = (
    "an Engine cannot be copied or pickled: requests, their texts and pages belong to one. Make "
    "another of the same model, and add the requests there."
)
TOKENS = "it must be a tuple of tokens, which are whole numbers."
ERRORS: dict[str, Pinned] = {
    "device": (
        lambda: build_engine(ServeConfig(device="cuda:x")),
        OptionError,
        "device is 'cuda:x', which torch cannot use: Invalid device string: 'cuda:x'.",
    ),
    "more than the memory": (
        with_little_memory,
        OptionError,
        "a cache of 8 GiB is larger than the 4 GiB of memory that this machine has. Give it less.",
    ),
    "model type": (
        lambda: config(model_type="mamba"),
        ModelError,
        "model_type is 'mamba'; attnloom serves llama and gemma2. Another architecture needs a "
        "decoder of its own in attnloom/serving.",
    ),
    "lacking": (
        lambda: lacking("hidden_size"),
        ModelError,
        "config.json of a llama model lacks 'hidden_size'.",
    ),
    "not a number": (
        lambda: config(vocab_size="many"),
        ModelError,
        "config.json of a llama model: vocab_size is 'many'; it must be a whole number, 1 or more.",
    ),
    "layer types": (
        lambda: ModelConfig.from_dict({**GEMMA, "layer_types": ["linear"] * 3}),
        ModelError,
        "layer_types is ['linear', 'linear', 'linear']; each of the 3 layers is "
        "'full_attention' or 'sliding_attention'.",
    ),
    "activation": (
        lambda: config(hidden_act="relu"),
        ModelError,
        "the activation 'relu' is not known; known are ('silu', 'gelu_pytorch_tanh', 'gelu').",
    ),
    "rope": (
        lambda: config(rope_scaling={"type": "yarn", "factor": 2}),
        ModelError,
        "rope_type is 'yarn'; attnloom serves 'default', 'linear' and 'llama3'.",
    ),
    "small cache": (
        lambda: build_engine(ServeConfig(device="cpu", cache_bytes=1 << 19)),
        OptionError,
        "a cache of 0.000488 GiB holds 16 pages, but a sequence of 4096 tokens takes 64. Give "
        "it 0.00195 GiB or more, or lower max_length.",
    ),
    "graphs of nothing": (
        lambda: engine(cuda_graphs="yes"),
        OptionError,
        "cuda_graphs is 'yes'; it must be 'auto', True or False.",
    ),
    "graphs on a CPU": (
        lambda: engine(cuda_graphs=True),
        OptionError,
        "cuda_graphs is True, but the model is on cpu; only a CUDA device has graphs. 'auto' "
        "captures steps there and runs them eagerly elsewhere.",
    ),
    "kernels on a CPU": (
        lambda: ops_for("cpu", torch.float32, True),
        OptionError,
        "kernels is True, but the model is torch.float32 on cpu; a decoder's kernels take "
        "torch.float32, torch.float16, torch.bfloat16 on a CUDA device. None takes them where a "
        "device has shown them right.",
    ),
    "few pages": (
        lambda: engine(num_pages=3),
        OptionError,
        "3 pages of 16 tokens cannot hold one sequence of max_length 64. Give at least 4 "
        "pages, or lower max_length.",
    ),
    "no prompt": (
        lambda: engine().add(Request(())),
        RequestError,
        "the prompt is empty; give at least one token.",
    ),
    "long": (
        lambda: engine().add(Request((1,) * 60, SamplingParams(max_tokens=5))),
        RequestError,
        "60 tokens of prompt and max_tokens 5 are more than the 64 tokens that a sequence may "
        "have here.",
    ),
    "unknown token": (
        lambda: engine().add(Request((1, 258), ONE)),
        RequestError,
        "token 258 is not one of the model's 258.",
    ),
    "stop without a tokenizer": (
        lambda: engine().add(Request((1,), SamplingParams(max_tokens=1, stop=("x",)))),
        RequestError,
        "stop texts need a tokenizer; this engine has none.",
    ),
    "name": (
        lambda: twice("mine"),
        RequestError,
        "a request named 'mine' is being served already.",
    ),
    "limit": (
        lambda: engine(Limits(max_running=0)),
        OptionError,
        "max_running is 0; it must be a whole number, 1 or more.",
    ),
    "long limit": (
        lambda: engine(Limits(max_length=4096)),
        OptionError,
        "max_length is 4096, but the model knows 512 positions.",
    ),
    "drafter": (
        lambda: NgramDrafter(branches=0),
        OptionError,
        "ngram, branches and depth are 3, 0 and 5; each must be a whole number, 1 or more.",
    ),
    "no tree": (
        lambda: DraftTree((5, 6), (1, -1)),
        OptionError,
        "parents is (1, -1) for 2 tokens; one each: an earlier node, or -1.",
    ),
    "range": (
        lambda: SamplingParams(temperature=-1),
        RequestError,
        "temperature is -1; it must be from 0 to 100.",
    ),
    "stop": (
        lambda: SamplingParams(stop=("",)),
        RequestError,
        "stop holds an empty text or more than 16; give 1 to 16 texts.",
    ),
    "logits that are not finite": (
        nan_logits,
        NotFiniteError,
        "the model's logits after 1 token (prompt and output) of 'mine' are NaN or infinite, so "
        "that no token can be drawn from them. Look for such weights, or for a dtype too narrow "
        "for the model.",
    ),
    "a drafter that drafts nothing": (
        lambda: engine(drafter=3),
        OptionError,
        "drafter is 3; it must have a method propose(tokens), as NgramDrafter().",
    ),
    "no pages": (
        lambda: engine(num_pages=0),
        OptionError,
        "0 pages of 16 tokens cannot hold one sequence of max_length 64. Give at least 4 pages, or "
        "lower max_length.",
    ),
    "half a page": (
        lambda: engine(num_pages=8.5),
        OptionError,
        "num_pages is 8.5; it must be an int.",
    ),
    "a limit that is text": (
        lambda: engine(Limits(max_running="3")),  # type: ignore[arg-type]
        OptionError,
        "max_running is '3'; it must be a whole number, 1 or more.",
    ),
    "a copied engine": (lambda: copy.copy(engine()), CopyError, NOT_COPIED),
    "a deep copy of an engine": (lambda: copy.deepcopy(engine()), CopyError, NOT_COPIED),
    "a pickled engine": (lambda: pickle.dumps(engine()), CopyError, NOT_COPIED),
    "a request that is text": (
        lambda: engine().add("x"),  # type: ignore[arg-type]
        RequestError,
        "request is 'x'; it must be a Request.",
    ),
    "no list of prompts": (
        lambda: engine().generate([1, 2]),  # type: ignore[list-item]
        RequestError,
        f"the prompt is 1; {TOKENS}",
    ),
    "no tokens": (
        lambda: Request(None),  # type: ignore[arg-type]
        RequestError,
        f"the prompt is None; {TOKENS}",
    ),
    "truths": (lambda: Request((True,)), RequestError, f"the prompt is (True,); {TOKENS}"),
    "no params": (
        lambda: Request((1,), None),  # type: ignore[arg-type]
        RequestError,
        "params is None; it must be SamplingParams.",
    ),
    "a draft of floats": (
        lambda: DraftTree((5.0,), (-1,)),  # type: ignore[arg-type]
        OptionError,
        "tokens is (5.0,); it must be whole numbers.",
    ),
    "a depth that is text": (
        lambda: NgramDrafter(depth="x"),  # type: ignore[arg-type]
        OptionError,
        "ngram, branches and depth are 3, 4 and 'x'; each must be a whole number, 1 or more.",
    ),
    "quantised": (
        lambda: config(quantization_config={"quant_method": "gptq"}),
        ModelError,
        "quantization_config is {'quant_method': 'gptq'}; attnloom serves no quantised weights. "
        "Save the model in bfloat16, float16 or float32.",
    ),
    "a list": (
        lambda: ModelConfig.from_dict([]),  # type: ignore[arg-type]
        ModelError,
        "config.json holds a list, not an object.",
    ),
    "a device that is not there": (
        lambda: random_decoder(config(), "cuda:x", torch.float32),
        OptionError,
        "device is 'cuda:x', which torch cannot use: Invalid device string: 'cuda:x'.",
    ),
    **{
        str(change): (
            lambda change=change: config(**change),
            ModelError,
            f"config.json of a llama model{said}",
        )
        for change, said in MEANINGLESS
    },
    "queue": (
        overload,
        OverloadedError,
        "1 request is waiting, the most allowed; try again later.",
    ),
    "queue of a service": (
        lambda: submit(close=False),
        OverloadedError,
        "1 request is waiting, the most allowed; try again later.",
    ),
    "closed": (lambda: submit(close=True), StoppedError, "the server is shutting down."),
    "failed step": (
        lambda: failing_step("no memory"),
        StepFailedError,
        "the model failed: MemoryError.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    assert_says(ERRORS[name])


def test_an_unknown_model() -> None:
    pytest.importorskip("fastapi", reason="needs the extra 'serve'")
    from attnloom.serving.server import Endpoint, UnknownModelError
    from attnloom.serving.wire import Completion

    endpoint = Endpoint(None, ByteTokenizer(), "tiny")  # type: ignore[arg-type]
    with pytest.raises(UnknownModelError) as caught:
        asyncio.run(endpoint.complete(None, Completion(model="gpt", prompt="a")))  # type: ignore[arg-type]
    assert str(caught.value) == UNKNOWN_MODEL


UNKNOWN_MODEL = "there is no model 'gpt' here; this server has 'tiny'."
