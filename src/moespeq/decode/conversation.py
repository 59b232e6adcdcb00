"""A conversation with one engine: who said what, how answers are sampled, and what they took together.

Owns messages and settings, not the engine. Each question is asked as the whole conversation by the model's chat
template, the same tokens that `Engine.chat` would take, and the engine prefills what its cache does not hold. So
editing the past needs nothing but other messages: what is still shared is reused. The text of an answer depends on this
conversation, the abandoned questions included, and on no k, memory or link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moespeq.config import nearest_name
from moespeq.decode.engine import Engine
from moespeq.decode.generation import GenerationResult
from moespeq.decode.params import SamplingParams
from moespeq.decode.statistics import GenerationStats
from moespeq.decode.stream import GenerationStream
from moespeq.errors import PromptError, UsageError

__all__ = ["SETTINGS", "Conversation", "ConversationTotals"]

SETTINGS = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "acceptance",
)
"""What may be set between two answers, by the names of SamplingParams."""


@dataclass(frozen=True, slots=True)
class ConversationTotals:
    """Sums over all answers so far; prefilled_tok and reused_tok make up the prompts."""

    answers: int = 0
    answer_tok: int = 0
    prefilled_tok: int = 0
    reused_tok: int = 0
    decode_s: float = 0.0
    committed: int = 0

    def plus(self, result: GenerationResult) -> ConversationTotals:
        """These, and one answer more."""
        stats = result.stats
        return ConversationTotals(
            answers=self.answers + 1,
            answer_tok=self.answer_tok + len(result.tokens),
            prefilled_tok=self.prefilled_tok + stats.prompt_tok - stats.reused_tok,
            reused_tok=self.reused_tok + stats.reused_tok,
            decode_s=self.decode_s + stats.decode_s,
            committed=self.committed + stats.committed,
        )

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, first tokens excluded."""
        return self.committed / self.decode_s if self.decode_s > 0 else 0.0


class Conversation:
    """Mutable. `ask`, iterate the stream, then `keep` its result; a question whose answer is not kept was never asked.

    used_tok: of the context, taken by what was kept. last: of the last answer, also of one forgotten since.
    sampling: settings by name; None is the checkpoint's own. By default an answer may be as long as the context leaves.
    """

    def __init__(self, engine: Engine, *, system: str | None = None, **sampling: Any) -> None:
        self._engine = engine
        self._settings: dict[str, Any] = {}
        self._system = system
        self._turns: list[dict[str, Any]] = []
        self._waiting: list[dict[str, Any]] = []  # images of the next question
        self.totals = ConversationTotals()
        self.last: GenerationStats | None = None
        self.used_tok = 0
        self.set(sampling)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The system message, if there is one, then questions and answers in turn; an image by its name alone."""
        return [_told(message) for message in self._asked]

    @property
    def _asked(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns]

    @property
    def context_tok(self) -> int:
        """How long question and answer may get, everything before them included."""
        return self._engine.plan.context_tok

    @property
    def settings(self) -> SamplingParams:
        """How the next answer is sampled, every default resolved."""
        return self._params(self._settings)

    def set(self, changes: Mapping[str, Any]) -> None:
        """Change settings from the next answer on; None takes one back. Raises UsageError, changing nothing."""
        for name in changes:
            if name not in SETTINGS:
                advice = nearest_name(name, list(SETTINGS)) or f" Settings are {', '.join(SETTINGS)}."
                raise UsageError(f"Unknown setting '{name}'.{advice}")
        settings = {**self._settings, **changes}
        settings = {name: value for name, value in settings.items() if value is not None}
        self._params(settings)
        self._settings = settings

    def set_system(self, text: str | None) -> None:
        """Another system message, or none, from the next answer on; what was said stays."""
        self._system = text or None

    def reset(self) -> None:
        """Forget what was said; system message and settings stay."""
        self._turns, self._waiting, self.used_tok = [], [], 0

    def attach(self, data: bytes, name: str) -> None:
        """Ask the next question about the image in a file's bytes too. Raises UsageError, changing nothing."""
        image = self._engine.images.read(data, f"image {name}")
        self._waiting.append({"type": "image", "image": image, "name": name})

    def detach(self) -> int:
        """Ask the next question about no image; returns how many were attached."""
        count, self._waiting = len(self._waiting), []
        return count

    def ask(self, text: str) -> GenerationStream:
        """The answer to `text` behind all that was kept. Raises UsageError or PromptError."""
        prompt = self._engine.encode_chat([*self._asked, self._question(text)])
        if len(prompt) >= self.context_tok:
            raise PromptError(
                f"Conversation and question have {len(prompt)} tokens, and the context {self.context_tok}, one for the "
                "answer; /reset makes room, as does a larger --ctx-size, or ask something shorter."
            )
        sampling = {"max_new_tokens": self._longest_answer_tok, **self._settings}
        return self._engine.stream(prompt, reuse="history", **sampling)

    def keep(self, text: str, result: GenerationResult) -> None:
        """Remember a question and its answer, a cancelled one as far as it got."""
        self._turns += [self._question(text), {"role": "assistant", "content": result.text}]
        self.detach()
        self.totals, self.last = self.totals.plus(result), result.stats
        self.used_tok = result.stats.prompt_tok + len(result.tokens)

    def _question(self, text: str) -> dict[str, Any]:
        parts = [*self._waiting, {"type": "text", "text": text}]
        return {"role": "user", "content": parts if self._waiting else text}

    @property
    def _longest_answer_tok(self) -> int | None:
        """Where the checkpoint names no limit of its own, the context is one."""
        own = getattr(self._engine.generation_config, "max_new_tokens", None)
        return self.context_tok if own is None else None

    def _params(self, settings: Mapping[str, Any]) -> SamplingParams:
        given = {"max_new_tokens": self._longest_answer_tok, **settings}
        return self._engine.sampling_params(**given)


def _told(message: dict[str, Any]) -> dict[str, Any]:
    """Without pixels."""
    if isinstance(message["content"], str):
        return message
    parts = [{name: value for name, value in part.items() if name != "image"} for part in message["content"]]
    return {**message, "content": parts}
