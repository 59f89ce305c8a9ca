"""Answers in the form of OpenAI's API, whole or in pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from attnloom.serving.logprobs import LogprobForm
from attnloom.serving.request import Finish, Output

Decode = Callable[[Sequence[int]], str]


class Answer:
    """Builds the answer to a request.

    Args:
        name: its id. num_choices: texts for each prompt; those of one prompt follow each other.
        decode: text of tokens.
    """

    def __init__(
        self, name: str, model: str, num_choices: int, decode: Decode, *, chat: bool
    ) -> None:
        self.name, self.model, self.num_choices, self.chat = name, model, num_choices, chat
        self._logprobs = LogprobForm(decode, chat=chat)
        self.created = int(time.time())

    def whole(self, outputs: Sequence[Sequence[Output]]) -> dict[str, Any]:
        """All of it.

        Args:
            outputs: of each choice, one or more.
        """
        kind = "chat.completion" if self.chat else "text_completion"
        choices = []
        for i, parts in enumerate(outputs):
            said = self._said("".join(part.text for part in parts))
            asked = parts[0].logprobs is not None
            found = [one for part in parts for one in part.logprobs or ()] if asked else None
            choices.append(_choice(i, said, self._logprobs.of(i, found), parts[-1].finish))
        usage = self._usage([parts[-1] for parts in outputs])
        return {**self._head(kind), "choices": choices, "usage": usage}

    def piece(self, index: int, output: Output, first: bool) -> dict[str, Any]:
        """What a step adds to a choice."""
        text = output.text
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        said = {"delta": delta} if self.chat else {"text": text}
        choice = _choice(index, said, self._logprobs.of(index, output.logprobs), output.finish)
        return {**self._head(self._piece_kind), "choices": [choice]}

    def usage_piece(self, lasts: Sequence[Output]) -> dict[str, Any]:
        """The last one, where usage is asked for."""
        return {**self._head(self._piece_kind), "choices": [], "usage": self._usage(lasts)}

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _said(self, text: str) -> dict[str, Any]:
        if self.chat:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"text": text}

    def _usage(self, lasts: Sequence[Output]) -> dict[str, Any]:
        """Tokens of it; a prompt counts once, however many texts it is given."""
        asked = lasts[:: self.num_choices]
        num_prompt = sum(last.num_prompt for last in asked)
        num_output = sum(last.num_output for last in lasts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(last.num_shared for last in asked)},
        }


def _choice(
    index: int, said: dict[str, Any], logprobs: dict[str, Any] | None, finish: Finish | None
) -> dict[str, Any]:
    reason = None if finish is None else finish.value
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
