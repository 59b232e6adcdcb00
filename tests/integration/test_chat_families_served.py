"""Every family's chat through the engine: its ends end an answer inside of a round, and none of its markers breaks.

The model is tiny and random; what it answers is put into its logits, so that drafts are accepted and rounds are long.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import moespeq
from chat_families import CHAT_FAMILIES, TOOL, Said, chat_tokenizer
from families import make_tiny
from moespeq.decode.conversation import Conversation
from moespeq.decode.engine import Engine
from moespeq.prepare import prepare_store
from moespeq.server.asking_chat import ask_chat
from moespeq.server.chat_protocol import ChatRequest
from moespeq.server.generating import ChoicePiece
from moespeq.types import FinishReason
from served import MODEL, serve

VOCAB_SIZE = 360  # the tiny tokenizer's and any family's markers
HI: list[dict[str, str]] = [{"role": "user", "content": "Hi"}]
DEFAULTS = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.05}

EngineOf = Callable[[str], Engine]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineOf]:
    """Opens one model with a family's tokenizer and, of its ends, all but the tokenizer's own in generation_config."""
    root = tmp_path_factory.mktemp("chats")
    checkpoint = make_tiny("qwen3_moe", root / "checkpoint", vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    with ExitStack() as opened:

        @cache
        def open_family(name: str) -> Engine:
            family, folder = CHAT_FAMILIES[name], root / name
            shutil.copytree(checkpoint, folder)
            tokenizer = chat_tokenizer(name)
            tokenizer.save_pretrained(folder)
            ends = tokenizer.convert_tokens_to_ids([*family.ends[1:]]) or tokenizer.eos_token_id
            said = {**DEFAULTS, "eos_token_id": ends}
            (folder / "generation_config.json").write_text(json.dumps(said))
            return opened.enter_context(moespeq.load(prepare_store(folder, root / f"{name}-store"), k=6, device="cpu"))

        yield open_family


class Script:
    """A logits processor, and stands in for a grammar: the answer is `tokens`, whatever the model wants."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def processor(self, prompt_tok: int) -> Callable[[Tensor, Tensor], Tensor]:
        def only(input_ids: Tensor, scores: Tensor) -> Tensor:
            token = self._tokens[input_ids.shape[1] - prompt_tok]
            return torch.full_like(scores, -torch.inf).index_fill(-1, torch.tensor([token]), 0.0)

        return only


def scripted(engine: Engine, said: str, end: str) -> Script:
    """`said`, then `end`, then what must never be seen."""
    encode = engine.tokenizer.encode
    return Script(encode(f"{said}{end} and no more of <tool_call> this", add_special_tokens=False))


def answered(engine: Engine, said: str, end: str, tools: Any) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """The choice that a server makes of `said`, and the tokens of each of its rounds."""
    with serve(engine) as client:
        asked = ask_chat(client.service, ChatRequest(model=MODEL, messages=HI, tools=tools, seed=0))
        task = replace(asked.task, grammar=scripted(engine, said, end))
        turns = task.turns(client.service.metrics, client.service.clock, 0.0)
        events = [event for turn in turns for event in turn(engine)]
    pieces = [event.tokens for event in events if isinstance(event, ChoicePiece) and event.tokens]
    return asked.style.whole(0, events), pieces


def check_said(choice: dict[str, Any], said: Said) -> None:
    message = choice["message"]
    assert (message["content"] or "", message.get("reasoning_content", "")) == (said.content, said.reasoning)
    calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert calls == list(said.calls)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("name", CHAT_FAMILIES)
def test_each_end_of_a_family_ends_its_answer_inside_of_a_round(engine_of: EngineOf, name: str) -> None:
    engine, family = engine_of(name), CHAT_FAMILIES[name]
    closed = "</think>" if family.prompt.rstrip().endswith("<think>") else ""
    for end in family.ends:
        choice, pieces = answered(engine, f"{closed}Hi < you", end, None)
        check_said(choice, Said("", "Hi < you"))
        assert max(map(len, pieces)) > 3, "rounds of several tokens"
        assert pieces[-1][-1:] == tuple(engine.tokenizer.encode(end, add_special_tokens=False))


@pytest.mark.parametrize("name", ["deepseek_v31", "gpt_oss", "mistral"])
def test_reasoning_and_calls_are_read_out_of_rounds_of_several_tokens(engine_of: EngineOf, name: str) -> None:
    engine, family = engine_of(name), CHAT_FAMILIES[name]
    said = family.said[-1]
    choice, _ = answered(engine, said.text, family.ends[-1], [TOOL])
    check_said(choice, said)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "gemma"])
def test_a_text_and_a_chat_end_there_too_and_show_no_end(engine_of: EngineOf, name: str) -> None:
    engine, family = engine_of(name), CHAT_FAMILIES[name]
    prompt = engine.tokenizer.encode_chat(HI)
    for end in family.ends:
        script = scripted(engine, "Hi all of you", end)
        result = engine.generate(prompt, logits_processors=(script.processor(len(prompt)),), max_new_tokens=60)
        assert (result.text, result.finish_reason) == ("Hi all of you", FinishReason.STOP)
        assert result.stats.rounds < len(result.tokens) - 1


def test_an_end_that_is_no_special_token_is_not_shown(engine_of: EngineOf) -> None:
    engine = engine_of("phimoe")
    prompt, (letter,) = engine.tokenizer.encode("Hi"), engine.tokenizer.encode("H", add_special_tokens=False)
    script = Script([letter, letter, 65, letter, 65, letter]).processor(len(prompt))
    ended = engine.generate(prompt, logits_processors=(script,), eos_token_ids=65)
    assert (ended.text, len(ended.tokens)) == ("HH", 3)
    going_on = engine.generate(prompt, logits_processors=(script,), eos_token_ids=65, ignore_eos=True, max_new_tokens=6)
    assert len(going_on.text) == 6, "where it ends nothing it is a token as any"


def test_defaults_of_a_checkpoint_are_those_of_run_chat_and_server(engine_of: EngineOf) -> None:
    engine = engine_of("granite")
    expected = {name: value for name, value in DEFAULTS.items() if name != "do_sample"}
    conversation = Conversation(engine).settings
    with serve(engine) as client:
        asked = ask_chat(client.service, ChatRequest(model=MODEL, messages=HI))
    assert asked.task.sampling is not None
    served = engine.sampling_params(**asked.task.sampling)
    for params in (engine.sampling_params(), conversation, served):
        assert {name: getattr(params, name) for name in expected} == expected
    said = engine.sampling_params(temperature=0.0, top_k=None)
    assert (said.temperature, said.top_k) == (0.0, 20)
