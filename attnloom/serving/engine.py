"""Engine: requests in, text out, one step of the model at a time."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NoReturn

from attnloom.errors import CopyError, OptionError, RequestError, counted
from attnloom.paged import PagedKVCache
from attnloom.paged.book import whole
from attnloom.paged.table import check_page_size
from attnloom.serving.decoder import Decoder
from attnloom.serving.drafts import Drafter, DraftTree
from attnloom.serving.exclusive import Exclusive
from attnloom.serving.launched import Launched, Rows
from attnloom.serving.metrics import Metrics
from attnloom.serving.request import Finish, Output, Request, SamplingParams, Sequence
from attnloom.serving.runner import ModelRunner
from attnloom.serving.scheduler import Chunk, Limits, Scheduler
from attnloom.serving.served import Served
from attnloom.serving.static import CudaGraphs
from attnloom.serving.text import TextStream, Tokenizer


class Engine:
    """Continuous batching over a paged cache: every step takes a token of each sequence that
    decodes and fills up with chunks of prompts.

    Not for several threads at once: a step while another runs is refused. See Service for that.

    Attributes:
        scheduler: who runs, who waits.
        cache: PagedKVCache of the model's layers.
        metrics: counts since the start.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        limits: Limits | None = None,
        *,
        num_pages: int | None = None,
        page_size: int = 64,
        drafter: Drafter | None = None,
        cuda_graphs: CudaGraphs = "auto",
        run_ahead: bool | None = None,
    ) -> None:
        """Make an engine with an empty cache.

        Args:
            tokenizer: without one outputs have no text, and stop texts are refused.
            num_pages: of the cache; default: for a quarter of max_running sequences of full
                length, at least one.
            drafter: guesses tokens that are then verified, several in one step.
            cuda_graphs: capture decoding steps on a CUDA device, one graph for each number of
                sequences, and replay them; see `warm_up`. "auto": where there is such a device;
                with a warning and eagerly if the model cannot be captured. True: or not at all.
            run_ahead: start a step of the same sequences before the tokens of the last one are
                read, so that the device does not wait for the host. A sequence that turns out to
                have ended takes part once more, for nothing; texts stay the same. None: on a CUDA
                device.
        Raises:
            OptionError: a limit means nothing, the cache would not hold one sequence, drafter is
                none, or graphs are wanted on a device that has none.
        """
        limits = limits or Limits(max_length=min(2048, model.config.max_length))
        limits.check(model.config.max_length)
        check_page_size(page_size)
        if drafter is not None and not callable(getattr(drafter, "propose", None)):
            raise OptionError(
                f"drafter is {drafter!r}; it must have a method propose(tokens), as NgramDrafter()."
            )
        longest = -(-limits.max_length // page_size)
        if num_pages is None:
            num_pages = longest * max(1, limits.max_running // 4)
        num_pages = whole(num_pages, "num_pages")
        if num_pages < longest:
            raise OptionError(
                f"{counted(num_pages, 'page')} of {counted(page_size, 'token')} cannot hold one "
                f"sequence of max_length {limits.max_length}. Give at least "
                f"{counted(longest, 'page')}, or lower max_length."
            )
        config = model.config
        self.tokenizer, self.limits, self._drafter = tokenizer, limits, drafter
        self.cache = PagedKVCache(
            num_pages,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            num_layers=config.num_layers,
            dtype=model.dtype,
            device=model.device,
        )
        self.scheduler = Scheduler(self.cache, limits)
        self.metrics = Metrics()
        self._runner = ModelRunner(model, self.cache, limits, cuda_graphs)
        self._eos = {*config.eos_tokens, *(tokenizer.eos_tokens if tokenizer else ())}
        self._served: dict[str, Served] = {}
        if run_ahead is None:
            run_ahead = model.device.type == "cuda"
        self._runs_ahead = run_ahead and drafter is None  # drafts follow from tokens
        self._launched: Launched | None = None
        self._ready: list[Output] = []  # of a step that has not returned yet
        self._exclusive = Exclusive()

    def __reduce__(self) -> NoReturn:
        raise CopyError(
            "an Engine cannot be copied or pickled: requests, their texts and pages belong to one. "
            "Make another of the same model, and add the requests there."
        )

    @property
    def busy(self) -> bool:
        """Whether a request is running or waiting, or a step that was interrupted left outputs."""
        return bool(self._served or self._ready)

    def warm_up(self) -> None:
        """Capture decoding steps now; otherwise each is captured when it is first needed. Does
        nothing without CUDA graphs.

        Raises:
            CaptureError: with cuda_graphs=True, the model cannot be captured.
            OverlapError: a step of this engine runs.
        """
        with self._exclusive.running("warm_up"):
            self._runner.warm_up()

    def check(self, request: Request) -> None:
        """Refuse what can never be served.

        Raises:
            RequestError: it does not fit, or has tokens that the model does not know.
        """
        if not isinstance(request, Request):
            raise RequestError(f"request is {request!r}; it must be a Request.")
        prompt, params = request.prompt, request.params
        vocab_size = self._runner.model.config.vocab_size
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token.")
        if len(prompt) + params.max_tokens > self.limits.max_length:
            raise RequestError(
                f"{counted(len(prompt), 'token')} of prompt and max_tokens {params.max_tokens} are "
                f"more than the {counted(self.limits.max_length, 'token')} that a sequence may "
                "have here."
            )
        wrong = next((t for t in prompt if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} is not one of the model's {vocab_size}.")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop texts need a tokenizer; this engine has none.")

    def add(self, request: Request) -> str:
        """Queue a request; its name, which outputs carry.

        Raises:
            RequestError: it can never be served.
            OverloadedError: too many are waiting.
        """
        self.check(request)
        if request.name in self._served:
            raise RequestError(f"a request named {request.name!r} is being served already.")
        sequence = Sequence.of(request)
        self.scheduler.add(sequence)
        stream = TextStream(self.tokenizer, request.params.stop)
        self._served[request.name] = Served(sequence, stream, time.monotonic())
        self.metrics.requests += 1
        return request.name

    def cancel(self, name: str) -> bool:
        """Forget a request, at once; False if it has ended already. No later step has an output of
        it; a list that a step has returned may."""
        if any(output.name == name for output in self._ready):
            self._ready = [output for output in self._ready if output.name != name]
        served = self._served.pop(name, None)
        if served is None:
            return False
        served.sequence.finish = Finish.CANCELLED
        self.scheduler.remove(served.sequence)
        self.metrics.finished[Finish.CANCELLED.value] += 1
        return True

    def step(self) -> list[Output]:
        """Run the model once; what it adds to each request that it adds something to. A request
        whose tokenizer raises ends alone, with Finish.ERROR. After an error of the step itself
        requests are still there, and the next one computes them anew.

        Raises:
            OverlapError: another step of this engine runs.
            OutOfPagesError: nobody can run, as other sequences of `cache` hold its pages.
        """
        with self._exclusive.running("step"):
            return self._run_step()

    def _run_step(self) -> list[Output]:
        self._propose()
        try:
            self._step()
        except BaseException:  # an interrupt too: pages were extended that hold nothing yet
            self._launched = None
            self.scheduler.preempt_all()
            raise  # what is ready comes with the next step
        outputs, self._ready = self._ready, []
        return outputs

    def _step(self) -> None:
        step, self._launched = self._launched, None
        if step is None or not step.alive:
            step = self._launch(self.scheduler.schedule())
        if step is None:
            return
        following = self._follow(step)
        drawn = zip(step.chunks, step.rows(), strict=True)
        self._launched = following
        live = [each for each in drawn if each[0].sequence.finish is None]
        kept = self._advance([(chunk, rows.tokens) for chunk, rows in live])
        for (chunk, rows), held in zip(live, kept, strict=True):
            if held and chunk.sequence.finish is None:  # another's tokenizer may have cancelled it
                self._take(chunk, rows.at(held))
        self.metrics.preemptions = self.scheduler.num_preemptions
        self.metrics.steps += 1
        self.metrics.computed_tokens += sum(chunk.num_tokens for chunk in step.chunks)

    def _launch(self, chunks: list[Chunk], after: Launched | None = None) -> Launched | None:
        """Start a step; after: one that it takes its tokens from."""
        if not chunks:
            return None
        if after is None or after.drawn is None:
            ahead, logits = 0, self._runner.run(chunks)
        else:
            ahead, logits = 1, self._runner.follow(chunks, after.drawn.tokens)
        return Launched.of(chunks, logits, ahead)

    def _follow(self, step: Launched) -> Launched | None:
        """Start the step after one that is under way, if its tokens decide nothing."""
        if not self._runs_ahead:
            return None
        chunks = self.scheduler.follow(step.chunks)
        return None if chunks is None else self._launch(chunks, step)

    def generate(
        self, prompts: Iterable[tuple[int, ...] | list[int]], params: SamplingParams | None = None
    ) -> list[list[int]]:
        """Output tokens of any number of prompts, in their order. They are queued as room appears,
        behind requests that wait already; those go on meanwhile, and their outputs are lost.

        Raises:
            RequestError: a prompt can never be served; none was begun.
            OverlapError: a step of this engine runs; none was begun.
            NotFiniteError: the model's logits of one are NaN or infinite. Whatever else ends this
                call early, an error of a step or of the tokenizer or an interrupt, cancels those of
                its requests that run or wait, as this does.
        """
        params = params or SamplingParams()
        requests = [
            Request(tuple(prompt) if isinstance(prompt, Iterable) else prompt, params)
            for prompt in prompts
        ]
        for request in requests:
            self.check(request)
        with self._exclusive.running("generate"):
            return self._generate(requests)

    def _generate(self, requests: list[Request]) -> list[list[int]]:
        found: dict[str, list[int]] = {request.name: [] for request in requests}
        coming = deque(requests)
        try:
            while coming or not found.keys().isdisjoint(self._served):
                while coming and self.scheduler.num_room:
                    self.add(coming.popleft())
                for output in self._run_step():
                    if output.name in found:
                        if output.error is not None:
                            raise output.error
                        found[output.name] += output.tokens
        finally:
            for name in found:
                self.cancel(name)
        return list(found.values())

    def _propose(self) -> None:
        if self._drafter is None:
            return
        for sequence in [*self.scheduler.running]:  # a drafter may cancel
            one = sequence.num_pending == 1
            sequence.draft = self._draft(self._drafter, sequence) if one else None

    def _draft(self, drafter: Drafter, sequence: Sequence) -> DraftTree | None:
        """What a drafter says; None, with a warning, if it is of no use."""
        vocab_size = self._runner.model.config.vocab_size
        try:
            draft = drafter.propose(tuple(sequence.tokens))  # which nobody can change
            if draft is None:
                return None
            if not isinstance(draft, DraftTree):
                problem = f"it is a {type(draft).__name__}, not a DraftTree"
            elif all(0 <= token < vocab_size for token in draft.tokens):
                return draft
            else:
                problem = f"{draft.tokens} are not all of the model's {vocab_size} tokens"
        except Exception as error:  # of a user's code: a guess that fails costs time alone
            problem = f"{type(error).__name__}: {error}"
        warnings.warn(f"a draft of {type(drafter).__name__} is dropped: {problem}", stacklevel=4)
        return None

    def _advance(self, drawn: list[tuple[Chunk, list[int]]]) -> list[Items[int]]:
        """Note what the cache holds now; which of the tokens drawn each chunk gives to its
        sequence."""
        paths: list[tuple[Chunk, list[int]]] = []
        kept: list[Items[int]] = []
        for chunk, tokens in drawn:
            sequence = chunk.sequence
            if chunk.draft is None:
                self.scheduler.computed(sequence, sequence.num_computed + chunk.count)
                kept.append(range(len(tokens)))
                continue
            path = chunk.draft.agreed(tokens)
            paths.append((chunk, path))
            kept.append([0, *(1 + node for node in path)])
            self.metrics.drafted_tokens += len(chunk.draft.tokens)
            self.metrics.accepted_tokens += len(path)
            sequence.draft = None
        self._runner.accept(paths)
        return kept

    def _take(self, chunk: Chunk, rows: Rows) -> None:
        """What was drawn for a request becomes an output of it."""
        sequence, served = chunk.sequence, self._served[chunk.sequence.request.name]
        said = served.say(rows, self._eos)
        if sequence.finish is not None:  # the tokenizer cancelled it
            return
        if said.tokens and not sequence.num_output:
            self.metrics.first_token_seconds.observe(time.monotonic() - served.arrived)
        sequence.tokens += said.tokens
        sequence.finish = said.finish
        if chunk.draft is not None:
            computed = min(self.cache.length(_name(sequence)), len(sequence.tokens))
            self.scheduler.computed(sequence, computed)
        self._ready.append(served.output(said, rows.logprobs))
        self.metrics.output_tokens += len(said.tokens)
        if said.finish is not None:
            self._end(served)

    def _end(self, served: Served) -> None:
        sequence = served.sequence
        self.scheduler.remove(sequence, keep=sequence.finish is not Finish.ERROR)
        del self._served[sequence.request.name]
        assert sequence.finish is not None
        self.metrics.finished[sequence.finish.value] += 1
        self.metrics.request_seconds.observe(time.monotonic() - served.arrived)
        self.metrics.shared_tokens += sequence.num_shared
        self.metrics.prompt_tokens += len(sequence.request.prompt)


def _name(sequence: Sequence) -> int:
    assert sequence.cached is not None
    return sequence.cached
