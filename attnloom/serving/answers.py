"""Answers in the form of OpenAI's API, whole or in pieces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from attnloom.serving.request import Finish, Output


class Answer:
    """Builds the answer to a request.

    Args:
        name: its id. num_choices: texts for each prompt; those of one prompt follow each other.
    """

    def __init__(self, name: str, model: str, num_choices: int, *, chat: bool) -> None:
        self.name, self.model, self.num_choices, self.chat = name, model, num_choices, chat
        self.created = int(time.time())

    def whole(self, texts: Sequence[str], lasts: Sequence[Output]) -> dict[str, Any]:
        """All of it.

        Args:
            texts, lasts: of each choice, with its last output.
        """
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [
            _choice(i, self._said(text), last.finish)
            for i, (text, last) in enumerate(zip(texts, lasts, strict=True))
        ]
        return {**self._head(kind), "choices": choices, "usage": self._usage(lasts)}

    def piece(self, index: int, text: str, finish: Finish | None, first: bool) -> dict[str, Any]:
        """What a step adds to a choice."""
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        said = {"delta": delta} if self.chat else {"text": text}
        return {**self._head(self._piece_kind), "choices": [_choice(index, said, finish)]}

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


def _choice(index: int, said: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
    reason = None if finish is None else finish.value
    return {"index": index, **said, "logprobs": None, "finish_reason": reason}
