"""How a model writes what is not plain content: its reasoning, and calls of tools.

A tokenizer may say so itself, in its response_template. Where it does not, the chat template, which writes earlier
answers in the model's own format, gives it away by its markers: those of `marker_forms`. transformers' parser reads
them all, so a format is data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moespeq.errors import UsageError
from moespeq.model.tokenizer import Tokenizer
from moespeq.server.marker_forms import CALL_FORMS, CHANNELS, HERMES, REASONING_FORMS, MarkerForm, fields_of

__all__ = ["AnswerFormat", "format_of"]

_ANCHOR = "assistant:"  # where the parser begins to read the prefix


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """template: transformers' response template. prefix: what ends in what the prompt wrote of the answer already.

    has_special: markers are special tokens, which text leaves out otherwise. is_json: calls can be put into a grammar.
    opens_reasoning: the prompt ends inside of it.
    """

    template: Mapping[str, Any]
    prefix: str
    has_special: bool
    is_json: bool
    opens_reasoning: bool = False


def format_of(tokenizer: Tokenizer, prompt: Sequence[int], *, has_tools: bool) -> AnswerFormat | None:
    """How the answer to `prompt` will be written; None where all of it is content.

    Raises UsageError for tools that the model's template does not know, or whose calls nobody could read.
    """
    text = tokenizer.decode(list(prompt), skip_special_tokens=False)
    words = tokenizer.chat_template
    if has_tools and "tools" not in words:
        raise UsageError("This model's chat template takes no tools; leave them out.")
    if tokenizer.response_template is not None:
        return AnswerFormat(tokenizer.response_template, text, has_special=True, is_json=False)
    forms = _forms_of(words, has_tools=has_tools)
    if not forms:
        return None
    opened = next((form.markers[0] for form in forms if _ends_inside(text, form)), "")
    return AnswerFormat(
        {"start_anchor": _ANCHOR, "fields": fields_of(forms)},
        _ANCHOR + opened if opened else "",
        has_special=any(not set(form.markers).isdisjoint(tokenizer.special_tokens) for form in forms),
        is_json=HERMES in forms,
        opens_reasoning=bool(opened),
    )


def _forms_of(template: str, *, has_tools: bool) -> list[MarkerForm]:
    """Those that `template` writes. Raises UsageError where it writes calls in none of them."""
    if CHANNELS.is_written_by(template):
        return [CHANNELS]
    reasoning = [form for form in REASONING_FORMS if form.is_written_by(template)]
    if not has_tools:
        return reasoning
    calls = next((form for form in CALL_FORMS if form.is_written_by(template)), None)
    if calls is None:
        raise UsageError("This model calls tools in a format that is not known here; add a response_template to it.")
    return [*reasoning, calls]


def _ends_inside(prompt: str, form: MarkerForm) -> bool:
    return form in REASONING_FORMS and prompt.rstrip().endswith(form.markers[0])
