"""A request in the engine: what is drawn for it becomes text here, by code of users."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

from attnloom.errors import NotFiniteError, counted
from attnloom.serving.launched import Rows
from attnloom.serving.request import Finish, Logprob, Output, Sequence
from attnloom.serving.text import TextStream


@dataclass(frozen=True, slots=True)
class Said:
    """What a step adds to a request. error: where finish is Finish.ERROR."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: Finish | None = None
    error: Exception | None = None


@dataclass(slots=True)
class Served:
    """A request in the engine. arrived: when, in seconds of the monotonic clock."""

    sequence: Sequence
    stream: TextStream
    arrived: float

    def say(self, rows: Rows, eos: Collection[int]) -> Said:
        """What is drawn, up to what ends the request: a tokenizer that raises does, and logits
        that say nothing. An interrupt leaves everything as it was, to be drawn again."""
        mark = self.stream.mark()
        try:
            return self._say(rows.tokens, eos) if all(rows.sound) else self._fail(self._unsound())
        except BaseException:
            self.stream.go_back(mark)
            raise

    def _say(self, drawn: Items[int], eos: Collection[int]) -> Said:
        params, stream = self.sequence.request.params, self.stream
        left = params.max_tokens - self.sequence.num_output
        taken: list[int] = []
        text, finish = "", None
        try:
            for token in drawn:
                taken.append(token)
                if token in eos and not params.ignore_eos:
                    finish = Finish.STOP
                else:
                    text += stream.add(token)
                    if stream.stopped:
                        finish = Finish.STOP
                    elif len(taken) >= left:
                        finish = Finish.LENGTH
                if finish is not None:
                    text += stream.close()
                    break
        except Exception as error:  # of the tokenizer, which may know no text for a token
            return self._fail(error, taken, text)
        return Said(tuple(taken), text, finish)

    def _fail(self, error: Exception, taken: Items[int] = (), text: str = "") -> Said:
        try:
            text += self.stream.close()
        except Exception:  # the tokenizer's again
            text += self.stream.held
        return Said(tuple(taken), text, Finish.ERROR, error)

    def _unsound(self) -> NotFiniteError:
        sequence = self.sequence
        return NotFiniteError(
            f"the model's logits after {counted(len(sequence.tokens), 'token')} (prompt and "
            f"output) of {sequence.request.name!r} are NaN or infinite, so that no token can be "
            "drawn from them. Look for such weights, or for a dtype too narrow for the model."
        )

    def output(self, said: Said, logprobs: list[Logprob | None] | None) -> Output:
        """It, as it is handed out, once the sequence has its tokens."""
        sequence, found = self.sequence, None
        request = sequence.request
        if request.params.logprobs is not None and logprobs is not None and said.tokens:
            found = tuple(one for one in logprobs[: len(said.tokens)] if one is not None)
        return Output(
            request.name, said.tokens, said.text, said.finish, len(request.prompt),
            sequence.num_output, sequence.num_shared, found, said.error,
        )  # fmt: skip
