"""What is wrong with a request is one sentence: it names what the client wrote, as the API calls it, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

import moespeq
from moespeq.decode.engine import Engine
from moespeq.demo.assets import MODEL_FOLDER
from moespeq.server.chat_protocol import ChatRequest, TokenizeRequest
from moespeq.server.protocol import CompletionRequest, DetokenizeRequest, Strict
from served import MODEL, PROMPT, Client, serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAID = [{"role": "user", "content": "Tom has 5 apples."}]


def _image(**fields: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64,", **fields}}


SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


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
        (b'{"model": "dem', "The body is not JSON (Unterminated string starting at character 10); correct it."),
        (b"", "The body is not JSON (Expecting value at character 0); correct it."),
        (b"[1]", "The body is no JSON object; send one."),
        (b'{"model": "\xff"}', "The body is not UTF-8 at byte 11; convert it."),
        (b"[" * 100_000, "The request is nested too deep to be read; send a flatter one."),
        (b'{"n": ' + b"1" * 5000 + b"}", "A number in the body is too long to be read ("),
        (b'{"\\ud800": 1}', "The name of a field holds half a character, which no text can; correct it."),
        (b"[" * 500_001, "The body has 500001 opening brackets, and may have 500000; send less at once."),
    ],
)
def test_a_body_that_cannot_be_read_is_told_why(client: Client, content: bytes, words: str) -> None:
    error = refusal(client.send(COMPLETIONS, content))
    assert error["message"].startswith(words)
    assert error["param"] is None


@pytest.mark.parametrize(
    ("path", "body", "field", "sentence"),
    [
        (COMPLETIONS, {"foo": 1}, "foo", "The field 'foo' is not known here; leave it out."),
        (COMPLETIONS, {"n": 0}, "n", "'n' should be greater than or equal to 1, got 0; correct it."),
        (COMPLETIONS, {"presence_penalty": 0.5}, "presence_penalty", "penalty' is not applied here; leave it out."),
        (COMPLETIONS, {"logit_bias": {"5": 10}}, "logit_bias", "'logit_bias' is not applied here; leave it out."),
        (COMPLETIONS, {"best_of": 2}, "best_of", "'best_of' is not applied here; leave it out."),
        (COMPLETIONS, {"prompt": 5}, "prompt", "'prompt' should be a valid string or a valid list, got 5; correct it."),
        (COMPLETIONS, {"prompt": "a" * 90, "n": "b" * 90}, "n", f'got "{"b" * 59}...; correct it.'),
        (COMPLETIONS, {"stop": ""}, "stop", "'stop' is empty; it needs at least 1 character."),
        (COMPLETIONS, {"stop": ["a", ""]}, "stop.1", "'stop.1' is empty; it needs at least 1 character."),
        (COMPLETIONS, {"stop": ["a"] * 65}, "stop", "'stop' may hold at most 64 items; give fewer."),
        (COMPLETIONS, {"stop": "a" * 1001}, "stop", "'stop' may have at most 1000 characters; shorten it."),
        (COMPLETIONS, {"stream_options": 1}, "stream_options", "should be an object, got 1; correct it."),
        (CHAT, {}, "messages", "The field 'messages' is missing; add it."),
        (CHAT, {"messages": []}, "messages", "'messages' is empty; it needs at least 1 item."),
        ("/tokenize", {"messages": []}, "messages", "'messages' is empty; it needs at least 1 item."),
        (
            CHAT,
            {"messages": [{"role": "boss", "content": "a"}]},
            "messages.0.role",
            "'system', 'developer', 'user', 'assistant', 'tool' or 'function', got \"boss\"; correct it.",
        ),
        (CHAT, {"messages": [{"content": "a"}]}, "messages.0.role", "The field 'messages.0.role' is missing; add it."),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, SOUND]}]},
            "messages.0.content.1.type",
            "'messages.0.content.1.type' should be 'text' or 'image_url', got \"input_audio\"; correct it.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}]},
            "messages.0.content.0.image_url.url",
            "'messages.0.content.0.image_url.url' should be a valid string, got 5; correct it.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]},
            "messages.0.content.0.image_url",
            "'messages.0.content.0.image_url' should be an object, got \"a\"; correct it.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.image_url",
            "The field 'messages.0.content.0.image_url' is missing; add it.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            "messages.0.content.0.type",
            "The field 'messages.0.content.0.type' is missing; add it.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": 5}]}]},
            "messages.0.content.0.type",
            "'messages.0.content.0.type' should be 'text' or 'image_url', got \"5\"; correct it.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0.text",
            "'messages.0.content.0.text' should be a valid string, got 5; correct it.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [_image(detail="high")]}]},
            "messages.0.content.0.image_url.detail",
            "'messages.0.content.0.image_url.detail' is not applied here; leave it out.",
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
        (COMPLETIONS, {"temperature": -1, "echo": True, "max_tokens": 0}, "temperature"),
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


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt"),
        (COMPLETIONS, {"prompt": "a " * 128}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 10_000}, "prompt"),
        (COMPLETIONS, {"prompt": [5, 10**6]}, "prompt"),
        (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format"),
        (COMPLETIONS, {"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        (COMPLETIONS, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 128}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 10_000}]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        ("/tokenize", {"prompt": "a" * 10_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 10_000}]}, "messages"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
)
def test_what_cannot_be_served_is_told_with_its_field(
    client: Client, path: str, body: dict[str, Any], field: str
) -> None:
    asked = {COMPLETIONS: {"prompt": PROMPT}, CHAT: {"messages": SAID}}.get(path, {})
    assert refusal(client.post(path, **{"model": MODEL, **asked, **body}))["param"] == field


def test_a_model_that_is_not_served_is_told_with_its_field(client: Client) -> None:
    assert refusal(client.post(COMPLETIONS, model="gpt-5", prompt=PROMPT), 404)["param"] == "model"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_a_body_that_is_not_said_to_be_json_is_told_the_header(client: Client, path: str) -> None:
    error = refusal(client.post(path, {"Content-Type": "application/x-www-form-urlencoded"}, model=MODEL))
    assert error["message"].endswith("add 'Content-Type: application/json'.")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"model": MODEL, "prompt": ["a"] * 5000 + [1]}),
        (CompletionRequest, {"model": MODEL, "prompt": ["a", *range(5000)]}),
        (CompletionRequest, {"model": MODEL, "prompt": [["a"] * 5000] * 5000}),
        (CompletionRequest, {"model": MODEL, "prompt": "a", "stop": [1] * 5000}),
        (CompletionRequest, {"model": MODEL, "prompt": "a", "stop": ["a"] * 5000}),
        (CompletionRequest, {"model": MODEL, "prompt": "a", "logit_bias": {str(name): "" for name in range(5000)}}),
        (CompletionRequest, {"model": MODEL, "prompt": "a"} | {f"q{name}": 1 for name in range(5000)}),
        (ChatRequest, {"model": MODEL, "messages": [{}] * 5000}),
        (ChatRequest, {"model": MODEL, "messages": [{f"q{name}": 1 for name in range(5000)}]}),
        (ChatRequest, {"model": MODEL, "messages": [{"role": "user", "content": [{}] * 5000}]}),
        (ChatRequest, {"model": MODEL, "messages": [{"role": "user", "tool_calls": [{}] * 5000}]}),
        (ChatRequest, {"model": MODEL, "messages": SAID, "tools": [{}] * 5000}),
        (TokenizeRequest, {"messages": [{}] * 5000}),
        (TokenizeRequest, {"tools": [{}] * 5000}),
        (DetokenizeRequest, {"tokens": ["a"] * 5000}),
    ],
)
def test_a_long_wrong_body_has_few_errors(kind: type[Strict], body: dict[str, Any]) -> None:
    """Each takes time and memory, though one is all that is told."""
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate(body)
    assert wrong.value.error_count() <= 10


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
