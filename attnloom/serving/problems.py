"""Answers that are errors, in OpenAI's form, and which errors become which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as RoutingError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attnloom.errors import AttnloomError, OverloadedError, RequestError
from attnloom.serving.service import StepFailedError, StoppedError

TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Problem:
    """An answer that is an error."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, Any]:
        """It, as OpenAI's API says it."""
        said = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": said}

    def response(self) -> JSONResponse:
        """The answer."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)


class ProblemError(AttnloomError, ValueError):
    """A request that is answered with a problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class UnknownModelError(AttnloomError, ValueError):
    """A request names a model that is not here."""


def server_problem(error: Exception) -> Problem:
    """Nobody's fault but the server's."""
    if isinstance(error, StoppedError):  # another server, or this one later, may answer it
        return Problem(503, str(error), "server_error", code="shutting_down")
    return Problem(500, str(error), "server_error")


def broken_problem(error: Exception) -> Problem:
    """An error that nobody thought of, or of a tokenizer."""
    return Problem(500, f"the server failed: {type(error).__name__}.", "server_error")


def add_handlers(app: FastAPI) -> None:
    """Answer every error in one form."""

    @app.exception_handler(ProblemError)
    async def problem(http: HttpRequest, error: ProblemError) -> Response:
        return error.problem.response()

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
        return server_problem(error).response()

    @app.exception_handler(Exception)
    async def broken(http: HttpRequest, error: Exception) -> Response:
        return broken_problem(error).response()

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
