"""Log-probabilities of tokens in the two forms that OpenAI's API has for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from attnloom.serving.request import Logprob

_LEAST = -9999.0  # in place of minus infinity, which JSON has not


class LogprobForm:
    """Those of a request's texts, as they come.

    Args:
        decode: text of tokens. chat: of /v1/chat/completions, whose form is another.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, chat: bool) -> None:
        self._decode, self._chat = decode, chat
        self._spelled: dict[int, str] = {}
        self._lengths: defaultdict[int, int] = defaultdict(int)  # of each text up to now

    def of(self, index: int, found: Sequence[Logprob] | None) -> dict[str, Any] | None:
        """The next ones of a text; None where none were asked for."""
        if found is None:
            return None
        return self._content(found) if self._chat else self._columns(index, found)

    def _content(self, found: Sequence[Logprob]) -> dict[str, Any]:
        content = [
            {
                **self._entry(one.token, one.logprob),
                "top_logprobs": [self._entry(*other) for other in one.top],
            }
            for one in found
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._spell(token)
        # a part of a character has bytes, which its text does not tell
        raw = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _number(logprob), "bytes": raw}

    def _columns(self, index: int, found: Sequence[Logprob]) -> dict[str, Any]:
        texts, offsets = [self._spell(one.token) for one in found], []
        for text in texts:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(text)
        tops: list[dict[str, float]] = []
        for one in found:
            named: dict[str, float] = {}
            for token, logprob in one.top:
                named.setdefault(self._spell(token), _number(logprob))  # the likeliest of a text
            tops.append(named)
        return {
            "tokens": texts,
            "token_logprobs": [_number(one.logprob) for one in found],
            "top_logprobs": tops if any(one.top for one in found) else None,
            "text_offset": offsets,
        }

    def _spell(self, token: int) -> str:
        """Text of a token in the midst of others: some decoders drop the first one's space."""
        found = self._spelled.get(token)
        if found is None:
            alone = self._decode([token])
            found = self._decode([token, token])[len(alone) :]
            found = alone if "\ufffd" in found else found
            self._spelled[token] = found
        return found


def _number(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST
