"""The HTTP endpoint, in the form of OpenAI's. Needs the extra `serve`; nothing here is imported
before it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from attnloom.errors import RequestError, counted
from attnloom.serving.answers import Answer
from attnloom.serving.body import read
from attnloom.serving.engine import Engine
from attnloom.serving.metrics import render
from attnloom.serving.problems import (
    TOO_LONG,
    LimitBody,
    Problem,
    ProblemError,
    UnknownModelError,
    add_handlers,
    broken_problem,
    server_problem,
)
from attnloom.serving.request import Output, Request
from attnloom.serving.service import LAST_STEP_S, Outputs, Service, StepFailedError
from attnloom.serving.text import Tokenizer
from attnloom.serving.wire import Chat, Completion, Prompt, Sampled

MAX_BODY_BYTES = 8 << 20

_log = logging.getLogger("attnloom.serving")


class Endpoint:
    """Answers requests for text from one model."""

    def __init__(self, service: Service, tokenizer: Tokenizer, model: str) -> None:
        self.service, self.tokenizer, self.model = service, tokenizer, model

    async def complete(self, http: HttpRequest, body: Completion) -> Response:
        """POST /v1/completions."""
        self.check_model(body.model)
        self._check_count(len(body.prompt) * body.num_choices)
        prompts = await run_in_threadpool(self._encode, body.prompt)
        asked = 16 if body.max_tokens is None else body.max_tokens
        return await self._answer(http, body, prompts, asked)

    async def chat(self, http: HttpRequest, body: Chat) -> Response:
        """POST /v1/chat/completions."""
        self.check_model(body.model)
        self._check_count(body.num_choices)
        prompt = await run_in_threadpool(self._encode_chat, body)
        asked = body.asked_tokens
        if asked is None:
            asked = max(1, self._max_length - len(prompt))
        return await self._answer(http, body, [prompt], asked)

    @property
    def _max_length(self) -> int:
        return self.service.engine.limits.max_length

    def check_model(self, name: str) -> None:
        """Refuse a name that is not the model's.

        Raises:
            UnknownModelError: it is another.
        """
        if name != self.model:
            raise UnknownModelError(
                f"there is no model {name!r} here; this server has {self.model!r}."
            )

    def _check_count(self, count: int) -> None:
        most = self.service.engine.limits.max_waiting
        if count > most:
            raise ProblemError(
                Problem(
                    400,
                    f"the request asks for {counted(count, 'text')} at once; at most {most} may "
                    "wait here. Send fewer prompts, or a smaller n.",
                )
            )

    def _encode(self, prompts: list[Prompt]) -> list[tuple[int, ...]]:
        """Tokens of prompts. Takes as long as texts are: for a thread."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_bytes(len(prompt.encode()), "prompt")
        encode = self.tokenizer.encode
        return [tuple(encode(one)) if isinstance(one, str) else one for one in prompts]

    def _encode_chat(self, body: Chat) -> tuple[int, ...]:
        """Tokens of a conversation; for a thread, too."""
        said = [message.plain() for message in body.messages]
        self._check_bytes(sum(len(one["content"].encode()) for one in said), "messages")
        return tuple(self.tokenizer.chat(said))

    def _check_bytes(self, num_bytes: int, param: str) -> None:
        """Refuse what cannot fit before time is spent on its tokens."""
        longest = self.tokenizer.longest_token
        if longest is not None and num_bytes > longest * self._max_length:
            raise ProblemError(
                Problem(
                    400,
                    f"{param} has {counted(num_bytes, 'byte')} of text; the "
                    f"{counted(self._max_length, 'token')} that a sequence may have here, of "
                    f"{counted(longest, 'byte')} at most, cannot hold more than "
                    f"{longest * self._max_length}.",
                    param=param,
                    code=TOO_LONG,
                )
            )

    def _check(self, request: Request, place: str) -> None:
        param, _, index = place.partition(".")
        try:
            self.service.engine.check(request)
        except RequestError as error:
            num_prompt, code = len(request.prompt), None
            if num_prompt + request.params.max_tokens > self._max_length:
                code = TOO_LONG
                param = "max_tokens" if num_prompt < self._max_length else param
            said = f"{place}: {error}" if index else str(error)
            raise ProblemError(Problem(400, said, param=param, code=code)) from None

    async def _answer(
        self, http: HttpRequest, body: Sampled, prompts: list[tuple[int, ...]], max_tokens: int
    ) -> Response:
        chat = isinstance(body, Chat)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        for i, prompt in enumerate(prompts):
            place = "messages" if chat else "prompt" if len(prompts) == 1 else f"prompt.{i}"
            self._check(Request(prompt, body.params(max_tokens, 0)), place)
        choices = [(prompt, i) for prompt in prompts for i in range(body.num_choices)]
        requests = [
            Request(prompt, body.params(max_tokens, i), f"{name}-{index}")
            for index, (prompt, i) in enumerate(choices)
        ]
        outputs = await self.service.submit(*requests)
        answer = Answer(name, self.model, body.num_choices, self.tokenizer.decode, chat=chat)
        if body.stream:
            return _Stream(outputs, _events(outputs, answer, body.wants_usage))
        return await _whole(http, outputs, answer)


