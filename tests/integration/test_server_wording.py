"""What is wrong with a request is one sentence: it names what the client wrote, as the API calls it, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import moespeq
from moespeq.decode.engine import Engine
from moespeq.demo.assets import MODEL_FOLDER
from served import MODEL, PROMPT, Client, serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAID = [{"role": "user", "content": "Tom has 5 apples."}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://images.example/1"}}


def refusal(answer: Any, status: int = 400) -> dict[str, Any]:
    """The error, which must be one sentence."""
    assert answer.status_code == status, answer.text
    error = dict(answer.json()["error"])
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith(".")
    return error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not json", "The body is not JSON (Expecting value at character 0); correct it."),
        (b'{"model": "demo", }', "The body is not JSON ("),
        (b"", "The body is no JSON object; send one, with 'Content-Type: application/json'."),
        (b"[1]", "The body is no JSON object; send one"),
        (b'{"model": "\xff"}', "The body is no JSON object; send one"),
    ],
)
def test_a_body_that_is_no_object_is_said_to_be_none(client: Client, content: bytes, words: str) -> None:
    error = refusal(client.send(COMPLETIONS, content))
    assert error["message"].startswith(words)
    assert error["param"] is None


@pytest.mark.parametrize(
    ("path", "body", "field", "sentence"),
    [
        (COMPLETIONS, {"foo": 1}, "foo", "The field 'foo' is not known here; leave it out."),
        (COMPLETIONS, {"n": 0}, "n", "'n' should be greater than or equal to 1, got 0; correct it."),
        (COMPLETIONS, {"presence_penalty": 0.5}, "presence_penalty", "should be 0, got 0.5; correct it."),
        (COMPLETIONS, {"prompt": 5}, "prompt", "'prompt' should be a valid string or a valid list, got 5; correct it."),
        (COMPLETIONS, {"prompt": "a" * 90, "n": "b" * 90}, "n", f'got "{"b" * 59}...; correct it.'),
        (COMPLETIONS, {"stop": ""}, "stop", "'stop': String should have at least 1 character; correct it."),
        (COMPLETIONS, {"stop": ["a", ""]}, "stop.1", "'stop.1': String should have at least 1 character; correct it."),
        (CHAT, {}, "messages", "The field 'messages' is missing; add it."),
        (CHAT, {"messages": [{"content": "a"}]}, "messages.0.role", "The field 'messages.0.role' is missing; add it."),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}]},
            "messages.0.content.1.type",
            "'messages.0.content.1.type' should be 'text', got \"image_url\"; correct it.",
        ),
    ],
)
def test_a_wrong_field_is_named_as_it_was_written(
    client: Client, path: str, body: dict[str, Any], field: str, sentence: str
) -> None:
    given = {"model": MODEL, **({"prompt": PROMPT} if path == COMPLETIONS else {}), **body}
    error = refusal(client.post(path, **given))
    assert error["message"].endswith(sentence)
    assert error["param"] == field


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("name", ["chat_template", "messages", "padding", "self", "tools"])
def test_a_client_sets_variables_of_the_template_and_not_the_template(client: Client, path: str, name: str) -> None:
    error = refusal(client.post(path, model=MODEL, messages=SAID, chat_template_kwargs={name: "{{ 'ab' * 20 }}"}))
    assert error["message"] == f"'{name}' is not the chat template's own; leave it out."
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"min_tokens": -1}, "min_tokens"),
        (COMPLETIONS, {"temperature": -1}, "temperature"),
        (COMPLETIONS, {"seed": -1}, "seed"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_what_the_engine_refuses_is_told_by_the_clients_name(
    client: Client, path: str, body: dict[str, Any], field: str
) -> None:
    asked = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": SAID}
    error = refusal(client.post(path, model=MODEL, **asked, **body))
    assert error["message"].startswith(f"{field} must be ")
    assert error["param"] == field


@pytest.mark.parametrize("body", [{"prompt": "a " * 400}, {"messages": [{"role": "user", "content": "a " * 400}]}])
def test_a_prompt_that_is_too_long_is_told_the_servers_option(client: Client, body: dict[str, Any]) -> None:
    message = refusal(client.post(COMPLETIONS if "prompt" in body else CHAT, model=MODEL, **body))["message"]
    assert "the context 128" in message
    assert message.endswith("shorten the prompt, or start the server with a larger --ctx-size.")


def test_a_query_is_told_by_its_name(client: Client) -> None:
    assert refusal(client.get("/live?since=x"))["param"] == "since"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/page/nothing.js"])
def test_a_path_that_is_none_is_told_those_there_are(client: Client, path: str) -> None:
    message = refusal(client.post(path) if path.startswith("/v1") else client.get(path), 404)["message"]
    assert message == f"There is no '{path}' here; ask /v1/chat/completions, /v1/completions or /v1/models."


def test_a_wrong_method_is_told_the_right_one(client: Client) -> None:
    assert refusal(client.get(COMPLETIONS), 405)["message"] == f"'{COMPLETIONS}' takes no GET; use POST."


@pytest.fixture(scope="module")
def plain_engine() -> Iterator[Engine]:
    """Of a model without a chat template."""
    with moespeq.load(MODEL_FOLDER, ctx_size=128, k=0, prefill_rows=512) as opened:
        yield opened


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_model_without_a_chat_template_is_told_the_other_endpoint(plain_engine: Engine, path: str) -> None:
    with serve(plain_engine) as plain:
        message = refusal(plain.post(path, model=MODEL, messages=SAID))["message"]
    assert message.startswith("This model has no chat template; send a 'prompt' to ")
    assert "moespeq run" not in message
