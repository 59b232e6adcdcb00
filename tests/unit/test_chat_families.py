"""Each family's chat as it is published: its prompt, its ends, and its answers, read alike however they come."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from chat_families import CHAT_FAMILIES, TOOL, Said, chat_tokenizer
from moespeq.decode.text import TextStream
from moespeq.model.tokenizer import Tokenizer
from moespeq.server.answer_format import AnswerFormat, format_of
from moespeq.server.answer_reader import AnswerPart, AnswerReader

ANSWERS = [
    pytest.param(name, said, id=f"{name}-{number}")
    for name, family in CHAT_FAMILIES.items()
    for number, said in enumerate([*family.said, *([family.tricky] if family.tricky else [])])
]
HI = [{"role": "user", "content": "Hi"}]


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer(chat_tokenizer(name))


@cache
def written_by(name: str) -> AnswerFormat:
    tokenizer = tokenizer_of(name)
    written = format_of(tokenizer, tokenizer.encode_chat(HI, tools=[TOOL]), has_tools=True)
    assert written is not None
    return written


def read(name: str, pieces: Iterable[str]) -> tuple[str, str, list[Any]]:
    """(content, reasoning, arguments of each call) of an answer that comes in `pieces`."""
    written = written_by(name)
    parser = tokenizer_of(name).response_parser(written.template, prefix=written.prefix, tools=[TOOL])
    reader, whole = AnswerReader(parser, names=["add"]), AnswerPart()
    for part in [*map(reader.push, pieces), reader.end()]:
        whole.content += part.content
        whole.reasoning += part.reasoning
        whole.calls += part.calls
    return whole.content, whole.reasoning, [json.loads(call["function"]["arguments"]) for call in whole.calls]


def cut_at(text: str, places: Sequence[int]) -> list[str]:
    return [text[begin:end] for begin, end in pairwise([0, *sorted(places), len(text)])]


@pytest.mark.parametrize("name", CHAT_FAMILIES)
def test_a_question_becomes_the_familys_prompt_each_marker_one_token(name: str) -> None:
    family, tokenizer = CHAT_FAMILIES[name], tokenizer_of(name)
    tokens = tokenizer.encode_chat(HI)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == family.prompt
    ids = {marker: tokenizer.encode(marker, add_special_tokens=False) for marker in (*family.special, *family.plain)}
    assert all(len(tokens) == 1 for tokens in ids.values())
    for marker, (token,) in ids.items():
        assert tokens.count(token) == family.prompt.count(marker), marker


@pytest.mark.parametrize(("name", "said"), ANSWERS)
def test_an_answer_is_read_as_the_family_writes_it(name: str, said: Said) -> None:
    assert read(name, [said.text]) == (said.content, said.reasoning, list(said.calls))


@pytest.mark.parametrize(("name", "said"), ANSWERS)
def test_one_cut_anywhere_and_a_character_at_a_time_change_nothing(name: str, said: Said) -> None:
    whole = read(name, [said.text])
    assert read(name, said.text) == whole
    for place in range(1, len(said.text)):
        assert read(name, cut_at(said.text, [place])) == whole, said.text[:place]


@pytest.mark.parametrize(("name", "said"), ANSWERS)
def test_rounds_of_any_lengths_change_nothing(name: str, said: Said) -> None:
    tokenizer, whole, chance = tokenizer_of(name), read(name, [said.text]), random.Random(0)
    tokens = tokenizer.encode(said.text, add_special_tokens=False)
    end = tokenizer.encode(CHAT_FAMILIES[name].ends[-1], add_special_tokens=False)
    for _ in range(8):
        stream = TextStream(tokenizer, skip_special_tokens=not written_by(name).has_special, hidden=end)
        left, pieces = [*tokens, *end], []
        while left:
            count = chance.randint(1, 9)
            pieces.append(stream.push(left[:count]).text)
            left = left[count:]
        assert read(name, [*pieces, stream.flush()]) == whole


@pytest.mark.parametrize("name", [name for name, family in CHAT_FAMILIES.items() if family.said])
def test_an_answer_cut_off_anywhere_is_read_alike_however_it_came(name: str) -> None:
    text, chance = CHAT_FAMILIES[name].said[0].text, random.Random(1)
    for length in range(1, len(text), 3):
        cut = text[:length]
        places = [chance.randrange(length) for _ in range(4)]
        assert read(name, cut_at(cut, places)) == read(name, [cut]) == read(name, cut), cut


@pytest.mark.parametrize("name", [name for name, family in CHAT_FAMILIES.items() if family.said])
def test_a_call_of_an_unknown_function_is_content(name: str) -> None:
    said = next(said for said in CHAT_FAMILIES[name].said if said.calls)
    text = said.text.replace("I add", "I sum").replace("add", "sub")
    whole = read(name, [text])
    assert whole[2] == []
    assert "1" in whole[0].replace(said.content, "") or "2" in whole[0]
    assert read(name, text) == whole
