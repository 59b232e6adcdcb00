"""Log-probabilities are the target's own, the same whether a token was generated or given, and enough for lm-eval; a
grammar holds for drafted tokens too.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch

from moespeq.decode.engine import Engine
from moespeq.decode.logprobs import token_logprobs
from moespeq.model.tokenizer import Tokenizer
from served import MODEL, PROMPT, Client

NEAR = 0.05  # bf16 passes of other shapes: a prefill against a verify
FLAG = {
    "type": "object",
    "properties": {"even": {"type": "boolean"}, "name": {"enum": ["Tom", "Ann"]}},
    "required": ["even", "name"],
    "additionalProperties": False,
}


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_logprobs_are_those_of_the_logits_in_any_number_of_rows() -> None:
    logits = torch.randn(70, 30, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    tokens = [row % 30 for row in range(70)]
    expected = logits.float().log_softmax(dim=-1)
    scored = token_logprobs(logits, tokens, num_top=40)
    for row, one in enumerate(scored):
        assert one.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)
        assert len(one.top) == 30
    assert token_logprobs(logits[:0], [], 5) == []


def test_an_echo_scores_the_prompt_as_the_engines_logits_do(client: Client, served_engine: Engine) -> None:
    tokens = served_engine.encode(PROMPT)
    expected = served_engine.prompt_logits(tokens).float().log_softmax(dim=-1)
    choice = client.complete(tokens, max_tokens=0, echo=True, logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == PROMPT
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(
        [float(expected[row, token]) for row, token in enumerate(tokens[1:])], abs=1e-4
    )
    assert "".join(logprobs["tokens"]) == PROMPT
    starts = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    assert all(PROMPT[offset:].startswith(token) for offset, token in starts)


def test_what_lm_eval_asks_gives_the_likelihood_of_a_continuation(client: Client, served_engine: Engine) -> None:
    context, continuation = served_engine.encode(PROMPT), served_engine.generate(PROMPT, max_new_tokens=4).tokens
    answer = client.complete(
        [[*context, *continuation]], max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1234
    )["choices"][0]["logprobs"]
    scored = slice(len(context), -1)  # as lm-eval cuts it
    assert len(answer["token_logprobs"][scored]) == len(continuation)
    for value, top in zip(answer["token_logprobs"][scored], answer["top_logprobs"][scored], strict=True):
        assert value == pytest.approx(max(top.values()), abs=NEAR), "the engine chose it, so it is the likeliest"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_generated_tokens_are_scored_as_a_prefill_would_score_them(
    client: Client, served_engine: Engine, is_streamed: bool
) -> None:
    body = {"max_tokens": 12, "logprobs": 3, "ignore_eos": True}
    prompt = served_engine.encode(PROMPT)
    tokens = served_engine.generate(prompt, max_new_tokens=12, ignore_eos=True).tokens
    expected = served_engine.prompt_logprobs([*prompt, *tokens])[len(prompt) - 1 :]
    if is_streamed:
        parts = [chunk["choices"][0]["logprobs"] for chunk in client.stream(prompt=PROMPT, **body)]
    else:
        parts = [client.complete(**body)["choices"][0]["logprobs"]]
    values = [value for part in parts for value in part["token_logprobs"]]
    assert values == pytest.approx([one.logprob for one in expected], abs=NEAR)
    assert all(3 <= len(top) <= 4 for part in parts for top in part["top_logprobs"])


def test_a_chat_names_tokens_with_their_bytes(client: Client) -> None:
    messages = [{"role": "user", "content": "Tom has 5 apples."}]
    answer = client.post(
        "/v1/chat/completions", model=MODEL, messages=messages, max_tokens=5, logprobs=True, top_logprobs=2
    ).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == answer["choices"][0]["message"]["content"]
    assert all(bytes(one["bytes"]).decode() == one["token"] and len(one["top_logprobs"]) == 2 for one in content)
    refused = client.post("/v1/chat/completions", model=MODEL, messages=messages, top_logprobs=2)
    assert refused.status_code == 400


def test_logprobs_change_no_text(client: Client) -> None:
    assert client.text(max_tokens=16, logprobs=5) == client.text(max_tokens=16)


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_matches_its_schema_at_every_k(client: Client, served_engine: Engine, seed: int) -> None:
    texts = set()
    for k in (0, 4, 8):
        served_engine.retune(k=k)
        body = {"max_tokens": 60, "temperature": 1.0, "seed": seed, "response_format": format_of(FLAG)}
        choice = client.complete(**body)["choices"][0]
        assert choice["finish_reason"] == "stop"
        texts.add(choice["text"])
    served_engine.retune(k=4)
    assert len(texts) == 1
    answer = json.loads(texts.pop())
    assert set(answer) == {"even", "name"}
    assert answer["even"] in (True, False)
    assert answer["name"] in ("Tom", "Ann")


def test_a_schema_holds_for_every_choice_and_prompt(client: Client) -> None:
    body = {"n": 2, "max_tokens": 60, "temperature": 1.0, "seed": 1, "response_format": format_of(FLAG)}
    choices = client.complete([PROMPT, "Question:"], **body)["choices"]
    assert all(set(json.loads(choice["text"])) == {"even", "name"} for choice in choices)


def test_a_schema_that_cannot_be_enforced_is_refused(client: Client) -> None:
    for wanted in (format_of({"type": "nonsense"}), {"type": "json_schema"}, {"type": "yaml"}):
        answer = client.post("/v1/completions", model=MODEL, prompt=PROMPT, response_format=wanted)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


def test_a_text_format_changes_nothing(client: Client) -> None:
    assert client.text(max_tokens=8, response_format={"type": "text"}) == client.text(max_tokens=8)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_prompts_are_written_beside_the_event_loop_and_each_token_is_decoded_once(
    client: Client, served_engine: Engine, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    """So that many log-probabilities stop nobody else's stream."""
    alone: list[int] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        if len(ids) == 1:
            assert threading.current_thread() is not threading.main_thread()
            alone.extend(ids)
        return decode(self, ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    body = {"max_tokens": 0, "echo": True, "logprobs": 5, "n": 3, "stream": is_streamed}
    answer = client.post("/v1/completions", model=MODEL, prompt=[PROMPT, PROMPT], **body)
    assert answer.status_code == 200
    assert len(alone) == len(set(alone))


def test_prompts_that_would_come_back_as_too_much_are_refused(client: Client) -> None:
    asked = {"model": MODEL, "prompt": ["a " * 100] * 100, "max_tokens": 0, "echo": True}
    for body in ({"n": 128}, {"n": 5, "logprobs": 20}):
        error = client.post("/v1/completions", **asked, **body).json()["error"]
        assert error["param"] == "echo"
        assert "and may as 1000000" in error["message"]
