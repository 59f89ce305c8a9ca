"""A text that takes long to be cut into tokens holds nobody up."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from attnloom.serving import FolderTokenizer
from tests.serving.endpoint import GREEDY, Running


def make_tokenizer(folder: Path, **options: str) -> FolderTokenizer:
    """Of bytes, as those of Llama 3 are at heart."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'serve'")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    vocab = {c: i for i, c in enumerate([*sorted(byte_level.alphabet()), "Ġthe", "<s>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], **options))
    made.pre_tokenizer = byte_level(add_prefix_space=False)
    made.save(str(folder / "tokenizer.json"))
    return FolderTokenizer(folder)


def test_a_long_text_does_not_stop_other_threads(tmp_path: Path) -> None:
    """The package held Python's lock while it encoded: /health took seconds, streams stood."""
    tokenizer = make_tokenizer(tmp_path)
    work = threading.Thread(target=tokenizer.encode, args=("some words " * 20_000,))
    turns, longest = 0, 0.0
    begun = last = time.monotonic()
    work.start()
    while work.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        turns, longest, last = turns + 1, max(longest, now - last), now
    assert turns > 5 and longest < 0.7 * (last - begun)


def test_a_text_that_cannot_fit_is_not_encoded(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("openai", reason="needs the extra 'dev'")
    encoded: list[int] = []
    encode = running.engine.tokenizer.encode  # type: ignore[union-attr]

    def counted(text: str) -> list[int]:
        encoded.append(len(text))
        return encode(text)

    monkeypatch.setattr(running.engine.tokenizer, "encode", counted)
    client = running.client()
    for text in ("a" * (1 << 20), "é" * 201):
        with pytest.raises(openai.BadRequestError, match="hold more than 400") as caught:
            client.completions.create(prompt=text, **GREEDY)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match=r"messages has .* bytes of text"):
            client.chat.completions.create(messages=[{"role": "user", "content": text}], **GREEDY)
    assert not encoded
    assert client.completions.create(prompt="a" * 390, max_tokens=1, **GREEDY)
    assert encoded == [390]


def test_the_longest_token_bounds_a_text(tmp_path: Path) -> None:
    assert make_tokenizer(tmp_path).longest_token == len("Ġthe".encode())
    # A token for what is unknown may stand for any text, unless bytes stand for it.
    assert make_tokenizer(tmp_path, unk_token="<s>").longest_token is None
    assert make_tokenizer(tmp_path, unk_token="<s>", byte_fallback=True).longest_token == 5  # type: ignore[arg-type]
