"""Log-probabilities over loopback, with OpenAI's own client."""

from __future__ import annotations

import pytest

from tests.serving.endpoint import GREEDY, Running, expected

fastapi = pytest.importorskip("fastapi", reason="needs the extra 'serve'")
openai = pytest.importorskip("openai", reason="needs the extra 'dev'")


def test_completions_with_logprobs(running: Running) -> None:
    create = running.client().completions.create
    whole = create(prompt="Once", max_tokens=8, logprobs=2, n=2, **GREEDY)
    for choice in whole.choices:
        found = choice.logprobs
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 8
        assert len(found.text_offset) == 8 and found.text_offset[0] == 0
        for value, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
            assert value == max(top.values()) <= 0
    pieces = create(prompt="Once", max_tokens=8, logprobs=2, stream=True, **GREEDY)
    said = [piece.choices[0] for piece in pieces]
    want = whole.choices[0].logprobs
    for name in ("tokens", "text_offset"):
        assert [v for one in said if one.logprobs for v in getattr(one.logprobs, name)] == (
            getattr(want, name)
        )
    assert "".join(one.text for one in said) == expected("Once", 8)
    assert create(prompt="Once", max_tokens=2, **GREEDY).choices[0].logprobs is None
    zero = create(prompt="Once", max_tokens=2, logprobs=0, **GREEDY).choices[0].logprobs
    assert len(zero.token_logprobs) == 2 and zero.top_logprobs is None


def test_chat_with_logprobs(running: Running) -> None:
    create = running.client().chat.completions.create
    messages = [{"role": "user", "content": "Hello"}]
    whole = create(messages=messages, max_tokens=8, logprobs=True, top_logprobs=3, **GREEDY)
    content = whole.choices[0].logprobs.content
    assert len(content) == 8
    for one in content:
        assert one.logprob == one.top_logprobs[0].logprob and len(one.top_logprobs) == 3
        assert one.bytes is None or bytes(one.bytes).decode() == one.token
    pieces = create(
        messages=messages, max_tokens=8, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    said = [c.logprobs.content for piece in pieces for c in piece.choices if c.logprobs]
    assert [one.token for some in said for one in some] == [one.token for one in content]
    bare = create(messages=messages, max_tokens=2, logprobs=True, **GREEDY).choices[0]
    assert [one.top_logprobs for one in bare.logprobs.content] == [[], []]
    off = create(messages=messages, max_tokens=2, logprobs=False, top_logprobs=0, **GREEDY)
    assert off.choices[0].logprobs is None


def test_a_stop_text_is_held_back_but_its_tokens_are_told(running: Running) -> None:
    create = running.client().completions.create
    text = expected("Once", 12)
    stop = next(text[i : i + 2] for i in range(3, 10) if text[i : i + 2].isascii())
    end = text.index(stop)
    pieces = create(prompt="Once", max_tokens=12, stop=stop, logprobs=0, stream=True, **GREEDY)
    said = [piece.choices[0] for piece in pieces]
    assert "".join(one.text for one in said) == text[:end]
    tokens = [token for one in said if one.logprobs for token in one.logprobs.tokens]
    assert "".join(tokens).endswith(stop)
