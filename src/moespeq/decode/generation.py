"""One generation from prompt tokens to finish reason: drives the loop, cuts what it proposes, streams text.

committed = accepted + 1, cut after EOS, a stop text or the limit; what is cut is never committed, streamed or counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from moespeq.decode.accept import Accepted, cut
from moespeq.decode.failures import cleaned_up
from moespeq.decode.live_tokens import Reuse
from moespeq.decode.logprobs import TokenLogprob
from moespeq.decode.loop import SpeculativeLoop
from moespeq.decode.observer import Observer
from moespeq.decode.prompt_rows import PromptRows
from moespeq.decode.sampling import Sampler
from moespeq.decode.statistics import GenerationStats, summarize
from moespeq.decode.text import StreamDelta
from moespeq.errors import UsageError
from moespeq.ports import Clock
from moespeq.residency import Residency
from moespeq.types import FinishReason, StepReport

__all__ = ["Generation", "GenerationResult", "StreamPiece", "TokenSink"]

_log = logging.getLogger(__name__)


class TokenSink(Protocol):
    """Takes committed tokens, and may end the generation after one of them."""

    def push(self, tokens: Sequence[int]) -> StreamDelta: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What one round added: its tokens, and the text that is certain by now (it may lag behind the tokens).

    report: what the round, or the prefill that gave the first token, took; logprobs: of the tokens, where asked for.
    """

    text: str
    tokens: tuple[int, ...]
    report: StepReport | None = field(default=None, repr=False, compare=False)
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished generation. `tokens` are the new ones, EOS included; `text` ends before a stop text."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats

    def to_json(self) -> dict[str, object]:
        """What `run --json` prints."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason.value,
            **self.stats.to_json(),
        }


class Generation:
    """Iterate it for pieces; `result` is there when the iteration has ended. Used once, by the engine's thread.

    observer: its own passes follow the text, an empty piece each; they belong to the iteration, not to the result.
    """

    def __init__(
        self,
        loop: SpeculativeLoop,
        residency: Residency,
        clock: Clock,
        prompt: PromptRows,
        sampler: Sampler,
        sink: TokenSink,
        *,
        limit_tok: int,
        rows: int,
        is_cancelled: Callable[[], bool],
        observer: Observer | None = None,
        reuse: Reuse = "nothing",
    ) -> None:
        self._loop, self._residency, self._clock = loop, residency, clock
        self._prompt, self._sampler, self._sink = prompt, sampler, sink
        self.limit_tok, self._rows, self._is_cancelled = limit_tok, rows, is_cancelled
        self._observer, self._reuse = observer, reuse
        self.reused_tok = 0
        self._tokens: list[int] = []
        self._parts: list[str] = []
        self._reports: list[StepReport] = []
        self._finish: FinishReason | None = None
        self._result: GenerationResult | None = None

    @property
    def result(self) -> GenerationResult:
        """The finished generation. Raises UsageError before its end."""
        if self._result is None:
            raise UsageError("The generation has no result yet; iterate the stream to its end first.")
        return self._result

    @property
    def has_result(self) -> bool:
        """Whether the text has come to its end."""
        return self._result is not None

    def __iter__(self) -> Iterator[StreamPiece]:
        with cleaned_up(self._loop):
            yield from self._run()

    def _run(self) -> Iterator[StreamPiece]:
        begin_s = self._clock.now_s()
        wasted_before = self._residency.counters().wasted_bytes
        for _ in self._loop.prefill(self._prompt, self._observer, reuse=self._reuse):
            yield StreamPiece("", ())  # where the caller may leave
        self.reused_tok = self._loop.reused_tok
        first, prefill = self._loop.first(self._sampler)
        piece = self._take(first)
        self._loop.commit_first(piece.tokens[0], self._sampler)
        first_s = self._clock.now_s()
        yield replace(piece, report=prefill, logprobs=self._sampler.take_logprobs())
        while self._finish is None:
            if self._is_cancelled():
                self._finish = FinishReason.CANCELLED
                break
            proposal = self._loop.propose(self._sampler, self.limit_tok - len(self._tokens))
            piece = self._take(proposal)
            report = self._loop.commit(piece.tokens, self._sampler)
            self._reports.append(report)
            yield replace(piece, report=report, logprobs=self._sampler.take_logprobs())
        tail = self._sink.flush()
        self._parts.append(tail)
        self._result = GenerationResult(
            text="".join(self._parts),
            tokens=tuple(self._tokens),
            finish_reason=self._finish,
            stats=summarize(
                self._reports,
                prefill,
                wasted_bytes=self._residency.counters().wasted_bytes - wasted_before,
                rows=self._rows,
                seed=self._sampler.seed,
                prompt_tok=len(self._prompt),
                reused_tok=self.reused_tok,
                ttft_s=first_s - begin_s,
                decode_s=self._clock.now_s() - first_s,
                routes=self._loop.fidelity,
            ),
        )
        _log.info("a text is generated", extra={"facts": _facts(self._result)})
        if tail:
            yield StreamPiece(tail, ())
        if self._observer is not None and self._finish is not FinishReason.CANCELLED:
            for _ in self._observer.follow(self._loop, self._sampler, self._tokens):
                yield StreamPiece("", ())
                if self._is_cancelled():
                    break

    def _take(self, proposal: Accepted) -> StreamPiece:
        """Cut a proposal to what is committed; sets the finish reason."""
        params = self._sampler.params
        kept = cut(
            proposal.tokens,
            eos_token_ids=params.eos_token_ids,
            limit_tok=self.limit_tok - len(self._tokens),
            ignore_eos=params.ignore_eos,
        )
        delta = self._sink.push(kept.tokens)
        tokens = kept.tokens[: delta.num_tokens]
        self._finish = FinishReason.STOP if delta.stopped else kept.finish_reason
        self._tokens.extend(tokens)
        self._parts.append(delta.text)
        return StreamPiece(delta.text, tokens)


def _facts(result: GenerationResult) -> dict[str, object]:
    """What a log says of a generation."""
    stats = result.stats
    facts: dict[str, object] = {
        "finish_reason": result.finish_reason.value,
        "prompt_tok": stats.prompt_tok,
        "reused_tok": stats.reused_tok,
        "tokens": len(result.tokens),
        "ttft_s": round(stats.ttft_s, 4),
        "tokens_per_s": round(stats.tokens_per_s, 2),
    }
    return facts if stats.acceptance is None else {**facts, "acceptance": round(stats.acceptance, 3)}
