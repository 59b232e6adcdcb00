"""Tools reach the template and calls reach the client, streamed or whole, forced or free."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest

import moespeq
from moespeq.decode.engine import Engine
from moespeq.server.answer_format import format_of
from moespeq.server.answer_reader import AnswerReader
from moespeq.server.generating import ChoiceEnd, ChoicePiece
from moespeq.server.styles import ChatStyle
from moespeq.types import FinishReason
from served import MODEL, QWEN_TEMPLATE, Client, chat_model, serve

ASK = [{"role": "user", "content": "Tom has 5 apples. He eats 2."}]
NUMBERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/Digit"}, "b": {"$ref": "#/$defs/Digit"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"Digit": {"enum": [1, 2, 5]}},
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": NUMBERS, **more}}


TOOLS = [tool("add"), tool("sub")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = chat_model(tmp_path_factory.mktemp("tools") / "demo", QWEN_TEMPLATE)
    with moespeq.load(folder, ctx_size=768, k=4, prefill_rows=64, prefix_cache="64MiB") as opened:
        yield opened


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[Client]:
    with serve(engine) as opened:
        yield opened


def ask(client: Client, messages: Sequence[Any] = ASK, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": messages, "max_completion_tokens": 120, **body}
    answer = client.post("/v1/chat/completions", **asked)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def check_call(call: dict[str, Any], names: Sequence[str]) -> None:
    assert call["type"] == "function"
    assert call["function"]["name"] in names
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"a", "b"}
    assert set(arguments.values()) <= {1, 2, 5}


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["add", "sub"]), ({"type": "function", "function": {"name": "sub"}}, ["sub"])],
)
def test_a_call_that_is_asked_for_is_made_whole_and_streamed(client: Client, choice: Any, names: list[str]) -> None:
    body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    whole = ask(client, **body)
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    (call,) = whole["message"]["tool_calls"]
    check_call(call, names)
    chunks = client.stream("/v1/chat/completions", messages=ASK, max_completion_tokens=120, **body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    (streamed,) = (call for delta in deltas for call in delta.get("tool_calls", ()))
    assert (streamed["index"], streamed["function"]) == (0, call["function"])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_and_its_result_may_be_sent_back_as_they_came(client: Client, engine: Engine) -> None:
    said = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)["message"]
    call = said["tool_calls"][0]
    messages = [*ASK, said, {"role": "tool", "content": "7", "tool_call_id": call["id"]}]
    tokens = client.post("/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
    prompt = engine.tokenizer.decode(tokens, skip_special_tokens=False)
    arguments = json.dumps(json.loads(call["function"]["arguments"]))
    assert f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}\n</tool_call>' in prompt
    assert "tool: 7" in prompt
    assert ask(client, messages, tools=TOOLS, max_completion_tokens=1)["message"]["role"] == "assistant"


@pytest.mark.parametrize("arguments", ["not json", "5", "{", "[" * 3000, "[" * 3000 + "]" * 3000])
def test_a_call_whose_arguments_are_no_object_may_be_in_the_history(
    client: Client, engine: Engine, arguments: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tokens = client.post("/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
    assert arguments in engine.tokenizer.decode(tokens, skip_special_tokens=False)


def test_parameters_nested_deep_reach_the_template(client: Client) -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"not": deep}
    assert client.post("/tokenize", messages=ASK, tools=[tool("add", parameters=deep)]).status_code == 200


def test_tools_that_may_not_be_called_are_not_told(client: Client) -> None:
    none, untold = (
        ask(client, tools=TOOLS, tool_choice="none", max_completion_tokens=4),
        ask(client, max_completion_tokens=4),
    )
    assert none == untold


def test_a_strict_function_leaves_the_rest_of_the_answer_free(client: Client, engine: Engine) -> None:
    strict = [tool("add", strict=True)]
    prompt = engine.tokenizer.encode_chat(ASK, tools=[tool("add")])
    said = ask(client, tools=strict, max_completion_tokens=12)["message"]["content"]
    assert said == engine.generate(prompt, max_new_tokens=12).text


def test_json_or_a_call_is_what_a_format_beside_tools_leaves(client: Client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message = ask(client, tools=TOOLS, response_format=wanted)["message"]
    if message.get("tool_calls"):
        check_call(message["tool_calls"][0], ["add", "sub"])
    else:
        assert json.loads(message["content"])["n"] in (1, 2)


def test_reasoning_that_the_template_opens_goes_on_as_reasoning(client: Client, engine: Engine) -> None:
    opened = {"enable_thinking": True}
    message = ask(client, max_completion_tokens=8, chat_template_kwargs=opened)["message"]
    prompt = engine.tokenizer.encode_chat(ASK, variables={"enable_thinking": True})
    assert message["reasoning_content"] == engine.generate(prompt, max_new_tokens=8).text.strip()
    assert message["content"] == ""
    forced = ask(client, chat_template_kwargs=opened, response_format={"type": "json_object"}, max_completion_tokens=8)
    assert forced["message"]["content"].startswith("{"), "a format is content from the start"


def test_text_and_calls_of_several_choices_do_not_mix(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    written = format_of(tokenizer, tokenizer.encode_chat(ASK, tools=TOOLS), has_tools=True)
    assert written is not None

    def reader() -> AnswerReader:
        parser = tokenizer.response_parser(written.template, prefix=written.prefix, tools=TOOLS)
        return AnswerReader(parser, names=["add"])

    style = ChatStyle(tokenizer, reader, has_logprobs=False)
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    said = [
        ChoicePiece(0, f"I add {call}<tool_", (), ()),
        ChoicePiece(1, "Hello <tool_", (), ()),
        ChoicePiece(0, f"call>{call[11:]}", (), ()),
    ]
    ends = [ChoiceEnd(0, FinishReason.STOP), ChoiceEnd(1, FinishReason.LENGTH)]
    first = style.whole(0, [event for event in (*said, *ends) if event.index == 0])
    second = style.whole(1, [event for event in (*said, *ends) if event.index == 1])
    assert (first["message"]["content"], len(first["message"]["tool_calls"])) == ("I add", 2)
    assert first["finish_reason"] == "tool_calls"
    assert (second["message"]["content"], second["finish_reason"]) == ("Hello <tool_", "length")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mul"}}}, "'mul', which is not"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [tool("add", parameters={"anyOf": [{"type": "nothing"}]}, strict=True)]}, "cannot be enforced"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages' is not the chat template's own"),
        ({"messages": [{"role": "user"}]}, "role 'user' has no content"),
        (
            {"tools": [tool("add", parameters={"type": "string"}, strict=True)]},
            "should be of type 'object', got 'string'",
        ),
        ({"tools": [tool("add", parameters={"const": "5"})], "tool_choice": "required"}, "cannot be enforced"),
    ],
)
def test_what_is_wrong_with_tools_is_said_at_once(client: Client, body: dict[str, Any], words: str) -> None:
    answer = client.post("/v1/chat/completions", **{"model": MODEL, "messages": ASK, **body})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_the_official_client_runs_a_tool_and_says_the_result(client: Client) -> None:
    async def talk() -> None:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(client.app))
        async with openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=http) as official:
            asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_completion_tokens": 100}
            forced = await official.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
            message = forced.choices[0].message
            assert forced.choices[0].finish_reason == "tool_calls"
            (call,) = message.tool_calls
            assert call.function.name in ("add", "sub")
            result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
            answer = await official.chat.completions.create(
                **asked | {"messages": [*ASK, message, result], "max_completion_tokens": 3}, n=2, logprobs=True
            )
            assert [len(choice.logprobs.content) for choice in answer.choices] == [3, 3]
            assert answer.usage.completion_tokens == 6
            assert answer.usage.prompt_tokens_details.cached_tokens > 0

    asyncio.run(talk())
