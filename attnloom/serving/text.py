"""Tokenizers, and text that grows token by token."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attnloom.errors import ModelError, RequestError

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with those that begin one."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; U+FFFD where a character is not complete."""
        ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to where the answer begins."""
        ...


class ByteTokenizer:
    """Bytes of UTF-8 as tokens, then one that begins and one that ends a text."""

    BOS, EOS, SIZE = 256, 257, 258

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        return (self.EOS,)

    def encode(self, text: str) -> list[int]:
        return [self.BOS, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")

    def chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode(plain_chat(messages))


class FolderTokenizer:
    """tokenizer.json of a model's folder, read by the package tokenizers."""

    def __init__(self, folder: Path, eos_tokens: tuple[int, ...] = ()) -> None:
        """Read it.

        Args:
            eos_tokens: as config.json names them; more come from generation_config.json and
                tokenizer_config.json.
        Raises:
            ModelError: there is none, or the package is not installed.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} holds no tokenizer.json, the only form that is read.")
        try:
            self._tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(path))
        except ImportError:
            raise ModelError(
                "reading tokenizer.json needs the package tokenizers: pip install "
                "'attnloom[serve]'."
            ) from None
        self._config = _read_json(folder / "tokenizer_config.json")
        more = _read_json(folder / "generation_config.json").get("eos_token_id") or ()
        found = {*eos_tokens, *((more,) if isinstance(more, int) else more)}
        named = self._tokenizer.token_to_id(_text(self._config.get("eos_token")) or "")
        self._eos_tokens = tuple(sorted(found | ({named} if named is not None else set())))
        template = folder / "chat_template.jinja"
        self._template = (
            template.read_text() if template.is_file() else self._config.get("chat_template")
        )

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        return self._eos_tokens

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        if not isinstance(self._template, str):
            return self.encode(plain_chat(messages))
        return self._tokenizer.encode(self._rendered(messages), add_special_tokens=False).ids

    def _rendered(self, messages: Sequence[Message]) -> str:
        try:
            sandbox = importlib.import_module("jinja2.sandbox")
        except ImportError:
            raise ModelError(
                "the model's chat template needs the package jinja2: pip install 'attnloom[serve]'."
            ) from None

        def refuse(message: str) -> None:
            raise RequestError(f"the model's chat template refuses these messages: {message}")

        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        special = {name: _text(self._config.get(name)) or "" for name in ("bos_token", "eos_token")}
        return environment.from_string(self._template).render(
            messages=messages, add_generation_prompt=True, **special
        )


def plain_chat(messages: Sequence[Message]) -> str:
    """A conversation for models without a chat template."""
    said = (f"{message['role']}: {message['content']}\n" for message in messages)
    return "".join(said) + "assistant:"


class TextStream:
    """Text of a growing list of tokens, in pieces of whole characters, up to a stop text."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._start = self._end = 0  # tokens whose text gives context, tokens whose text is out
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Text that this token completes; nothing more once `stopped`."""
        if self._tokenizer is None:
            return ""
        self._tokens.append(token)
        # The text of a token can depend on the one before it, as a space does.
        context = self._tokenizer.decode(self._tokens[self._start : self._end])
        text = self._tokenizer.decode(self._tokens[self._start :])
        if text.endswith("\ufffd") or len(text) <= len(context):
            return ""
        self._start, self._end = self._end, len(self._tokens)
        return self._release(text[len(context) :])

    def close(self) -> str:
        """What was held back, at the end."""
        if self._tokenizer is None or self.stopped:
            return ""
        context = self._tokenizer.decode(self._tokens[self._start : self._end])
        rest = self._tokenizer.decode(self._tokens[self._start :])[len(context) :]
        held, self._held = self._held + rest, ""
        return held

    def _release(self, text: str) -> str:
        text, self._held = self._held + text, ""
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        if held:
            text, self._held = text[:-held], text[-held:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}.") from None
