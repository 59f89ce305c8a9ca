"""Tokenizers, and text that grows token by token."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    @property
    def longest_token(self) -> int | None:
        """Bytes of text that one token stands for at most: an endpoint refuses texts that cannot
        fit before it encodes them. None: not known."""
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

    @property
    def longest_token(self) -> int:
        return 1

    def encode(self, text: str) -> list[int]:
        return [self.BOS, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")

    def chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode(plain_chat(messages))


class FolderTokenizer:
    """tokenizer.json of a model's folder, read by the package tokenizers."""

    def __init__(self, folder: Path | str, eos_tokens: tuple[int, ...] = ()) -> None:
        """Read it.

        Args:
            eos_tokens: as config.json names them; more come from generation_config.json and
                tokenizer_config.json.
        Raises:
            ModelError: there is none, or the package is not installed.
        """
        folder = Path(folder)
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
        except Exception as error:  # the package raises no other kind
            raise ModelError(f"{path} cannot be read: {error}.") from None
        self._config = _read_json(folder / "tokenizer_config.json")
        more = _read_json(folder / "generation_config.json").get("eos_token_id") or ()
        found = {*eos_tokens, *((more,) if isinstance(more, int) else more)}
        named = self._tokenizer.token_to_id(_text(self._config.get("eos_token")) or "")
        self._eos_tokens = tuple(sorted(found | ({named} if named is not None else set())))
        self._longest_token = _longest_token(self._tokenizer)
        self._template = _read_template(folder, self._config)
        if self._template is not None:
            self._check_template(self._template)

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        return self._eos_tokens

    @property
    def longest_token(self) -> int | None:
        return self._longest_token

    def encode(self, text: str) -> list[int]:
        return self._encode(text, True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch leaves other threads running; `encode` of one text holds Python's lock to its end.
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            return self.encode(plain_chat(messages))
        return self._encode(self._rendered(self._template, messages), False)

    @property
    def has_template(self) -> bool:
        """Whether the model says how a conversation becomes a text; otherwise `plain_chat` does."""
        return self._template is not None

    def _check_template(self, template: str) -> None:
        """Find now what would fail in the first conversation."""
        if importlib.util.find_spec("jinja2") is None:
            return  # whoever wants no conversations need not install it
        jinja = importlib.import_module("jinja2")
        try:
            jinja.Environment().parse(template)
        except jinja.TemplateSyntaxError as error:
            place = f"line {error.lineno} of the model's chat template"
            raise ModelError(f"{place} cannot be read: {error}.") from None

    def _rendered(self, template: str, messages: Sequence[Message]) -> str:
        try:
            jinja = importlib.import_module("jinja2")
            sandbox = importlib.import_module("jinja2.sandbox")
        except ImportError:
            raise ModelError(
                "the model's chat template needs the package jinja2: pip install 'attnloom[serve]'."
            ) from None

        def refused(message: object) -> RequestError:
            return RequestError(f"the model's chat template refuses these messages: {message}")

        def refuse(message: object) -> None:
            raise refused(message)

        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        special = {name: _text(self._config.get(name)) or "" for name in ("bos_token", "eos_token")}
        try:
            return environment.from_string(template).render(
                messages=messages, add_generation_prompt=True, **special
            )
        except (jinja.TemplateError, TypeError) as error:
            raise refused(error) from None


def plain_chat(messages: Sequence[Message]) -> str:
    """A conversation for models without a chat template."""
    said = (f"{message['role']}: {message['content']}\n" for message in messages)
    return "".join(said) + "assistant:"


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a TextStream stood."""

    num_tokens: int
    start: int
    end: int
    held: str
    stopped: bool


class TextStream:
    """Text of a growing list of tokens, in pieces of whole characters, up to a stop text.

    Attributes:
        held: characters that may begin a stop text.
        stopped: whether one came.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._start = self._end = 0  # tokens whose text gives context, tokens whose text is out
        self.held = ""
        self.stopped = False

    def mark(self) -> Mark:
        """Where it stands now, for `go_back`."""
        return Mark(len(self._tokens), self._start, self._end, self.held, self.stopped)

    def go_back(self, mark: Mark) -> None:
        """Forget what came since."""
        del self._tokens[mark.num_tokens :]
        self._start, self._end = mark.start, mark.end
        self.held, self.stopped = mark.held, mark.stopped

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
        held, self.held = self.held + rest, ""
        return held

    def _release(self, text: str) -> str:
        text, self.held = self.held + text, ""
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        if held:
            text, self.held = text[:-held], text[-held:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _longest_token(tokenizer: Any) -> int | None:
    """Bytes of the longest token; None where one that stands for unknown text may hold any."""
    model = tokenizer.model
    unknown = getattr(model, "unk_token", None) is not None or not hasattr(model, "unk_token")
    if unknown and not getattr(model, "byte_fallback", False):
        return None
    # Written with a character for each byte, or as it is: never shorter than the text.
    return max((len(token.encode()) for token in tokenizer.get_vocab()), default=None)


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {one.get("name"): one.get("template") for one in found}.get("default")
    return found if isinstance(found, str) else None


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}.") from None
