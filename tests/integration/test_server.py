"""The server says what the engine says, in OpenAI's shape, streamed or whole; what is wrong is refused at once."""

from __future__ import annotations

from typing import Any

import pytest

import moespeq
from moespeq.decode.engine import Engine
from moespeq.errors import UnavailableError
from moespeq.server.app import create_app
from moespeq.server.worker import WorkerState
from served import MODEL, PROMPT, Client, serve

CHAT = [{"role": "user", "content": "Tom has 5 apples. He eats 2."}]


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({}, {}),
        ({"temperature": 0.9, "seed": 3}, {"temperature": 0.9, "seed": 3}),
        (
            {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 4},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 4},
        ),
        ({"stop": ["apples"]}, {"stop": ("apples",)}),
        ({"repetition_penalty": 1.3, "min_tokens": 5}, {"repetition_penalty": 1.3, "min_new_tokens": 5}),
    ],
)
def test_a_completion_is_the_engines_text_whole_and_streamed(
    client: Client, served_engine: Engine, body: dict[str, Any], sampling: dict[str, Any]
) -> None:
    expected = served_engine.generate(PROMPT, max_new_tokens=24, **sampling)
    whole = client.complete(max_tokens=24, **body)
    assert whole["choices"][0]["text"] == expected.text
    assert whole["choices"][0]["finish_reason"] == expected.finish_reason.value
    assert whole["usage"]["completion_tokens"] == len(expected.tokens)
    assert whole["usage"]["prompt_tokens"] == expected.stats.prompt_tok
    chunks = client.stream(prompt=PROMPT, max_tokens=24, **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected.text
    assert chunks[-1]["choices"][0]["finish_reason"] == expected.finish_reason.value


def test_a_chat_is_the_engines_text_whole_and_streamed(client: Client, served_engine: Engine) -> None:
    expected = served_engine.chat(CHAT, max_new_tokens=20).text
    whole = client.post("/v1/chat/completions", model=MODEL, messages=CHAT, max_completion_tokens=20).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected, "refusal": None}
    chunks = client.stream("/v1/chat/completions", messages=CHAT, max_completion_tokens=20)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == expected


def test_a_chat_may_fill_the_context_and_takes_text_parts(client: Client, served_engine: Engine) -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": part} for part in ("Tom has 5 apples.", " He eats 2.")]}
    ]
    answer = client.post("/v1/chat/completions", model=MODEL, messages=parts, ignore_eos=True).json()
    assert answer["usage"]["total_tokens"] == served_engine.plan.context_tok
    assert answer["choices"][0]["finish_reason"] == "length"


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: Client) -> None:
    chunks = client.stream(prompt=PROMPT, max_tokens=5, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_choices_share_a_seed_and_differ(client: Client, served_engine: Engine) -> None:
    answer = client.complete(max_tokens=12, n=3, temperature=1.0, seed=5)
    texts = [choice["text"] for choice in answer["choices"]]
    parts = [
        served_engine.stream(PROMPT, max_new_tokens=12, temperature=1.0, seed=5, choice_index=index)
        for index in range(3)
    ]
    assert texts == ["".join(piece.text for piece in part) for part in parts]
    assert len(set(texts)) == 3
    streamed = dict.fromkeys(range(3), "")
    for chunk in client.stream(prompt=PROMPT, max_tokens=12, n=3, temperature=1.0, seed=5):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(streamed.values()) == texts


def test_many_prompts_are_many_choices_in_their_order(client: Client, served_engine: Engine) -> None:
    prompts = [served_engine.encode(PROMPT), served_engine.encode("Question: Ann")]
    texts = [served_engine.generate(prompt, max_new_tokens=6).text for prompt in prompts for _ in range(2)]
    choices = client.complete(prompts, max_tokens=6, n=2)["choices"]
    assert [choice["text"] for choice in choices] == texts
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


def test_a_partial_stop_text_never_leaks(client: Client) -> None:
    text = client.text(max_tokens=24)
    stop = text[10:16]
    chunks = client.stream(prompt=PROMPT, max_tokens=24, stop=stop)
    seen = ""
    for chunk in chunks:
        seen += chunk["choices"][0]["text"]
        assert text[:10].startswith(seen)
    assert seen == text[:10]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_tokenize_and_detokenize_are_the_tokenizers(client: Client, served_engine: Engine) -> None:
    answer = client.post("/tokenize", prompt=PROMPT).json()
    assert answer == {
        "tokens": served_engine.encode(PROMPT),
        "count": len(served_engine.encode(PROMPT)),
        "max_model_len": 128,
    }
    assert client.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": PROMPT}
    conversation = client.post("/tokenize", messages=CHAT).json()["tokens"]
    assert conversation == served_engine.tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["short", "a" * 10_000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 10_000}]}),
        ("/tokenize", {"prompt": "a" * 10_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 10_000}]}),
    ],
)
def test_a_text_that_cannot_fit_the_context_is_refused_by_its_characters(
    client: Client, path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, model=MODEL, **body)
    assert answer.status_code == 400
    assert "characters, which cannot be 128 tokens or fewer" in answer.json()["error"]["message"]


