"""Answers that must have a form, by llguidance: which tokens may follow, for drafted rows as for verified ones.

A form is a JSON schema, or what `call_grammar` writes: calls of tools, alone or between text.

A processor is asked again and again about positions near the end of the text, some of them behind drafted tokens that
are then rejected. Its matcher is only a cache of the text that it has read: it goes back to what the asked text has in
common with that, then on; so an answer is a function of the text, as the sampler requires.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from moespeq.errors import UsageError
from moespeq.server.protocol import ResponseFormat
from moespeq.server.schemas import enforceable

__all__ = ["Grammar", "GrammarCompiler", "schema_of"]

_ANY_OBJECT = {"type": "object"}
_MOST_REASON_CHARS = 200
_DEAD_END = "NoExtension"  # llguidance's word
_NO_FREE_SPACES = {"whitespace_flexible": False}  # a weak model would write them without end


class GrammarCompiler:
    """Knows one tokenizer, which takes a while, so it is made once. definition: the text of its tokenizer.json."""

    def __init__(self, definition: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise UsageError("This model has no end-of-sequence token to end a JSON answer with; leave the format out.")
        self._tokenizer = LLTokenizer(definition, n_vocab=vocab_size, eos_token=list(eos_token_ids))

    def compile(self, wanted: ResponseFormat) -> Grammar:
        """JSON, not text. Raises UsageError for a schema that cannot be enforced."""
        schema = json.dumps(schema_of(wanted))
        try:
            source = LLMatcher.grammar_from_json_schema(schema, defaults=_NO_FREE_SPACES)
        except ValueError as error:  # nested too deep, or text that is no text
            raise _not_enforced(str(error)) from error
        return self._checked(source)

    def compile_lark(self, source: str) -> Grammar:
        """What llguidance's dialect of Lark says. Raises UsageError for a schema in it that cannot be enforced."""
        return self._checked(LLMatcher.grammar_from_lark(source))

    def _checked(self, source: str) -> Grammar:
        if problem := LLMatcher.validate_grammar(source, self._tokenizer):
            raise _not_enforced(problem)
        _mask(LLMatcher(self._tokenizer, source))
        return Grammar(self._tokenizer, source)


def _not_enforced(problem: str) -> UsageError:
    return UsageError(f"The JSON schema cannot be enforced ({_reason(problem)}); change it.")


def _mask(matcher: LLMatcher) -> bytes:
    """Which tokens may follow, a byte each. Raises UsageError where none may: no text matches from here on."""
    mask: bytes = matcher.compute_logit_bias()
    if matcher.is_error():
        problem = matcher.get_error()
        raise _not_enforced("nothing matches it" if problem.startswith(_DEAD_END) else problem)
    return mask


def _reason(problem: str) -> str:
    """The first line; llguidance tells the state of its parser behind it."""
    first = next((line.strip() for line in problem.splitlines() if line.strip()), "no reason given")
    return first[:_MOST_REASON_CHARS].rstrip(" .:;")


def schema_of(wanted: ResponseFormat) -> dict[str, Any]:
    """The schema of JSON that is asked for. Raises UsageError where it is missing, or admits nothing."""
    if wanted.type != "json_schema":
        return _ANY_OBJECT
    if wanted.json_schema is None:
        raise UsageError("response_format of type 'json_schema' needs a 'json_schema'; add one.")
    return enforceable(wanted.json_schema.json_schema)


class Grammar:
    """A schema, ready to be enforced on any number of answers."""

    def __init__(self, tokenizer: LLTokenizer, source: str) -> None:
        self._tokenizer, self._source = tokenizer, source

    def processor(self, prompt_tok: int) -> _GrammarProcessor:
        """For one answer, which begins behind `prompt_tok` tokens."""
        return _GrammarProcessor(
            partial(LLMatcher, self._tokenizer, self._source), self._tokenizer.eos_tokens, prompt_tok
        )


class _GrammarProcessor:
    """A logits processor; rows [1, V]. A matcher that failed stays so: another one begins, for the text may have been
    drafted and be rejected.
    """

    def __init__(self, new_matcher: Callable[[], LLMatcher], eos_token_ids: Sequence[int], prompt_tok: int) -> None:
        self._new_matcher, self._eos_token_ids, self._prompt_tok = new_matcher, list(eos_token_ids), prompt_tok
        self._matcher, self._read = new_matcher(), list[int]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` without the tokens that must not follow `input_ids`; once the JSON is complete, only an end may."""
        try:
            is_allowed = self._allowed(input_ids[0, self._prompt_tok :].tolist(), scores.shape[-1])
        except UsageError:
            self._matcher, self._read = self._new_matcher(), []
            raise
        return scores.masked_fill(~is_allowed.to(scores.device), -torch.inf)

    def _allowed(self, tokens: list[int], vocab_size: int) -> Tensor:
        self._go_to(tokens)
        if self._matcher.is_stopped():
            is_allowed = torch.zeros(vocab_size, dtype=torch.bool)
            is_allowed[self._eos_token_ids] = True
            return is_allowed
        return torch.frombuffer(bytearray(_mask(self._matcher)), dtype=torch.uint8) != 0

    def _go_to(self, tokens: list[int]) -> None:
        common, shorter = 0, min(len(self._read), len(tokens))
        while common < shorter and self._read[common] == tokens[common]:
            common += 1
        if len(self._read) > common:
            self._matcher.rollback(len(self._read) - common)
        self._matcher.consume_tokens(tokens[common:])
        self._read = tokens
        if self._matcher.is_error():
            raise UsageError(f"The JSON schema became too complex ({_reason(self._matcher.get_error())}); simplify it.")
