"""Three ways to decode the same questions from the same disk in the same memory: plain, speculative, on demand.

Every pass runs twice: as fast as the disk allows, and with reads paced to a link bandwidth, since a model this small
sits in the page cache. The paced run starts from an empty device, like the other, and must give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moespeq.api import load
from moespeq.decode.engine import Engine
from moespeq.decode.generation import GenerationResult, StreamPiece
from moespeq.demo.assets import Question
from moespeq.progress import Meter, ProgressSink

__all__ = ["PassResult", "run_pass"]

OnText = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PassResult:
    """One pass over all questions. `paced` has the tokens of `unpaced`, at the link's speed."""

    name: str
    num_slots: int
    unpaced: tuple[GenerationResult, ...]
    paced: tuple[GenerationResult, ...]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """The new tokens of each answer."""
        return [result.tokens for result in self.unpaced]

    @property
    def num_tokens(self) -> int:
        """New tokens over all answers."""
        return sum(map(len, self.tokens))

    def total(self, name: str) -> int:
        """A statistic summed over the answers."""
        return sum(getattr(result.stats, name) for result in self.unpaced)

    @property
    def link_bytes_per_tok(self) -> float:
        """Bytes over the link per new token, prefill included."""
        return self.total("link_bytes") / self.num_tokens

    @property
    def committed_per_round(self) -> float:
        return self.total("committed") / max(1, self.total("rounds"))

    @property
    def acceptance(self) -> float:
        return self.total("accepted") / max(1, self.total("drafted"))

    @property
    def routes(self) -> dict[str, int]:
        """Routes the draft foretold: exact, same_set, wrong."""
        parts = [result.stats.routes.to_json() for result in self.unpaced]
        return {name: sum(part[name] for part in parts) for name in ("exact", "same_set", "wrong")}

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_slots": self.num_slots,
            "answers": [result.to_json() for result in self.unpaced],
            "unpaced_s": round(total_s(self.unpaced), 3),
            "paced_s": round(total_s(self.paced), 3),
        }


def total_s(results: Sequence[GenerationResult]) -> float:
    """Seconds from prompts to last tokens."""
    return sum(result.stats.ttft_s + result.stats.decode_s for result in results)


def run_pass(
    name: str,
    store: Path,
    questions: Sequence[Question],
    *,
    link_bytes_per_s: float,
    on_text: OnText,
    progress: ProgressSink | None = None,
    options: dict[str, Any],
    sampling: dict[str, Any],
) -> PassResult:
    """Answer `questions` unpaced, streaming to `on_text`, then paced, telling `progress` how many tokens are there."""
    with load(store, **options) as engine:
        num_slots = engine.plan.num_slots
        unpaced = tuple(_spoken(engine, question, on_text, sampling) for question in questions)
    meter = Meter(progress, sum(len(result.tokens) for result in unpaced))
    with load(store, **options, link_bytes_per_s=link_bytes_per_s) as engine:
        paced = tuple(
            _answer(engine, question, lambda piece: meter.add(len(piece.tokens), "on a paced link"), sampling)
            for question in questions
        )
    return PassResult(name, num_slots, unpaced, paced)


def _spoken(engine: Engine, question: Question, on_text: OnText, sampling: dict[str, Any]) -> GenerationResult:
    result = _answer(engine, question, lambda piece: on_text(piece.text), sampling)
    on_text("\n")
    return result


def _answer(
    engine: Engine, question: Question, on_piece: Callable[[StreamPiece], object], sampling: dict[str, Any]
) -> GenerationResult:
    stream = engine.stream(question.prompt, **sampling)
    for piece in stream:
        on_piece(piece)
    return stream.result