def test_models_health_and_version_answer(client: Client) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [MODEL]
    assert client.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 128
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/version").json() == {"version": moespeq.__version__}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "apples " * 200}, 400, "the context 128"),
        ({"prompt": "apples " * 400}, 400, "2800 characters, which cannot be 128 tokens"),
        ({"prompt": ""}, 400, "The prompt is empty"),
        ({"prompt": []}, 400, "The prompt is empty"),
        ({"prompt": [5, 10**6]}, 400, "is not in the vocabulary"),
        ({"prompt": "\ud800"}, 400, "not valid UTF-8"),
        ({"temperature": -1}, 400, "temperature must be"),
        ({"max_tokens": 0}, 400, "max_tokens must be"),
        ({"top_p": 2}, 400, "top_p must be"),
        ({"stop": ""}, 400, "stop"),
        ({"n": 0}, 400, "'n'"),
        ({"temprature": 1}, 400, "temprature"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"logit_bias": {"5": 1.0}}, 400, "logit_bias"),
        ({"model": "gpt-5"}, 404, f"ask for '{MODEL}'"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_at_once(
    client: Client, body: dict[str, Any], status: int, words: str
) -> None:
    answer = client.post("/v1/completions", **{"model": MODEL, "prompt": PROMPT, **body})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_a_body_that_is_too_long_is_refused_before_it_is_read(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moespeq.server.body_limit._MOST_BYTES", 200)
    for announced in ({}, {"Content-Length": "x"}):
        refused = client.post("/v1/completions", announced, model=MODEL, prompt="a" * 200)
        assert (refused.status_code, refused.json()["error"]["type"]) == (413, "invalid_request_error")
        assert "send fewer prompts at once" in refused.json()["error"]["message"]
    assert client.post("/tokenize", prompt="a").status_code == 200


def test_a_prober_may_ask_for_the_head_alone(client: Client) -> None:
    assert client.head("/health").status_code == 200


def test_a_browser_may_ask_from_the_origins_that_were_named_and_no_other(client: Client) -> None:
    app = create_app(client.service, cors_origins=["https://chat.example"])
    named, asked = Client(client.service, app), {"Access-Control-Request-Method": "POST"}
    allowed = named.options("/v1/completions", Origin="https://chat.example", **asked)
    assert (allowed.status_code, allowed.headers["Access-Control-Allow-Origin"]) == (200, "https://chat.example")
    assert named.options("/v1/completions", Origin="https://other.example", **asked).status_code == 400
    assert "Access-Control-Allow-Origin" not in client.get("/health", Origin="https://chat.example").headers


def test_a_key_is_asked_for_where_there_is_one(served_engine: Engine) -> None:
    with serve(served_engine, api_key="secret") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            refused = client.get("/v1/models", **headers)
            assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert client.post("/tokenize", prompt="a").status_code == 401
        assert client.get("/live?since=x").status_code == 401
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models", Authorization="Bearer secret").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_the_body_of_a_stranger_is_not_read(served_engine: Engine, path: str) -> None:
    with serve(served_engine, api_key="secret") as client:
        assert client.send(path, b"no JSON").status_code == 401
        assert client.post(path, {"Content-Length": str(10**9)}).status_code == 401


def test_no_description_of_the_endpoints_is_open(client: Client) -> None:
    assert client.get("/openapi.json").status_code == 404


def test_metrics_count_what_was_served(client: Client, served_engine: Engine) -> None:
    before = {name: client.metric(name) for name in ("generation_tokens_total", "prompt_tokens_total")}
    stats = served_engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True).stats
    drafted, accepted = (client.metric(f"spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted"))
    client.complete(max_tokens=20, ignore_eos=True)
    assert client.metric("generation_tokens_total") - before["generation_tokens_total"] == 20
    assert client.metric("prompt_tokens_total") - before["prompt_tokens_total"] == stats.prompt_tok
    assert client.metric("spec_decode_num_draft_tokens_total") - drafted == stats.drafted
    assert client.metric("spec_decode_num_accepted_tokens_total") - accepted == stats.accepted
    assert client.metric("spec_decode_num_accepted_tokens_per_pos_total") == client.metric(
        "spec_decode_num_accepted_tokens_total"
    )
    for name in (
        "time_to_first_token",
        "inter_token_latency",
        "e2e_request_latency",
        "draft",
        "verify",
        "expert_stall",
    ):
        assert client.metric(f"{name}_seconds_count") > 0
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "expert_cache_hits_total",
        "expert_wasted_bytes_total",
    ):
        assert client.metric(name) >= 0
    assert client.metric("spec_depth_count") > 0
    assert 0 <= client.metric("link_utilisation") <= 1


def test_a_server_that_is_loading_says_how_far_it_is(client: Client) -> None:
    worker = client.service.worker
    client.service.progress.update(3, 8, "experts")
    worker._state, engine, worker._engine = WorkerState.LOADING, worker._engine, None
    try:
        health = client.get("/health")
        refused = client.post("/v1/completions", model=MODEL, prompt=PROMPT)
    finally:
        worker._state, worker._engine = WorkerState.READY, engine
    assert health.status_code == 503
    assert health.json() == {"status": "loading", "what": "experts", "done_bytes": 3, "total_bytes": 8}
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")


def test_a_closed_server_refuses(served_engine: Engine) -> None:
    with serve(served_engine) as client:
        pass
    assert client.post("/v1/completions", model=MODEL, prompt=PROMPT).status_code == 503
    with pytest.raises(UnavailableError, match="shutting down"):
        client.service.worker.submit([lambda _: iter(())], lambda _: None)
