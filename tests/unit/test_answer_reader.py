"""Reasoning and calls are told apart from content however the text is cut, and no part of a marker leaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from families import tiny_tokenizer
from moespeq.errors import UsageError
from moespeq.model.tokenizer import Tokenizer
from moespeq.server.answer_format import format_of
from moespeq.server.answer_reader import AnswerPart, AnswerReader

QWEN = "{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}<think></think>"
TAGS = QWEN + "<function=name>"
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TAG_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def tokenizer_with(template: str, **attributes: Any) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return Tokenizer(tokenizer)


def reader_of(
    template: str, prompt: str = "", *, tools: Sequence[Any] = (ADD,), is_one_call: bool = False, **attributes: Any
) -> AnswerReader:
    tokenizer = tokenizer_with(template, **attributes)
    written = format_of(tokenizer, tokenizer.encode(prompt), has_tools=bool(tools))
    assert written is not None
    parser = tokenizer.response_parser(written.template, prefix=written.prefix, tools=tools)
    return AnswerReader(parser, names=[tool["function"]["name"] for tool in tools], is_one_call=is_one_call)


def read(reader: AnswerReader, *pieces: str) -> AnswerPart:
    whole = AnswerPart()
    for part in [*map(reader.push, pieces), reader.end()]:
        whole.content += part.content
        whole.reasoning += part.reasoning
        whole.calls += part.calls
    return whole


def called(part: AnswerPart) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in part.calls]


@pytest.mark.parametrize(("template", "call"), [(QWEN, CALL), (TAGS, TAG_CALL)])
def test_an_answer_is_the_same_wherever_it_is_cut(template: str, call: str) -> None:
    text = f"<think>\nhm, a < b\n</think>\n\nI add.\n{call}\n{call}"
    for size in (1, 2, 3, 7, len(text)):
        part = read(reader_of(template), *(text[begin : begin + size] for begin in range(0, len(text), size)))
        assert (part.reasoning, part.content) == ("hm, a < b", "I add."), size
        assert called(part) == [("add", {"a": 1})] * 2


def test_two_cuts_anywhere_change_nothing() -> None:
    text = f"<think>so</think>Well{CALL}"
    for first in range(0, len(text), 3):
        for second in range(first, len(text), 5):
            part = read(reader_of(QWEN), text[:first], text[first:second], text[second:])
            assert (part.reasoning, part.content, called(part)) == ("so", "Well", [("add", {"a": 1})])


def test_what_is_certain_is_sent_at_once_and_what_may_be_a_marker_is_held() -> None:
    reader = reader_of(QWEN)
    assert reader.push("a < b <tool") == AnswerPart(content="a < b")
    assert reader.push("s> c") == AnswerPart(content=" <tools> c")


def test_a_template_that_opens_the_reasoning_is_continued() -> None:
    part = read(reader_of(QWEN, "assistant\n<think>\n"), "so it", " is</thi", "nk>\n\nYes.")
    assert (part.reasoning, part.content) == ("so it is", "Yes.")


def test_a_template_that_closed_the_reasoning_is_content_from_the_start() -> None:
    part = read(reader_of(QWEN, "assistant\n<think>\n\n</think>\n\n"), "Yes.")
    assert (part.reasoning, part.content) == ("", "Yes.")


def test_reasoning_that_was_cut_off_is_reasoning() -> None:
    assert read(reader_of(QWEN), "<think>so it") == AnswerPart(reasoning="so it")


@pytest.mark.parametrize(
    "broken",
    [
        *('{"name": "add", "argum', "not json", "[1, 2]", '{"arguments": {}}'),
        *('{"name": "sub", "arguments": {}}', '{"name": ["add"], "arguments": {}}'),
        *('{"name": "add", "parameters": {"a": 1}}', '{"name": "add", "arguments": {"a": NaN}}'),
    ],
)
def test_a_call_that_is_none_becomes_content(broken: str) -> None:
    part = read(reader_of(QWEN), "Well", f"<tool_call>\n{broken}", "\n</tool_call>", " end")
    assert part.calls == []
    assert part.content == f"Well{broken} end"


def test_a_marker_that_closes_nothing_is_left_out_wherever_it_is_cut() -> None:
    text = f"a</think>b {CALL}\n</tool_call> c"
    for size in (1, 2, 3, 7, len(text)):
        part = read(reader_of(QWEN), *(text[begin : begin + size] for begin in range(0, len(text), size)))
        assert (part.reasoning, part.content, called(part)) == ("", "abc", [("add", {"a": 1})]), size


@pytest.mark.parametrize("text", ["</tool_call>", "<tool_call>", 'say "</tool_call>" \\', "a [b] < c"])
def test_a_marker_in_a_text_of_a_calls_json_is_a_part_of_it(text: str) -> None:
    call = f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': text}}, ensure_ascii=False)}</tool_call>"
    for size in (1, 2, 5, len(call)):
        said = f"Well{call} done {call}"
        part = read(reader_of(QWEN), *(said[begin : begin + size] for begin in range(0, len(said), size)))
        assert called(part) == [("add", {"a": text})] * 2
        assert part.content == "Well done"


@pytest.mark.parametrize("broken", ['{"name": "add", "arguments": "', '{"name": "add", "arguments": "no object"}'])
def test_a_text_that_never_ends_hides_no_marker_behind_its_line(broken: str) -> None:
    part = read(reader_of(QWEN), f"<tool_call>{broken}\n</tool_call>{CALL}")
    assert (part.content, called(part)) == (broken, [("add", {"a": 1})])


def test_half_a_character_in_arguments_is_written_as_json_writes_it() -> None:
    (call,) = read(reader_of(QWEN), CALL.replace("1", '"\\ud800é"')).calls
    assert call["function"]["arguments"] == '{"a": "\\ud800é"}'


def test_only_the_first_call_counts_where_one_is_asked_for() -> None:
    assert called(read(reader_of(QWEN, is_one_call=True), CALL, CALL)) == [("add", {"a": 1})]


def test_calls_have_names_of_their_own() -> None:
    first, second = read(reader_of(QWEN), CALL, CALL).calls
    assert first["id"] != second["id"]
    assert first["type"] == "function"


def test_markers_are_text_where_no_tools_were_given() -> None:
    assert read(reader_of(QWEN, tools=()), CALL).content == CALL


def test_a_tokenizer_that_says_how_it_is_parsed_is_believed() -> None:
    own = {
        "start_anchor": "BOT:",
        "fields": {
            "content": {"content": "text"},
            "thinking": {"open": "[", "close": "]", "content": "text"},
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+)",
                "close": ";",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    reader = reader_of("{{ tools }}", "USER: [ BOT:[", response_template=own)
    part = read(reader, "so]We", 'll CALL add {"a"', ": 1};")
    assert (part.reasoning, part.content, called(part)) == ("so", "Well ", [("add", {"a": 1})])
    broken = read(reader_of("{{ tools }}", "BOT:", response_template=own), "Well CALL add no ", "json; end")
    assert broken.calls == []
    assert broken.content.endswith("json; end")


def test_a_template_without_markers_is_all_content() -> None:
    tokenizer = tokenizer_with("{{ messages }}")
    assert format_of(tokenizer, tokenizer.encode("hi"), has_tools=False) is None
    assert read(AnswerReader(None), "<think>", "a") == AnswerPart(content="<think>a")


@pytest.mark.parametrize(
    ("template", "words"), [("{{ messages }}", "takes no tools"), ("{{ tools }}", "a format that is not known here")]
)
def test_tools_that_the_model_cannot_use_are_refused(template: str, words: str) -> None:
    tokenizer = tokenizer_with(template)
    with pytest.raises(UsageError, match=words):
        format_of(tokenizer, tokenizer.encode("hi"), has_tools=True)


@pytest.mark.parametrize("cut", ["\n", "\n<", "\n<tool_ca"])
def test_a_marker_that_is_cut_behind_a_call_is_not_content(cut: str) -> None:
    part = read(reader_of(QWEN), f"I add.{CALL}{cut}")
    assert (part.content, len(part.calls)) == ("I add.", 1)


def test_a_call_that_is_nested_too_deep_to_be_read_is_content() -> None:
    deep = "[" * 100_000
    part = read(reader_of(QWEN), f"<tool_call>{deep}", "</tool_call>")
    assert deep in part.content
    assert part.calls == []