class _Stream(StreamingResponse):
    """Server-sent events. However it ends, also before it began, requests do not go on."""

    def __init__(self, outputs: Outputs, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._outputs.aclose()


async def _events(outputs: Outputs, answer: Answer, wants_usage: bool) -> AsyncIterator[str]:
    index = {name: i for i, name in enumerate(outputs.names)}
    begun: set[str] = set()
    lasts: dict[str, Output] = {}
    try:
        async for output in outputs:
            first = output.name not in begun
            if output.text or output.logprobs or output.finish is not None or first:
                yield _event(answer.piece(index[output.name], output, first))
                begun.add(output.name)
            if output.finish is not None:
                lasts[output.name] = output
        if wants_usage:
            yield _event(answer.usage_piece([lasts[name] for name in outputs.names]))
    except StepFailedError as error:
        yield _event(server_problem(error).body())
    except Exception as error:  # of the tokenizer, which spells log-probabilities here
        _log.exception("a stream is given up")
        yield _event(broken_problem(error).body())
    yield "data: [DONE]\n\n"


def _event(body: dict) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


async def _whole(http: HttpRequest, outputs: Outputs, answer: Answer) -> Response:
    async def collect() -> Response:
        parts: dict[str, list[Output]] = {name: [] for name in outputs.names}
        async for output in outputs:
            parts[output.name].append(output)
        return JSONResponse(answer.whole([*parts.values()]))

    collecting = asyncio.ensure_future(collect())
    leaving = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if collecting.done():
            return collecting.result()
        return Response(status_code=499)  # nobody reads it
    finally:
        for task in (collecting, leaving):
            task.cancel()
        await asyncio.gather(collecting, leaving, return_exceptions=True)
        await outputs.aclose()


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def create_app(engine: Engine, model: str) -> FastAPI:
    """The application that serves an engine under a model's name; closing it ends the engine.

    Args:
        engine: with a tokenizer.
    """
    assert engine.tokenizer is not None, "an endpoint takes and gives text"
    service = Service(engine)
    endpoint = Endpoint(service, engine.tokenizer, model)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.close, LAST_STEP_S)

    app = FastAPI(title="attnloom", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(LimitBody, most=MAX_BODY_BYTES)
    add_handlers(app)
    _add_text(app, endpoint)
    _add_models(app, endpoint)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return JSONResponse({"alive": service.alive}, 200 if service.alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(render(engine.metrics, _gauges(service)))

    return app


def _add_text(app: FastAPI, endpoint: Endpoint) -> None:
    @app.post("/v1/completions")
    async def completions(http: HttpRequest) -> Response:
        return await endpoint.complete(http, await read(http, Completion))

    @app.post("/v1/chat/completions")
    async def chat(http: HttpRequest) -> Response:
        return await endpoint.chat(http, await read(http, Chat))


def _add_models(app: FastAPI, endpoint: Endpoint) -> None:
    entry = {"id": endpoint.model, "object": "model", "created": 0, "owned_by": "attnloom"}
    entry["max_model_len"] = endpoint.service.engine.limits.max_length

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}")
    async def one(name: str) -> dict:
        endpoint.check_model(name)
        return entry


def _gauges(service: Service) -> dict[str, tuple[str, float]]:
    engine, scheduler = service.engine, service.engine.scheduler
    return {
        "running": ("requests being served", len(scheduler.running)),
        "waiting": ("requests that wait", service.num_waiting),
        "pages": ("pages of the cache", engine.cache.book.allocator.num_pages),
        "pages_free": ("pages that nobody holds", engine.cache.num_free_pages),
        "sequences_kept": ("ended sequences whose pages are kept", scheduler.prefixes.num_kept),
    }
