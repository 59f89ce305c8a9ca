"""What goes over the wire: requests in the form of OpenAI's API, checked, and answers to them.

Parameters that are not known are refused rather than ignored; those that are known but not offered
may have the value that changes nothing.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from attnloom.serving.request import Finish, Output, SamplingParams

Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Strict):
    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class Sampled(_Strict):
    """Parameters of both kinds of requests; the last two are not OpenAI's."""

    model: StrictStr
    max_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    user: StrictStr | None = None
    top_k: StrictInt = 0
    ignore_eos: StrictBool = False

    def params(self, max_tokens: int) -> SamplingParams:
        """How to draw.

        Raises:
            RequestError: values out of range.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=stop,
            ignore_eos=self.ignore_eos,
        )

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Completion(Sampled):
    """POST /v1/completions."""

    prompt: StrictStr | list[StrictInt]
    echo: Literal[False] | None = None
    logprobs: None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class TextPart(_Strict):
    type: Literal["text"]
    text: StrictStr


class ChatMessage(BaseModel):
    """A message; further members are left to the model's chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | list[TextPart]

    def plain(self) -> dict[str, Any]:
        """With its content as one text."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {**self.model_dump(), "content": content}


class Chat(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: Literal[False] | None = None


class Answer:
    """Builds the answer to a request, whole or in pieces."""

    def __init__(self, name: str, model: str, chat: bool) -> None:
        self.name, self.model, self.chat = name, model, chat
        self.created = int(time.time())

    def whole(self, text: str, last: Output) -> dict[str, Any]:
        """All of it."""
        kind = "chat.completion" if self.chat else "text_completion"
        said = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self.chat
            else {"text": text}
        )
        return {
            **self._head(kind),
            "choices": [self._choice(said, last.finish)],
            "usage": usage(last),
        }

    def piece(self, text: str, finish: Finish | None, first: bool) -> dict[str, Any]:
        """What a step adds."""
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        said = {"delta": delta} if self.chat else {"text": text}
        return {**self._head(self._piece_kind), "choices": [self._choice(said, finish)]}

    def usage_piece(self, last: Output) -> dict[str, Any]:
        """The last one, where usage is asked for."""
        return {**self._head(self._piece_kind), "choices": [], "usage": usage(last)}

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, said: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
        reason = None if finish is None else finish.value
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


def usage(last: Output) -> dict[str, Any]:
    """Tokens of a request."""
    return {
        "prompt_tokens": last.num_prompt,
        "completion_tokens": last.num_output,
        "total_tokens": last.num_prompt + last.num_output,
        "prompt_tokens_details": {"cached_tokens": last.num_shared},
    }


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
