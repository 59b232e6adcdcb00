"""Images from the command line, in a chat and through the server, down to the engine: the same prompt each way."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import open_tight
from image_families import make_reader, png
from moespeq.cli.main import run
from moespeq.config import LoadOptions
from moespeq.decode.conversation import Conversation
from moespeq.decode.engine import Engine
from moespeq.decode.hugging_face import speculative_model
from moespeq.decode.planning import needs_of
from moespeq.errors import UsageError
from moespeq.inspection import describe_model
from moespeq.model.images import ImagePrompt
from moespeq.plan import Machine, plan_memory
from moespeq.prepare import prepare_store
from moespeq.server.image_source import ImageMemory
from moespeq.store import Store
from served import MODEL, Client, serve

NUM_TOKENS = 6
TEXT = "What is it?"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = make_reader("qwen3_vl_moe", tmp_path_factory.mktemp("requests") / "checkpoint")
    return prepare_store(checkpoint, checkpoint.parent / "store")


@pytest.fixture(scope="module")
def engine(store: Path) -> Iterator[Engine]:
    with open_tight(store, 9, ctx_size=320, prefill_rows=64, k=2) as engine:
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    with serve(engine) as client:
        yield client


def _parts(engine: Engine, *files: bytes) -> list[dict[str, Any]]:
    images = [{"type": "image", "image": engine.images.read(file)} for file in files]
    return [{"role": "user", "content": [*images, {"type": "text", "text": TEXT}]}]


def _by_url(*urls: str) -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": TEXT}]}]


def _data(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _tokens(engine: Engine, *files: bytes) -> tuple[int, ...]:
    return engine.chat(_parts(engine, *files), max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens


def _ask(client: Client, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    given = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **body}
    answer = client.post("/v1/chat/completions", model=MODEL, messages=messages, **given)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_data_url_is_the_image_in_it(engine: Engine, client: Client) -> None:
    answer = _ask(client, _by_url(_data(png(1)), _data(png(2, 50, 33))))
    expected = engine.tokenizer.decode(list(_tokens(engine, png(1), png(2, 50, 33))), skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["usage"]["prompt_tokens"] == len(engine.encode_chat(_parts(engine, png(1), png(2, 50, 33))))


def test_another_image_gives_other_probabilities(client: Client) -> None:
    first, second = (_ask(client, _by_url(_data(png(seed))), logprobs=True)["choices"][0] for seed in (1, 2))
    assert first["logprobs"] != second["logprobs"]


def test_tokenize_counts_images_too(engine: Engine, client: Client) -> None:
    told = client.post("/tokenize", messages=_by_url(_data(png(1)))).json()
    prompt = engine.encode_chat(_parts(engine, png(1)))
    assert told["count"] == len(prompt)


def _bad(url: str) -> list[dict[str, Any]]:
    return _by_url(_data(png(1)), url)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (_bad("http://images.example/1"), "Images at an address are not fetched here; send them as data URLs"),
        (_bad("file:///etc/passwd"), "An image is a data URL (data:image/png;base64,...), got 'file:///etc/passwd'"),
        (_bad(""), "An image is a data URL (data:image/png;base64,...), got ''"),
        (_bad("data:image/png,abc"), "The data URL of image 2 is not in base64"),
        (_bad("data:image/png;base64,???"), "The data URL of image 2 is no valid base64"),
        (_bad("data:image/png;base64,aGVsbG8="), "The image 2 is no PNG, JPEG, WEBP, GIF or BMP; send one."),
        (_bad(_data(png(1)[:200])), "The image 2 is damaged and cannot be decoded; send it again."),
        (_by_url(*[_data(png(1))] * 22), "The first 22 images take 330 tokens, and the context holds 320; send fewer"),
        (_by_url(*[_data(png(1, 8, 8))] * 33), "A request may hold 32 images; send fewer."),
        ([{"role": "user", "content": "<|image_pad|>"}, *_by_url(_data(png(1)))], "has 2 places for 1 images"),
    ],
)
def test_what_is_no_image_is_a_400_about_messages(
    client: Client, messages: list[dict[str, Any]], sentence: str
) -> None:
    answer = client.post("/v1/chat/completions", model=MODEL, messages=messages, max_tokens=2)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages"


def test_waiting_images_take_so_much_memory_and_give_it_back(engine: Engine) -> None:
    image_bytes = engine.images.read(png(1)).num_bytes
    memory = ImageMemory(most_bytes=image_bytes)
    with serve(engine, image_memory=memory) as client:
        given = {"model": MODEL, "messages": _by_url(_data(png(1))), "max_tokens": 1}
        kept = engine.images.read(png(2))
        memory.hold(kept)
        full = client.post("/v1/chat/completions", **given)
        assert (full.status_code, full.headers["Retry-After"]) == (429, "5")
        assert "images of waiting requests take" in full.json()["error"]["message"]
        del kept
        assert memory.used_bytes == 0
        assert client.post("/v1/chat/completions", **given).status_code == 200


def test_an_image_by_address_is_fetched_where_that_is_allowed(engine: Engine) -> None:
    with serve(engine, fetch_image=lambda url: png(1) if url == "https://images.example/1" else b"") as client:
        fetched = _ask(client, _by_url("https://images.example/1"))
        assert fetched["choices"] == _ask(client, _by_url(_data(png(1))))["choices"]


def test_keys_of_images_stay_and_are_never_those_of_others(store: Path) -> None:
    with open_tight(store, 9, ctx_size=320, prefill_rows=32, prefix_cache=1 << 20) as engine, serve(engine) as client:
        question = _by_url(_data(png(1)))
        first = _ask(client, question)
        cached = [_ask(client, messages) for messages in (_by_url(_data(png(2))), question)]
        assert cached[1]["choices"] == first["choices"]
        found = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, *cached)]
        assert found == [0, 0, 32]


def test_a_model_that_sees_nothing_refuses_images(tiny_store: Path) -> None:
    with open_tight(tiny_store, 9) as engine:
        with pytest.raises(UsageError, match=r"^This \w+ model takes no images: it has no part that sees; leave them"):
            engine.images  # noqa: B018  # raises
        with serve(engine) as client:
            answer = client.post("/v1/chat/completions", model=MODEL, messages=_by_url(_data(png(1))))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_a_chat_reads_an_image_once_and_goes_on_from_its_keys(store: Path) -> None:
    with open_tight(store, 9, ctx_size=320, prefill_rows=64) as engine:
        talk = Conversation(engine, max_new_tokens=4, ignore_eos=True)
        talk.attach(png(1), "cat.png")
        for text in (TEXT, "And now?"):
            stream = talk.ask(text)
            list(stream)
            talk.keep(text, stream.result)
        assert talk.last is not None
        assert talk.last.reused_tok >= engine.images.read(png(1)).num_tok
        assert talk.messages[0]["content"][0] == {"type": "image", "name": "cat.png"}
        assert talk.messages[2] == {"role": "user", "content": "And now?"}
        json.dumps(talk.messages)


def test_attached_images_wait_for_an_answer_that_is_kept(engine: Engine) -> None:
    talk = Conversation(engine, max_new_tokens=2)
    talk.attach(png(1), "cat.png")
    talk.ask(TEXT).close()
    assert talk.detach() == 1
    talk.attach(png(1), "cat.png")
    talk.reset()
    assert talk.detach() == 0


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["moespeq", *arguments])
    with pytest.raises(SystemExit) as ended:
        run()
    return int(ended.value.code or 0)


def test_run_takes_images_in_front_of_its_prompt(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: Engine
) -> None:
    for seed in (1, 2):
        (tmp_path / f"{seed}.png").write_bytes(png(seed))
    given = ["--image", f"{tmp_path}/1.png", "--image", f"{tmp_path}/2.png", "--device", "cpu"]
    limits = ["-n", str(NUM_TOKENS), "--ignore-eos", "--prefill-rows", "64", "--ctx-size", "320"]
    assert _run(monkeypatch, "run", str(store), "-p", TEXT, *given, *limits, "--json") == 0
    assert tuple(json.loads(capsys.readouterr().out)["tokens"]) == _tokens(engine, png(1), png(2))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"hello", "cat.png is no PNG, JPEG, WEBP, GIF or BMP; send one."),
        (None, "cat.png cannot be read (No such file"),
    ],
)
def test_run_refuses_a_wrong_image_before_it_loads(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    sentence: str,
) -> None:
    if content is not None:
        (tmp_path / "cat.png").write_bytes(content)
    monkeypatch.setattr("moespeq.api.load", lambda *_, **__: pytest.fail("it was loaded"))
    assert _run(monkeypatch, "run", str(store), "-p", TEXT, "--image", f"{tmp_path}/cat.png") == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_run_refuses_images_of_a_model_that_sees_nothing(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cat.png").write_bytes(png(1))
    assert _run(monkeypatch, "run", str(tiny_store), "-p", TEXT, "--image", f"{tmp_path}/cat.png") == 2
    assert "takes no images: it has no part that sees" in capsys.readouterr().err


def test_generate_of_a_transformers_model_refuses_pixels_instead_of_ignoring_them(store: Path) -> None:
    with open_tight(store, 9, ctx_size=320, prefill_rows=64) as engine:
        prompt = engine.encode_chat(_parts(engine, png(1)))
        assert isinstance(prompt, ImagePrompt)
        inputs = dict(prompt.images[0].image.inputs)
        with pytest.raises(UsageError, match=r"^generate takes no pixel_values here; give images to Engine\.chat"):
            speculative_model(engine).generate(torch.tensor([list(prompt.tokens)]), max_new_tokens=2, **inputs)


def test_info_says_whether_images_are_taken(store: Path, tiny_store: Path) -> None:
    assert describe_model(store)["images"] == "taken; prompts with them are prefilled eagerly"
    assert describe_model(tiny_store)["images"] == "not taken: it has no part that sees"


def test_the_plan_counts_the_tower_and_an_image_in_it(store: Path, tiny_store: Path) -> None:
    with Store.open(store) as opened, Store.open(tiny_store) as blind:
        needs, without = needs_of(opened), needs_of(blind)
        tower = [entry for file in opened.dense_files() for entry in file.entries if ".visual." in entry.name]
        tower_bytes = sum(entry.num_bytes for entry in tower)
        assert 0 < tower_bytes < needs.dense_bytes
    options = LoadOptions(device="cpu", ctx_size=320, prefill_rows=64)
    figures = {figure.name: figure for figure in plan_memory(needs, options, Machine(1 << 40)).workspace}
    assert figures["image"].reason == "of up to 64 tokens, 256 patches, in a layer that sees"
    assert figures["image"].num_bytes == 256 * (8 * 32 + 2 * 64) * 2
    assert "image" not in {figure.name for figure in plan_memory(without, options, Machine(1 << 40)).workspace}
