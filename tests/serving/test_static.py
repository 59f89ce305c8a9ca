"""Decoding steps over tensors that stay where they are: what a CUDA graph replays, run eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from attnloom.errors import CaptureError, OptionError
from attnloom.paged import PagedKVCache
from attnloom.serving import Decoder, DraftTree, Engine, Limits, Request, SamplingParams
from attnloom.serving import runner as runner_module
from attnloom.serving import static as static_module
from attnloom.serving.attend import PagedAttention, Part, whole_masks
from attnloom.serving.drafts import grow
from attnloom.serving.scheduler import Chunk
from attnloom.serving.static import StaticSteps, StepMode, StepShape, step_sizes
from tests.serving.models import GEMMA, LLAMA, prompt, tiny

LIMITS = Limits(max_running=6, max_step_tokens=40, max_length=160)
WINDOWED = {**GEMMA, "layer_types": ["sliding_attention"] * 3}
MODELS = {"llama": LLAMA, "gemma2": GEMMA}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Decoder:
    return tiny(MODELS[request.param])


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return tiny(LLAMA)


class Never(StaticSteps):
    """Leaves every step to the path that makes all tensors anew."""

    def shape_of(self, chunks: Sequence[Chunk]) -> None:
        return None


def make(model: Decoder, mode: StepMode | None, **options: Any) -> Engine:
    """mode: None makes all tensors of each step anew; "padded" is what is captured on a device, run
    eagerly."""
    engine = Engine(model, None, LIMITS, num_pages=24, page_size=16, **options)
    if "cuda_graphs" not in options:
        runner = engine._runner
        kind = Never if mode is None else StaticSteps
        runner.static = kind(model, runner.cache, runner.masks, LIMITS, mode or "exact")
    return engine


class Guesses:
    """Trees that follow from the text alone, right now and then: the next tokens of `texts`."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def propose(self, tokens: Sequence[int]) -> DraftTree | None:
        random = Random(len(tokens) * 1000 + tokens[-1])
        text = next((t for t in self.texts if t[: len(tokens)] == list(tokens)), [])
        right = text[len(tokens) : len(tokens) + random.randrange(4)]
        paths = [[random.randrange(256), 3], right, [*right[:1], 7, 8]]
        random.shuffle(paths)
        return grow([p for p in paths if p]) if random.random() < 0.7 else None


def events(engine: Engine, seed: int) -> dict[str, list[int]]:
    """Requests that come, go on, are cancelled and end, the same ones for every engine."""
    random = Random(seed)
    found: dict[str, list[int]] = {}
    asked = 0
    for _ in range(200):
        if asked < 6 and random.random() < 0.4:
            length = random.randrange(1, 16)
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            tokens = (asked, *prompt(random.randrange(1, 50), asked))
            engine.add(Request(tokens, params, f"{asked}"))
            asked += 1
        if asked and random.random() < 0.04:
            engine.cancel(f"{random.randrange(asked)}")
        for output in engine.step():
            found.setdefault(output.name, []).extend(output.tokens)
        engine.cache.book.check()
        if asked == 6 and not engine.busy:
            break
    assert not engine.busy
    return found


def test_joins_leaves_and_cancellations(model: Decoder) -> None:
    want = events(make(model, mode=None), 1)
    for mode in ("padded", "exact"):
        engine = make(model, mode)
        assert events(engine, 1) == want
        static = engine._runner.static
        assert static.num_runs > 8
        assert len(static._made) >= 2  # sizes


