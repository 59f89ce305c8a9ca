"""Tokenizers, texts that grow, and drawing tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnloom.serving import (
    ByteTokenizer,
    FolderTokenizer,
    ModelError,
    Request,
    RequestError,
    SamplingParams,
    sampling,
)
from attnloom.serving.sampling import Draw, sample
from attnloom.serving.text import TextStream


def grow(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(ByteTokenizer(), stop)
    pieces = []
    for token in text.encode():
        pieces.append(stream.add(token))
        if stream.stopped:
            return pieces, stream
    return [*pieces, stream.close()], stream


@pytest.mark.parametrize("text", ["", "plain", "grün", "日本語 text", "a🎉b", "\n\n é"])
def test_pieces_are_whole_characters(text: str) -> None:
    pieces, _ = grow(text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_character_come_out_at_the_end() -> None:
    stream = TextStream(ByteTokenizer())
    assert [stream.add(65), stream.add(0xE2), stream.close()] == ["A", "", "\ufffd"]


@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("one\n\ntwo", ("\n\n",), "one"),
        ("one\ntwo", ("\n\n",), "one\ntwo"),
        ("aab", ("ab",), "a"),
        ("abcabd", ("abd", "zz"), "abc"),
        ("xEND", ("END", "xE"), ""),
        ("übER", ("bE",), "ü"),
        ("ends with EN", ("END",), "ends with EN"),
    ],
)
def test_stop_texts_never_come_out(text: str, stop: tuple[str, ...], want: str) -> None:
    pieces, stream = grow(text, stop)
    assert "".join(pieces) == want
    assert stream.stopped == any(s in text for s in stop)


def test_a_tokenizer_of_a_folder(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'serve'")
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({**{c: i for i, c in enumerate("abcĠ")}, "<s>": 4, "</s>": 5}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FolderTokenizer(tmp_path)
    assert tokenizer.encode("ab c") == [0, 1, 3, 2]
    assert tokenizer.decode([0, 3, 1, 5]) == "a b"
    assert FolderTokenizer(str(tmp_path)).encode("ab c") == [0, 1, 3, 2]  # as load_decoder takes it
    assert tokenizer.eos_tokens == ()
    said = [{"role": "user", "content": "a"}]
    plain = "user: a\nassistant:"
    assert tokenizer.chat(said) == tokenizer.encode(plain)
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role != 'user' %}"
        "{{ raise_exception('only users') }}{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}b{% endif %}"
    )
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    tokenizer = FolderTokenizer(tmp_path, (5,))
    assert tokenizer.eos_tokens == (2, 5)
    assert tokenizer.chat(said) == [4, 0, 1]
    with pytest.raises(RequestError, match="only users"):
        tokenizer.chat([{"role": "system", "content": "a"}])
    with pytest.raises(ModelError, match=r"holds no tokenizer.json"):
        FolderTokenizer(tmp_path / "none")


def counts(params: SamplingParams, logits: torch.Tensor, num: int = 4000) -> torch.Tensor:
    draws = [Draw(params, 1, place) for place in range(num)]
    tokens = sample(logits.expand(num, -1), draws).read()
    return torch.bincount(torch.tensor(tokens), minlength=logits.size(-1)) / num


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf])
    for temperature in (0.5, 1.0, 2.0):
        found = counts(SamplingParams(temperature=temperature), logits)
        want = (logits / temperature).softmax(-1)
        assert (found - want).abs().max() < 0.03
        assert found[4] == 0


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    logits = torch.tensor([0.1, 0.2, 0.4, 0.3]).log()
    found = counts(SamplingParams(top_k=2), logits)
    assert (found - torch.tensor([0, 0, 4 / 7, 3 / 7])).abs().max() < 0.03
    found = counts(SamplingParams(top_p=0.65), logits)
    assert (found - torch.tensor([0, 0, 4 / 7, 3 / 7])).abs().max() < 0.03
    assert counts(SamplingParams(top_p=0.7001), logits)[1] > 0.1
    assert counts(SamplingParams(top_p=1e-9), logits)[2] == 1
    # top_p is of what top_k leaves
    assert counts(SamplingParams(top_k=2, top_p=0.5), logits)[2] == 1


def test_few_of_many_tokens_are_found_without_a_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(0))
    for params in (SamplingParams(top_k=50), SamplingParams(top_k=1000, top_p=0.8)):
        draws = [Draw(params, 3, place) for place in range(200)]
        monkeypatch.setattr(sampling, "FEW", 1024)
        found = sample(logits, draws).read()
        monkeypatch.setattr(sampling, "FEW", 0)
        assert sample(logits, draws).read() == found
        assert len({*found}) > 100


def test_a_token_is_drawn_alike_whatever_other_rows_are_drawn() -> None:
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    wishes = [
        SamplingParams(),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, top_k=9),
        SamplingParams(temperature=1.3),
        SamplingParams(top_k=4, top_p=0.5),
        SamplingParams(top_k=2000),
    ]
    for place in range(20):
        draws = [Draw(params, 7, place) for params in wishes]
        alone = [sample(logits[i : i + 1], [draw]).read()[0] for i, draw in enumerate(draws)]
        assert sample(logits, draws).read() == alone


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9999)])
def test_the_largest_random_number_drew_what_cannot_be(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.zeros(1, 1000)
    logits[:, 700:] = -torch.inf
    for number in (0.0, 1 - 2**-53, 1.0):
        monkeypatch.setattr(Draw, "uniform", lambda draw, number=number: number)
        (token,) = sample(logits, [Draw(params, 0, 0)]).read()
        assert token == 0 if number == 0 else 690 < token < 700


@pytest.mark.parametrize("wish", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 2000}], ids=str)
@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-309, 3e-308, 1e-300, 1e-200, 1e-60])
def test_a_temperature_of_almost_0_drew_a_token_beyond_the_last(
    temperature: float, wish: dict[str, Any]
) -> None:
    """Logits that are divided by it leave float64."""
    for scale in (1.0, 1e38, 1e-38):
        logits = torch.tensor([[0.1, -3.0, 3.0, 2.9999998], [-1.0, -2.0, -torch.inf, -1.0000001]])
        params = SamplingParams(temperature=temperature, **wish)
        assert sample(logits * scale, [Draw(params, 1, 0)] * 2).read() == [2, 0]


def test_rows_follow_their_own_wishes() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [5.0, 5.1, 5.0], [0.0, 0.0, 9.0]])
    wild = SamplingParams(temperature=100, top_k=2)
    greedy = SamplingParams(temperature=0)
    seen = {
        tuple(sample(logits, [Draw(p, seed, 0) for p in (greedy, wild, greedy)]).read())
        for seed in range(30)
    }
    assert {row[0] for row in seen} == {1} and {row[2] for row in seen} == {2}
    assert {row[1] for row in seen} in ({0, 1}, {1, 2})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SamplingParams(stop="END"), "stop is 'END'; it must be texts."),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop=(1,)), "stop is (1,); it must be texts."),  # type: ignore[arg-type]
        (
            lambda: SamplingParams(max_tokens=1.5),  # type: ignore[arg-type]
            "max_tokens is 1.5; it must be a whole number, 1 or more.",
        ),
        (
            lambda: SamplingParams(seed=1.5),  # type: ignore[arg-type]
            "seed is 1.5; it must be a whole number or None.",
        ),
        (
            lambda: SamplingParams(temperature="a"),  # type: ignore[arg-type]
            "temperature is 'a'; it must be from 0 to 100.",
        ),
        (
            lambda: SamplingParams(temperature=float("nan")),
            "temperature is nan; it must be from 0 to 100.",
        ),
        (
            lambda: SamplingParams(top_k=True),
            "top_k is True; it must be a whole number, 0 or more.",
        ),
        (
            lambda: Request((1, 1.5)),  # type: ignore[arg-type]
            "the prompt is (1, 1.5); it must be a tuple of tokens, which are whole numbers.",
        ),
        (
            lambda: Request("abc"),  # type: ignore[arg-type]
            "the prompt is 'abc'; it must be a tuple of tokens, which are whole numbers.",
        ),
    ],
)
def test_values_of_another_kind_are_refused(make: Callable[[], object], text: str) -> None:
    """A stop text that was no tuple stopped at each of its letters; others failed in a step."""
    with pytest.raises(RequestError) as caught:
        make()
    assert str(caught.value) == text
