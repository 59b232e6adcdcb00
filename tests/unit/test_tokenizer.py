"""Prompts and conversations that no tokenizer or template can take are refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from families import tiny_tokenizer
from moespeq.errors import PromptError, UsageError
from moespeq.model.tokenizer import Tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.mark.parametrize("text", ["ab\ud800", b"ab\xff".decode("utf-8", "surrogateescape")])
def test_text_that_is_not_unicode_is_refused_with_its_position(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(PromptError, match="not valid UTF-8 at character 2"):
        tokenizer.encode(text)
    with pytest.raises(PromptError, match="not valid UTF-8"):
        tokenizer.encode_chat([{"role": "user", "content": text}])


@pytest.mark.parametrize("messages", [[], (), None, "hi", 5, {"role": "user", "content": "hi"}])
def test_what_is_no_list_of_messages_is_refused(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(UsageError, match="a list of at least one message"):
        tokenizer.encode_chat(messages)


@pytest.mark.parametrize("wrong", ["hi", None, {}, {"role": "user"}, {"content": "hi"}, {"role": 1, "content": "hi"}])
def test_a_message_without_role_and_content_is_named_by_its_index(tokenizer: Tokenizer, wrong: Any) -> None:
    with pytest.raises(UsageError, match="Message 1 of the chat needs a 'role' and a 'content'"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}, wrong])


def test_messages_that_the_template_refuses_are_a_usage_error_with_its_reason() -> None:
    strict = tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('Roles must alternate') }}"
    with pytest.raises(UsageError, match="Roles must alternate"):
        Tokenizer(strict).encode_chat([{"role": "user", "content": "hi"}])


class UnreadTokenizer:
    """Knows its vocabulary, and fails where a text is to be read."""

    chat_template = "{{ messages }}"

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "four": 1}

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return str(messages[0]["content"])


def test_a_text_that_cannot_be_so_few_tokens_is_refused_unread() -> None:
    tokenizer = Tokenizer(UnreadTokenizer())
    with pytest.raises(PromptError, match="13 characters, which cannot be 3 tokens or fewer"):
        tokenizer.encode("x" * 13, most_tok=3)
    with pytest.raises(PromptError, match="13 characters"):
        tokenizer.encode_chat([{"role": "user", "content": "x" * 13}], most_tok=3)


def test_a_text_of_the_longest_tokens_is_read_up_to_the_last(tokenizer: Tokenizer) -> None:
    longest = tokenizer.decode(tokenizer.encode("hello"), skip_special_tokens=True)
    most_tok = len(tokenizer.encode(longest))
    assert tokenizer.encode(longest, most_tok=most_tok) == tokenizer.encode(longest)
