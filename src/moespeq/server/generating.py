"""What the engine's thread does for one request: a turn for each answer to each of its prompts.

Owns the order of events, and that the engine is free again when a turn is closed; knows nothing of HTTP. The answers to
one prompt share the seed and differ in the choice index, which the noise is keyed with. Every answer begins with what
earlier prompts left in the prefix cache, which changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from moespeq.decode.engine import Engine
from moespeq.decode.generation import TokenSink
from moespeq.decode.logprobs import TokenLogprob
from moespeq.model.images import ImagePrompt
from moespeq.ports import Clock
from moespeq.server.grammar import Grammar
from moespeq.server.metrics import ServerMetrics
from moespeq.server.worker import Turn
from moespeq.types import FinishReason

__all__ = ["ChoiceEnd", "ChoicePiece", "Event", "GenerationTask", "PromptEcho", "check_sampling"]


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """Choice `index` begins with its prompt; logprobs: of the prompt's tokens but the first, where asked for."""

    index: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """What a round added to choice `index`."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Choice `index` is complete. cached_tok: of its prompt, those that needed no prefill, told by the first choice."""

    index: int
    finish_reason: FinishReason
    cached_tok: int = 0


Event = PromptEcho | ChoicePiece | ChoiceEnd


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """A request as the engine understands it. Choices are counted over prompts first, then over `n`.

    sampling: fields of SamplingParams, checked; None: no token is asked for, and prompts are only given back.
    sink: makes what takes an answer's tokens, in place of the engine's own.
    num_top: log-probabilities of what is given back and generated, and of so many others beside each; None: none.
    """

    prompts: tuple[Sequence[int] | ImagePrompt, ...]
    sampling: dict[str, Any] | None
    n: int = 1
    echo: bool = False
    num_top: int | None = None
    grammar: Grammar | None = None
    sink: Callable[[], TokenSink] | None = None

    def turns(self, metrics: ServerMetrics, clock: Clock, arrived_s: float) -> Iterator[Turn[Engine]]:
        """One an answer, for the engine's thread, in this order; each yields events as soon as there are any."""
        for number, prompt in enumerate(self.prompts):
            echo = _Echo(self, prompt)
            for index in range(number * self.n, (number + 1) * self.n):
                yield partial(self._turn, echo, index, metrics, clock, arrived_s)
        metrics.observe_request(clock.now_s() - arrived_s)

    def _turn(
        self, echo: _Echo, index: int, metrics: ServerMetrics, clock: Clock, arrived_s: float, engine: Engine
    ) -> Generator[Event, None, None]:
        try:
            yield from self._answer(echo, index, metrics, clock, arrived_s, engine)
        except GeneratorExit:  # the client left
            raise
        except BaseException as error:
            metrics.count_failure(error)
            raise

    def _answer(
        self, echo: _Echo, index: int, metrics: ServerMetrics, clock: Clock, arrived_s: float, engine: Engine
    ) -> Iterator[Event]:
        if self.echo:
            yield PromptEcho(index, echo.scores(engine))
        if self.sampling is None:
            metrics.count_scored(len(echo.prompt))
            yield ChoiceEnd(index, FinishReason.LENGTH)
            return
        sampling, last_s = {**self.sampling, "logprobs": self.num_top}, arrived_s
        sink = self.sink and self.sink()
        if self.grammar is not None:
            sampling["logits_processors"] = (self.grammar.processor(len(echo.prompt)),)
        with closing(
            engine.stream(echo.prompt, choice_index=index % self.n, reuse="prompt", sink=sink, **sampling)
        ) as stream:
            is_prefilled = False
            for piece in stream:
                if piece.report is not None:
                    now_s = clock.now_s()
                    if is_prefilled:
                        metrics.observe_round(piece.report, len(piece.tokens), now_s - last_s)
                    else:
                        metrics.observe_prefill(piece.report, now_s - last_s, len(echo.prompt), stream.reused_tok)
                    last_s, is_prefilled = now_s, True
                yield ChoicePiece(index, piece.text, piece.tokens, piece.logprobs)
            result = stream.result
        metrics.observe_end(result)
        yield ChoiceEnd(index, result.finish_reason, 0 if index % self.n else stream.reused_tok)


class _Echo:
    """One prompt, scored when the first of its answers begins with it."""

    def __init__(self, task: GenerationTask, prompt: Sequence[int] | ImagePrompt) -> None:
        self.prompt, self._num_top = prompt, task.num_top
        self._scores: tuple[TokenLogprob, ...] | None = None

    def scores(self, engine: Engine) -> tuple[TokenLogprob, ...]:
        """Of all tokens but the first, where log-probabilities are asked for."""
        if self._scores is None:
            has_scores = self._num_top is not None
            self._scores = engine.prompt_logprobs(self.prompt, num_top=self._num_top or 0) if has_scores else ()
        return self._scores


def check_sampling(engine: Engine, sampling: dict[str, Any]) -> None:
    """Raise UsageError for what the engine would refuse, before the request queues."""
    engine.sampling_params(**sampling)
