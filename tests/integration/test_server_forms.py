"""What is wrong with the form an answer is to have is one sentence of a 400, and a form that holds is JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moespeq.decode.engine import Engine
from served import MODEL, PROMPT, Client

SMALL = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
ENDLESS = {
    "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}},
    "$ref": "#/$defs/n",
}
OBJECT = {"type": "object", "additionalProperties": False}
HALF = chr(0xD800)  # of a character


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def nested(word: str, depth: int) -> dict[str, Any]:
    return {} if depth == 0 else {word: nested(word, depth - 1)}


def refusal(client: Client, **body: Any) -> str:
    answer = client.post("/v1/completions", **{"model": MODEL, "prompt": PROMPT, "max_tokens": 40} | body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "no answer can match"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"x-guidance": {"key_separator": "Z"}}, "x-guidance"),
        ({"const": HALF}, "cannot be enforced"),
        (nested("not", 300), "recursion limit"),
        (nested("items", 300), "recursion limit"),
        (ENDLESS, "JSON schema"),
        ({"$id": "http://x/y", "$ref": "http://x/y"}, "nothing matches it"),
        ({"$id": "http://x/y", "$ref": "y#"}, "nothing matches it"),
        ({"$defs": {"a b": {"$ref": "#/$defs/a%20b"}}, "$ref": "#/$defs/a%20b"}, "nothing matches it"),
        (
            {"$id": "http://x/y", "properties": {"a": {"$ref": "y#/properties/a"}}, "required": ["a"]} | OBJECT,
            "nothing matches it",
        ),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_one_short_sentence(client: Client, schema: Any, words: str) -> None:
    said = refusal(client, response_format=form(schema), max_tokens=110)
    assert words in said
    assert len(said) < 350
    assert "\n" not in said


@pytest.mark.parametrize("option", [{"ignore_eos": True}, {"min_tokens": 3}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_forbids_the_end_of_a_form_is_refused_before_anything_is_generated(
    client: Client, served_engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str, option: dict[str, Any]
) -> None:
    def generate(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be generated")

    monkeypatch.setattr(type(served_engine), "stream", generate)
    asked = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi."}]}
    answer = client.post(path, model=MODEL, **asked, response_format=form(SMALL), **option)
    assert answer.status_code == 400
    assert f"{next(iter(option))} cannot hold" in answer.json()["error"]["message"]


def test_a_schema_that_admits_anything_gives_json(client: Client) -> None:
    choice = client.complete(max_tokens=60, response_format=form(True))["choices"][0]
    assert choice["finish_reason"] == "length" or json.loads(choice["text"]) is not Ellipsis


def test_half_a_character_in_a_name_is_shown_as_it_was_written(client: Client) -> None:
    answer = client.post("/v1/completions", model=HALF, prompt=PROMPT)
    assert answer.status_code == 404
    assert "'\\ud800' is not served here" in answer.json()["error"]["message"]
    assert client.post("/v1/completions", model=MODEL, prompt=PROMPT, **{HALF: 1}).status_code == 400


@pytest.mark.parametrize("since", [-(10**22), -(2**63) - 1, 10**22])
def test_a_page_that_asks_for_passes_of_any_number_is_answered(client: Client, since: int) -> None:
    assert client.get(f"/live?since={since}").status_code == 200
