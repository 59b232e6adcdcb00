"""What the engine's thread does for one request: its prompts, and the answers to each, one after the other.

Owns the order of events, and that the engine is free again when the iterator is closed; knows nothing of HTTP. The
answers to one prompt share the seed and differ in the choice index, which the noise is keyed with.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from moespeq.decode.engine import Engine
from moespeq.decode.logprobs import TokenLogprob
from moespeq.decode.params import SamplingParams
from moespeq.ports import Clock
from moespeq.server.grammar import Grammar
from moespeq.server.metrics import ServerMetrics
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
    """Choice `index` is complete."""

    index: int
    finish_reason: FinishReason


Event = PromptEcho | ChoicePiece | ChoiceEnd


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """A request as the engine understands it. Choices are counted over prompts first, then over `n`.

    sampling: fields of SamplingParams, checked; None: no token is asked for, and prompts are only given back.
    num_top: log-probabilities of what is given back and generated, and of so many others beside each; None: none.
    """

    prompts: tuple[Sequence[int], ...]
    sampling: dict[str, Any] | None
    n: int = 1
    echo: bool = False
    num_top: int | None = None
    grammar: Grammar | None = None

    def run(
        self, engine: Engine, metrics: ServerMetrics, clock: Clock, arrived_s: float
    ) -> Generator[Event, None, None]:
        """Events, each as soon as there is one. On the engine's thread; close it to end early."""
        try:
            yield from self._answers(engine, metrics, clock, arrived_s)
        except Exception as error:
            metrics.count_failure(error)
            raise
        metrics.observe_request(clock.now_s() - arrived_s)

    def _answers(self, engine: Engine, metrics: ServerMetrics, clock: Clock, arrived_s: float) -> Iterator[Event]:
        for number, prompt in enumerate(self.prompts):
            scores: tuple[TokenLogprob, ...] = ()
            if self.echo and self.num_top is not None:
                scores = engine.prompt_logprobs(prompt, num_top=self.num_top)
            for index in range(number * self.n, (number + 1) * self.n):
                if self.echo:
                    yield PromptEcho(index, scores)
                if self.sampling is None:
                    metrics.count_scored(len(prompt))
                    yield ChoiceEnd(index, FinishReason.LENGTH)
                else:
                    yield from self._answer(engine, prompt, index, metrics, clock, arrived_s)

    def _answer(
        self,
        engine: Engine,
        prompt: Sequence[int],
        index: int,
        metrics: ServerMetrics,
        clock: Clock,
        arrived_s: float,
    ) -> Iterator[Event]:
        sampling, last_s = {**(self.sampling or {}), "logprobs": self.num_top}, arrived_s
        if self.grammar is not None:
            sampling["logits_processors"] = (self.grammar.processor(len(prompt)),)
        with closing(engine.stream(prompt, choice_index=index % self.n, **sampling)) as stream:
            for number, piece in enumerate(stream):
                now_s = clock.now_s()
                if piece.report is not None:
                    metrics.observe_piece(
                        piece.report, len(piece.tokens), now_s - last_s, is_first=number == 0, prompt_tok=len(prompt)
                    )
                last_s = now_s
                yield ChoicePiece(index, piece.text, piece.tokens, piece.logprobs)
            result = stream.result
        metrics.observe_end(result)
        yield ChoiceEnd(index, result.finish_reason)


def check_sampling(engine: Engine, sampling: dict[str, Any]) -> None:
    """Raise UsageError for what the engine would refuse, before the request queues."""
    SamplingParams.from_generation_config(engine.generation_config, **sampling)
