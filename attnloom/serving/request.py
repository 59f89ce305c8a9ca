"""Requests for text, the sequences that they become, and what comes out of a step."""

from __future__ import annotations

import itertools
import numbers
import secrets
from dataclasses import dataclass, field
from enum import Enum

from attnloom.errors import RequestError
from attnloom.serving.drafts import DraftTree

MAX_LOGPROBS = 20
_names = itertools.count()


class Finish(str, Enum):
    """Why a sequence ended, in the words of OpenAI's API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn, and when to stop.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: only that many of the likeliest tokens; 0: all.
        top_p: only the likeliest tokens that hold this much probability together.
        seed: the same seed gives the same text whatever else runs; None: a new one each time.
        max_tokens: of output.
        stop: texts that end the output; they are not part of it.
        ignore_eos: go on after the model's end of sequence.
        logprobs: give the log-probability of each token of output, by the model's own logits, and
            those of that many of the likeliest tokens beside; None: give none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        number, whole = (numbers.Real,), (numbers.Integral,)
        checks = (
            ("temperature", number, lambda v: 0 <= v <= 100, "from 0 to 100"),
            ("top_k", whole, lambda v: v >= 0, "a whole number, 0 or more"),
            ("top_p", number, lambda v: 0 < v <= 1, "above 0 and at most 1"),
            ("seed", (*whole, type(None)), lambda v: True, "a whole number or None"),
            ("max_tokens", whole, lambda v: v >= 1, "a whole number, 1 or more"),
            (
                "logprobs",
                (*whole, type(None)),
                lambda v: v is None or 0 <= v <= MAX_LOGPROBS,
                f"a whole number from 0 to {MAX_LOGPROBS}, or None",
            ),
            ("stop", (tuple, list), lambda v: all(isinstance(t, str) for t in v), "texts"),
        )
        for name, kinds, fine, wanted in checks:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds) or not fine(value):
                raise _refusal(name, value, wanted)
        if any(not text for text in self.stop) or len(self.stop) > 16:
            raise RequestError("stop holds an empty text or more than 16; give 1 to 16 texts.")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to go on from it."""

    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    name: str = field(default_factory=lambda: f"request-{next(_names)}")

    def __post_init__(self) -> None:
        kinds = {*map(type, self.prompt)} if isinstance(self.prompt, (tuple, list)) else {None}
        if not all(k not in (None, bool) and issubclass(k, numbers.Integral) for k in kinds):
            raise _refusal("the prompt", self.prompt, "a tuple of tokens, which are whole numbers")
        if not isinstance(self.params, SamplingParams):
            raise _refusal("params", self.params, "SamplingParams")


def _refusal(name: str, value: object, wanted: str) -> RequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return RequestError(f"{name} is {shown}; it must be {wanted}.")


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while it is served.

    Attributes:
        tokens: prompt and output so far.
        num_computed: the first of them, whose keys and values are in the cache.
        cached: name in the PagedKVCache, None while it waits.
        draft: tokens that may follow, to be verified in the next step.
        num_shared: prompt tokens that were found in the cache.
    """

    request: Request
    seed: int
    tokens: list[int]
    num_computed: int = 0
    cached: int | None = None
    draft: DraftTree | None = None
    num_shared: int = 0
    finish: Finish | None = None

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """The sequence of a request that has just arrived."""
        seed = request.params.seed
        seed = secrets.randbits(62) if seed is None else seed
        return cls(request, seed, list(request.prompt))

    @property
    def num_pending(self) -> int:
        """Tokens that the model has yet to see: 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token of output.

    Attributes:
        logprob: by the softmax of the model's logits, before temperature, top_k and top_p.
        top: (token, log-probability) of the likeliest ones at its place, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Output:
    """What a step adds to a request.

    Attributes:
        logprobs: of each of the tokens, where SamplingParams.logprobs asks for them.
        text: complete characters; what may be the start of a stop text is held back.
        finish: None while more is to come.
        error: why, where finish is Finish.ERROR: a NotFiniteError, or what the tokenizer raised.
    """

    name: str
    tokens: tuple[int, ...]
    text: str
    finish: Finish | None
    num_prompt: int
    num_output: int
    num_shared: int
    logprobs: tuple[Logprob, ...] | None = None
    error: Exception | None = None