def test_trees_of_drafts(model: Decoder) -> None:
    """Sequences with drafts and without share a static step; accepted drafts move up."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[i, *prompt(20 + 13 * i, i)] for i in range(3)]
    want = make(model, mode=None).generate(prompts, params)
    texts = [p + w for p, w in zip(prompts, want, strict=True)]
    engine = make(model, mode="padded", drafter=Guesses(texts))
    assert engine.generate(prompts, params) == want
    static = engine._runner.static
    assert static.num_runs > 0.8 * engine.metrics.steps - 3
    assert engine.metrics.accepted_tokens > 20
    assert any(shape.q_len > 1 for shape in static._made)


def test_logits_and_addresses(model: Decoder) -> None:
    """Step for step against the other path; no tensor that a graph would hold ever moves."""
    engines = [make(model, mode=None), make(model, mode="padded")]
    for engine in engines:
        for i in range(3):
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            engine.add(Request((i, *prompt(9 * i + 1, i)), params, f"{i}"))
        engine.step()
    plain, other = engines
    static = other._runner.static
    held: set[int] = set()
    for _ in range(20):
        chunks = [engine.scheduler.schedule() for engine in engines]
        want = plain._runner.run(chunks[0]).rows
        shape = static.shape_of(chunks[1])
        assert shape == StepShape(4, 1)
        found = static.run(chunks[1])
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
        step = static._made[shape].step
        tensors = [*step._ints.tensors.values(), *step._batch._staged.tensors.values()]
        held |= {sum(t.data_ptr() for t in tensors)}
        for engine, mine in zip(engines, chunks, strict=True):
            for chunk, token in zip(mine, want.argmax(-1).tolist(), strict=True):
                engine.scheduler.computed(chunk.sequence, chunk.sequence.num_computed + 1)
                chunk.sequence.tokens.append(token)
    assert len(held) == 1


def test_pages_behind_a_window_are_freed() -> None:
    model = tiny(WINDOWED)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[i, *prompt(40, i)] for i in range(3)]
    want = make(model, mode=None).generate(prompts, params)
    engine = make(model, mode="padded")
    names = [engine.add(Request(tuple(p), params)) for p in prompts]
    found: dict[str, list[int]] = {name: [] for name in names}
    freed = 0
    while engine.busy:
        for output in engine.step():
            found[output.name] += output.tokens
        for sequence in engine.scheduler.running:
            assert sequence.cached is not None
            length = engine.cache.length(sequence.cached)
            freed += engine.cache.drop_before(sequence.cached, max(0, length - 23))
    assert freed >= 9
    assert [found[name] for name in names] == want


@pytest.mark.parametrize("q_len", [1, 4])
def test_a_step_is_captured_over_no_sequence(model: Decoder, q_len: int) -> None:
    """Nothing is written to a page that anybody may hold, and nothing is NaN."""
    engine = make(model, mode="padded")
    cache, static = engine.cache, engine._runner.static
    for stored in (*cache.keys, *cache.values):
        stored[: cache.dropped_page] = 7.0
    static.prepare(StepShape(2, q_len))
    step = static._made[StepShape(2, q_len)].step
    with torch.inference_mode():
        step.take(())
        assert step.compute().isfinite().all()
    assert all((stored[: cache.dropped_page] == 7).all() for stored in cache.keys + cache.values)


def test_which_steps_are_static(llama: Decoder) -> None:
    engine = make(llama, mode="padded")
    static = engine._runner.static
    engine.add(Request((1, 2, 3), SamplingParams(max_tokens=5)))
    (chunk,) = engine.scheduler.schedule()
    sequence = chunk.sequence
    assert static.shape_of([chunk]) is None  # a prompt
    sequence.num_computed = 2
    one = Chunk(sequence, 1, None)
    assert static.shape_of([one]) == StepShape(1, 1)
    assert static.shape_of([one] * 5) == StepShape(6, 1)  # of at most max_running
    tree = Chunk(sequence, 1, DraftTree((1, 2, 3, 4), (-1, 0, 1, -1)))
    assert static.shape_of([one, tree]) == StepShape(2, 8)
    assert static.shape_of([tree] * 6) is None  # 6 * 8 rows are more than a step takes
    sequence.num_computed = 1
    assert static.shape_of([Chunk(sequence, 1, None)]) is None  # the middle of a prompt


def test_sizes_of_steps() -> None:
    assert step_sizes(1) == [1]
    assert step_sizes(6) == [1, 2, 4, 6]
    assert step_sizes(40) == [1, 2, 4, 8, 16, 32, 40]
    assert step_sizes(64) == [1, 2, 4, 8, 16, 32, 48, 64]


def _uncapturable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a device on which the model waits for itself."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(runner_module, "wants_graphs", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", fail)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)


NOT_CAPTURED = (
    "a step of 1 sequence with 1 token each cannot be captured as a CUDA graph: operation not "
    "permitted when stream is capturing. A graph holds no work that waits for the device, such as "
    ".item() in a decoder of your own. Use cuda_graphs=False."
)


def test_what_cannot_be_captured_runs_eagerly(
    llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    want = make(llama, mode=None).generate([prompt(5)], params)
    _uncapturable(monkeypatch)
    engine = make(llama, mode=None, cuda_graphs="auto")
    with pytest.warns(UserWarning) as caught:
        assert engine.generate([prompt(5)], params) == want
    said = [str(warning.message) for warning in caught]
    assert said == [f"{NOT_CAPTURED} Steps run eagerly from now on."]


def test_what_must_be_captured_is_an_error(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    _uncapturable(monkeypatch)
    engine = make(llama, mode=None, cuda_graphs=True)
    engine.add(Request(tuple(prompt(5)), SamplingParams(max_tokens=5)))
    engine.step()
    with pytest.raises(CaptureError) as caught:
        engine.step()
    assert str(caught.value) == NOT_CAPTURED
    with pytest.raises(CaptureError, match="a step of 6 sequences with 1 token each"):
        engine.warm_up()
    assert static_module.wants_graphs("auto", torch.device("cuda"))


@pytest.mark.gpu
def test_graphs_give_the_texts_of_eager_steps() -> None:
    """Joins, leaves, cancellations and drafts under graphs that were captured ahead of time."""
    for given in MODELS.values():
        model = tiny({**given, "head_dim": 64}).to("cuda")
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        prompts = [[i, *prompt(20 + 13 * i, i)] for i in range(3)]
        plain = make(model, mode=None, cuda_graphs=False)
        want = plain.generate(prompts, params)
        texts = [p + w for p, w in zip(prompts, want, strict=True)]
        graphs = make(model, mode=None, cuda_graphs=True)
        graphs.warm_up()
        assert graphs.generate(prompts, params) == want
        drafted = make(model, mode=None, cuda_graphs=True, drafter=Guesses(texts))
        assert drafted.generate(prompts, params) == want
        for engine in (graphs, drafted):
            static = engine._runner.static
            assert static.num_runs > 10
            assert all(made.graph is not None for made in static._made.values())
        assert events(make(model, mode=None, cuda_graphs=True), 2) == events(
            make(model, mode=None, cuda_graphs=False), 2
        )


def test_a_stale_batch_is_refused_before_anything_is_written(llama: Decoder) -> None:
    """Keys and values went into pages that were another sequence's by then; then it was refused."""
    config = llama.config
    cache = PagedKVCache(4, 16, config.num_kv_heads, config.head_dim, num_layers=config.num_layers)
    sequence = cache.new()
    batch = cache.extend([sequence], [5])
    attention = PagedAttention(
        [Part.of(batch, slice(0, 5), None, None)], whole_masks(config, 64, torch.device("cpu"))
    )
    cache.free(sequence)
    assert cache.extend([cache.new()], [5]).table.pages.tolist() == batch.table.pages.tolist()
    for stored in (*cache.keys, *cache.values):
        stored.fill_(7.0)
    new = torch.zeros(5, config.num_kv_heads, config.head_dim)
    with pytest.raises(OptionError, match="still has the old pages of sequence 0"):
        attention(config.layer(0), torch.zeros(5, config.num_heads, config.head_dim), new, new)
    assert all((stored == 7.0).all() for stored in (*cache.keys, *cache.values))
