"""Requests in the form of OpenAI's API, checked.

Parameters that are not known are refused rather than ignored; those that are known but not offered
may have the values that change nothing. Descriptions of fields say in errors what they may hold.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from attnloom.serving.request import MAX_LOGPROBS, SamplingParams

MAX_STOPS = 16
MAX_CHOICES = 128
ROLES = ("system", "developer", "user", "assistant")
_MOST = (1 << 31) - 1

Prompt = str | tuple[int, ...]


def _wrong(text: str) -> ValueError:
    """What a validator raises; the text goes on after the place."""
    return ValueError(text)


class _TogetherError(ValueError):
    """Parameters that do not go together; param: the one to change."""

    param = ""


def _together(param: str, text: str) -> ValueError:
    """What a validator of several raises."""
    error = _TogetherError(text)
    error.param = param
    return error


def _nothing(*values: Any) -> PlainValidator:
    """Of a parameter that is not offered: null, or a value that asks for nothing."""

    def check(given: Any) -> None:
        if given is not None and not any(type(given) is type(v) and given == v for v in values):
            raise _wrong("asks for what is not offered here; leave it out.")

    return PlainValidator(check)


def _read_prompts(given: Any) -> list[Prompt]:
    """A text, the tokens of one, or a list of either."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list):
        if _is_tokens(given):
            return [tuple(given)]
        if all(isinstance(one, str) for one in given):
            return given
        if all(isinstance(one, list) and _is_tokens(one) for one in given):
            return [tuple(one) for one in given]
    raise _wrong("must be a text, a list of tokens, or a list of texts or of lists of tokens.")


def _is_tokens(given: list[Any]) -> bool:
    return all(type(token) is int for token in given)


def _read_stop(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _wrong("must be a text or a list of texts.")
    if len(texts) > MAX_STOPS:
        raise _wrong(f"holds {len(texts)} texts; at most {MAX_STOPS} may end an output.")
    if "" in texts:
        raise _wrong("holds an empty text, which would end every output before it begins.")
    return tuple(texts)


def _read_role(given: Any) -> str:
    if given not in ROLES:
        raise _wrong(
            f"is {given!r}; it must be {', '.join(ROLES[:-1])} or {ROLES[-1]} (tools are not "
            "offered)."
        )
    return given


def _read_content(given: Any) -> str | None:
    """A text, or parts of one; None stays for the message to judge."""
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise _wrong("must be a text or a list of parts of type 'text'.")
    for i, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _wrong(
                f"has a part {i} of type {kind!r}; models read text alone here, in parts of type "
                "'text'."
            )
        if not isinstance(part.get("text"), str):
            raise _wrong(f"has a part {i} of type 'text' without a text.")
    return "".join(part["text"] for part in given)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Strict):
    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


def _whole(default: int | None, least: int, most: int = _MOST) -> Any:
    """A field of whole numbers."""
    said = f"a whole number from {least} to {most}"
    return Field(default, strict=True, ge=least, le=most, description=said)


class Sampled(_Strict):
    """Parameters of both kinds of requests; top_k and ignore_eos are not OpenAI's."""

    model: StrictStr = Field(description="the name of a model")
    max_tokens: int | None = _whole(None, 1)
    temperature: float | None = Field(
        None, strict=True, ge=0, le=2, allow_inf_nan=False, description="a number from 0 to 2"
    )
    top_p: float | None = Field(
        None, strict=True, gt=0, le=1, description="a number above 0 and at most 1"
    )
    seed: int | None = _whole(None, -(1 << 63), (1 << 63) - 1)
    stop: Annotated[tuple[str, ...], PlainValidator(_read_stop)] = ()
    stream: StrictBool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = None
    n: int | None = _whole(None, 1, MAX_CHOICES)
    top_k: int = _whole(0, 0)
    ignore_eos: StrictBool = Field(False, description="true or false")
    # Labels, which change no text.
    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    metadata: dict[StrictStr, StrictStr] | None = Field(None, description="an object of texts")
    # Not offered.
    presence_penalty: Annotated[Any, _nothing(0, 0.0)] = None
    frequency_penalty: Annotated[Any, _nothing(0, 0.0)] = None
    logit_bias: Annotated[Any, _nothing({})] = None
    service_tier: Annotated[Any, _nothing("auto", "default")] = None
    store: Annotated[Any, _nothing(False)] = None

    @property
    def num_choices(self) -> int:
        """Texts for each prompt."""
        return self.n or 1

    def params(self, max_tokens: int, choice: int) -> SamplingParams:
        """How to draw one of the texts for a prompt; with a seed, each has one of its own."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed + choice,
            max_tokens=max_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
        )

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to give beside each token; None: no log-probabilities at all."""
        return None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Completion(Sampled):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_read_prompts)]
    best_of: StrictInt | None = Field(None, description="a whole number")
    echo: Annotated[Any, _nothing(False)] = None
    logprobs: int | None = _whole(None, 0, MAX_LOGPROBS)
    suffix: Annotated[Any, _nothing()] = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _check_best_of(self) -> Completion:
        if self.best_of not in (None, self.num_choices):
            raise _together(
                "best_of",
                f"best_of is {self.best_of}, but n is {self.num_choices}; choosing the best of "
                "more texts is not offered.",
            )
        return self


class ChatMessage(BaseModel):
    """A message; further members are left to the model's chat template."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, PlainValidator(_read_role)]
    content: Annotated[str | None, PlainValidator(_read_content)] = None

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise _wrong(
                f"has no content, which only the role assistant may lack; this is {self.role}'s."
            )
        return self

    def plain(self) -> dict[str, Any]:
        """As templates take it, its content one text."""
        return {**self.model_dump(), "content": self.content or ""}


class Chat(Sampled):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, description="a list of one message or more")
    max_completion_tokens: int | None = _whole(None, 1)
    logprobs: StrictBool | None = Field(None, description="true or false")
    top_logprobs: int | None = _whole(None, 0, MAX_LOGPROBS)
    response_format: Annotated[Any, _nothing({"type": "text"})] = None
    modalities: Annotated[Any, _nothing(["text"])] = None
    tools: Annotated[Any, _nothing([])] = None
    tool_choice: Annotated[Any, _nothing("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, _nothing(True, False)] = None
    functions: Annotated[Any, _nothing([])] = None
    function_call: Annotated[Any, _nothing("none", "auto")] = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Chat:
        if self.top_logprobs and not self.logprobs:
            raise _together("top_logprobs", "top_logprobs needs logprobs=true beside it.")
        return self

    @property
    def asked_tokens(self) -> int | None:
        """The most tokens of output that were asked for."""
        asked = self.max_completion_tokens
        return self.max_tokens if asked is None else asked
