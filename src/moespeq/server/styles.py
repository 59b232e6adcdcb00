"""The two shapes of an answer, /v1/completions' and /v1/chat/completions': events in, the JSON of choices out.

A style serves one request and keeps what a streamed choice needs of the chunks before it. Both ways, streamed or whole,
take the same events, so that they cannot say different things.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from moespeq.decode.logprobs import TokenLogprob
from moespeq.model.tokenizer import Tokenizer
from moespeq.server.answer_reader import AnswerPart, AnswerReader
from moespeq.server.generating import ChoiceEnd, ChoicePiece, Event, PromptEcho
from moespeq.types import FinishReason

__all__ = ["ChatStyle", "CompletionStyle", "Style"]

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


class Style(Protocol):
    """How one endpoint writes choices."""

    name: str
    chunk_name: str
    id_prefix: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a chunk that comes before any event of choice `index`, if there is one."""
        ...

    def delta(self, event: Event) -> dict[str, Any] | None:
        """The choice of a chunk; None where there is nothing to say yet."""
        ...

    def whole(self, index: int, events: Iterable[Event]) -> dict[str, Any]:
        """A complete choice."""
        ...


class _TokenNames(dict[int, str]):
    """The text of single tokens, special ones shown; half a character is a replacement character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        """Decoded once a request: most of the likely tokens are likely in many places."""
        self[token] = name = self._tokenizer.decode([token], skip_special_tokens=False)
        return name


class CompletionStyle:
    """prompt_texts, prompt_tokens: what a choice that begins with its prompt begins with; `n` choices a prompt."""

    name, chunk_name, id_prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_texts: Sequence[str],
        prompts: Sequence[Sequence[int]],
        n: int,
        has_logprobs: bool,
    ) -> None:
        self._token_names, self._has_logprobs = _TokenNames(tokenizer), has_logprobs
        self._prompt_texts, self._prompts, self._n = prompt_texts, prompts, n
        self._offset_chars: dict[int, int] = defaultdict(int)

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case PromptEcho(index, logprobs):
                first = self._prompts[index // self._n][0]
                return self._choice(index, self._prompt_texts[index // self._n], (first, *logprobs), None)
            case ChoicePiece(index, text, _, logprobs):
                return self._choice(index, text, logprobs, None) if text or logprobs else None
            case ChoiceEnd(index, reason):
                return self._choice(index, "", (), reason.value)

    def whole(self, index: int, events: Iterable[Event]) -> dict[str, Any]:
        parts = [part for event in events if (part := self.delta(event)) is not None]
        logprobs = None
        if self._has_logprobs:
            logprobs = {name: [one for part in parts for one in part["logprobs"][name]] for name in _COLUMNS}
        text = "".join(part["text"] for part in parts)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": parts[-1]["finish_reason"]}

    def _choice(
        self, index: int, text: str, scored: Sequence[TokenLogprob | int], reason: str | None
    ) -> dict[str, Any]:
        logprobs = self._columns(index, scored) if self._has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _columns(self, index: int, scored: Sequence[TokenLogprob | int]) -> dict[str, list[Any]]:
        """OpenAI's four lists; a prompt's first token has no log-probability, and comes as its id."""
        columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for one in scored:
            name = self._token_names[one if isinstance(one, int) else one.token]
            values = (None, None) if isinstance(one, int) else (_finite(one.logprob), self._top(one))
            for column, value in zip(_COLUMNS, (name, *values, self._offset_chars[index]), strict=True):
                columns[column].append(value)
            self._offset_chars[index] += len(name)
        return columns

    def _top(self, scored: TokenLogprob) -> Mapping[str, float]:
        """By text, the token itself among them; where two tokens read the same, the likelier one's."""
        top: dict[str, float] = {}
        for token, logprob in (*scored.top, (scored.token, scored.logprob)):
            top.setdefault(self._token_names[token], _finite(logprob))
        return top


_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class ChatStyle:
    """The assistant's turn. reader: of one choice's text."""

    name, chunk_name, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, tokenizer: Tokenizer, reader: Callable[[], AnswerReader], *, has_logprobs: bool) -> None:
        self._token_names, self._has_logprobs = _TokenNames(tokenizer), has_logprobs
        self._readers: dict[int, AnswerReader] = defaultdict(reader)

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._chunk(index, {"role": "assistant", "content": ""}, (), None)

    def delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case ChoicePiece(index, text, _, logprobs):
                delta = self._delta(index, self._readers[index].push(text))
                return self._chunk(index, delta, logprobs, None) if delta or logprobs else None
            case ChoiceEnd(index, reason):
                reader = self._readers[index]
                delta = self._delta(index, reader.end())
                has_called = reason is FinishReason.STOP and reader.num_calls
                return self._chunk(index, delta, (), "tool_calls" if has_called else reason.value)
            case PromptEcho():
                raise AssertionError("a chat gives no prompt back")

    def whole(self, index: int, events: Iterable[Event]) -> dict[str, Any]:
        parts = [part for event in events if (part := self.delta(event)) is not None]
        deltas = [part["delta"] for part in parts]
        logprobs = None
        if self._has_logprobs:
            logprobs = {"content": [one for part in parts if part["logprobs"] for one in part["logprobs"]["content"]]}
        text, thought = ("".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning_content"))
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message |= {"content": text or None, "tool_calls": [_without_index(call) for call in calls]}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": parts[-1]["finish_reason"]}

    def _delta(self, index: int, part: AnswerPart) -> dict[str, Any]:
        """What there is of `part`. Calls are counted over the whole answer."""
        first = self._readers[index].num_calls - len(part.calls)
        calls = [{"index": first + number, **call} for number, call in enumerate(part.calls)]
        named = {"content": part.content, "reasoning_content": part.reasoning, "tool_calls": calls}
        return {name: value for name, value in named.items() if value}

    def _chunk(
        self, index: int, delta: dict[str, Any], scored: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        logprobs = {"content": [self._content(one) for one in scored]} if self._has_logprobs and scored else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _content(self, scored: TokenLogprob) -> dict[str, Any]:
        top = [self._named(token, logprob) for token, logprob in scored.top]
        return {**self._named(scored.token, scored.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._token_names[token]
        return {"token": name, "logprob": _finite(logprob), "bytes": list(name.encode())}


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
