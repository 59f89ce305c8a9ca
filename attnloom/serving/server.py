"""The HTTP endpoint, in the form of OpenAI's. Needs the extra `serve`; nothing here is imported
before it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import FastAPI, HTTPException
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as RoutingError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attnloom.errors import AttnloomError, OverloadedError, RequestError
from attnloom.serving.engine import Engine
from attnloom.serving.metrics import render
from attnloom.serving.request import Output, Request
from attnloom.serving.service import Service, StepFailedError
from attnloom.serving.text import Tokenizer
from attnloom.serving.wire import Answer, Chat, Completion, Sampled, error_body

MAX_BODY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """An answer that is an error."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    def response(self) -> JSONResponse:
        """It, as OpenAI's API says it."""
        body = error_body(self.message, self.kind, self.param, self.code)
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(body, self.status, headers)


class UnknownModelError(AttnloomError, ValueError):
    """A request names a model that is not here."""


class Endpoint:
    """Answers requests for text from one model."""

    def __init__(self, service: Service, tokenizer: Tokenizer, model: str) -> None:
        self.service, self.tokenizer, self.model = service, tokenizer, model

    async def complete(self, http: HttpRequest, body: Completion) -> Response:
        """POST /v1/completions."""
        prompt = body.prompt
        if isinstance(prompt, str):
            prompt = await run_in_threadpool(self.tokenizer.encode, prompt)
        return await self._answer(http, body, tuple(prompt), body.max_tokens or 16, chat=False)

    async def chat(self, http: HttpRequest, body: Chat) -> Response:
        """POST /v1/chat/completions."""
        said = [message.plain() for message in body.messages]
        prompt = await run_in_threadpool(self.tokenizer.chat, said)
        room = self.service.engine.limits.max_length - len(prompt)
        asked = body.max_completion_tokens or body.max_tokens or max(1, room)
        return await self._answer(http, body, tuple(prompt), asked, chat=True)

    async def _answer(
        self,
        http: HttpRequest,
        body: Sampled,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        chat: bool,
    ) -> Response:
        if body.model != self.model:
            raise UnknownModelError(
                f"there is no model {body.model!r} here; this server has {self.model!r}."
            )
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        outputs = await self.service.submit(Request(prompt, body.params(max_tokens), name))
        answer = Answer(name, self.model, chat)
        if body.stream:
            events = _events(outputs, answer, body.wants_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return await _whole(http, outputs, answer)


async def _events(
    outputs: AsyncIterator[Output], answer: Answer, wants_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events. A client that goes away closes this, which cancels the request."""
    first = True
    async with contextlib.aclosing(outputs):  # type: ignore[type-var]
        try:
            async for output in outputs:
                if output.text or output.finish is not None or first:
                    yield _event(answer.piece(output.text, output.finish, first))
                    first = False
                if output.finish is not None and wants_usage:
                    yield _event(answer.usage_piece(output))
        except StepFailedError as error:
            yield _event(error_body(str(error), "server_error", None, None))
    yield "data: [DONE]\n\n"


def _event(body: dict) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


async def _whole(http: HttpRequest, outputs: AsyncIterator[Output], answer: Answer) -> Response:
    async def collect() -> Response:
        text = ""
        async with contextlib.aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                text += output.text
                if output.finish is not None:
                    return JSONResponse(answer.whole(text, output))
        raise AssertionError("outputs ended without a finish")

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
        await run_in_threadpool(service.close)

    app = FastAPI(title="attnloom", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(LimitBody, most=MAX_BODY_BYTES)
    app.post("/v1/completions", response_model=None)(endpoint.complete)
    app.post("/v1/chat/completions", response_model=None)(endpoint.chat)

    @app.get("/v1/models")
    async def models() -> dict:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "attnloom"}
        return {"object": "list", "data": [entry]}

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"alive": service.alive}, 200 if service.alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(render(engine.metrics, _gauges(service)))

    _add_errors(app)
    return app


def _gauges(service: Service) -> dict[str, tuple[str, float]]:
    engine, scheduler = service.engine, service.engine.scheduler
    return {
        "running": ("requests being served", len(scheduler.running)),
        "waiting": ("requests that wait", service.num_waiting),
        "pages": ("pages of the cache", engine.cache.book.allocator.num_pages),
        "pages_free": ("pages that nobody holds", engine.cache.num_free_pages),
        "sequences_kept": ("ended sequences whose pages are kept", scheduler.prefixes.num_kept),
        "preemptions": ("times a sequence had to give way", scheduler.num_preemptions),
    }


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(UnknownModelError)
    async def unknown(http: HttpRequest, error: UnknownModelError) -> Response:
        return Problem(404, str(error), param="model", code="model_not_found").response()

    @app.exception_handler(RequestError)
    async def refused(http: HttpRequest, error: RequestError) -> Response:
        return Problem(400, str(error)).response()

    @app.exception_handler(OverloadedError)
    async def overloaded(http: HttpRequest, error: OverloadedError) -> Response:
        return Problem(429, str(error), "rate_limit_error", code="overloaded").response()

    @app.exception_handler(StepFailedError)
    async def failed(http: HttpRequest, error: StepFailedError) -> Response:
        return Problem(500, str(error), "server_error").response()

    @app.exception_handler(RequestValidationError)
    async def malformed(http: HttpRequest, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"][1:])
        if first["type"] == "json_invalid":
            message = f"the body is not JSON, at character {place}: {first['ctx']['error']}."
            place = ""
        elif first["type"] == "extra_forbidden":
            message = f"parameter {place!r} is not known here."
        else:
            message = f"{place or 'body'}: {first['msg']}."
        return Problem(400, message, param=place or None).response()

    @app.exception_handler(Exception)
    async def broken(http: HttpRequest, error: Exception) -> Response:
        return Problem(
            500, f"the server failed: {type(error).__name__}.", "server_error"
        ).response()

    @app.exception_handler(RoutingError)
    async def nowhere(http: HttpRequest, error: HTTPException) -> Response:
        return Problem(error.status_code, str(error.detail)).response()


class LimitBody:
    """Refuses bodies that are longer than a prompt can be, before they are in memory."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        left = self._most
        problem = Problem(413, f"the body is longer than {self._most} bytes.")

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(problem.status, problem.message)
            return message

        if declared.isdigit() and int(declared) > self._most:
            await problem.response()(scope, receive, send)
            return
        await self._app(scope, counted, send)
