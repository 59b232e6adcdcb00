"""`moespeq serve` as people run it: a process, a port, the official client, and an end that leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from moespeq.decode.engine import Engine
from moespeq.errors import UsageError
from moespeq.server.listening import listen
from moespeq.server.serving import HttpServer
from moespeq.server.worker import WorkerState
from served import PROMPT, chat_model

KEY = "a-key"
WAIT_S = 90.0
CHAT = [{"role": "user", "content": "Tom has 5 apples."}]


class Process:
    """A running `moespeq serve`."""

    def __init__(self, model: Path, cache: Path, *, grace_s: int = 5) -> None:
        command = [sys.executable, "-m", "moespeq", "serve", str(model), "--port", "0", "--json", "--k", "4"]
        command += ["--ctx-size", "128", "--api-key", KEY, "--served-model-name", "demo", "--grace", str(grace_s)]
        self.stderr = cache.parent / f"stderr-{id(self)}.txt"
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self.stderr.open("w"),
            text=True,
            env=os.environ | {"MOESPEQ_CACHE": str(cache)},
        )
        assert self.process.stdout is not None
        self.facts = json.loads(self.process.stdout.readline())
        self.client = openai.OpenAI(base_url=f"{self.facts['url']}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S)

    def end(self, number: int) -> int:
        """The exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("serve") / "demo")


@pytest.fixture(scope="module")
def process(model: Path) -> Iterator[Process]:
    running = Process(model, model.parent / "cache")
    yield running
    running.process.kill()
    running.process.wait()


def test_the_official_client_gets_the_engines_text(process: Process, served_engine: Engine) -> None:
    expected = served_engine.generate(PROMPT, max_new_tokens=16).text
    whole = process.client.completions.create(model="demo", prompt=PROMPT, max_tokens=16)
    assert whole.choices[0].text == expected
    stream = process.client.completions.create(model="demo", prompt=PROMPT, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_the_official_client_chats(process: Process, served_engine: Engine) -> None:
    expected = served_engine.chat(CHAT, max_new_tokens=12, temperature=0.9, seed=2).text
    asked = {"model": "demo", "messages": CHAT, "max_completion_tokens": 12, "temperature": 0.9, "seed": 2}
    whole = process.client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == expected
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    stream = process.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_official_client_raises_its_own_errors(process: Process) -> None:
    client = process.client
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(openai.BadRequestError, match="the context 128"):
        client.completions.create(model="demo", prompt="apples " * 200)
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="gpt-5", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_a_closed_connection_frees_the_engine(process: Process) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 110, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{process.facts['url']}/v1/completions", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    deadline_s = time.monotonic() + WAIT_S
    while "num_requests_running 0.0" not in httpx.get(f"{process.facts['url']}/metrics").text:
        assert time.monotonic() < deadline_s, "the engine works for nobody"
        time.sleep(0.05)


def test_a_signal_lets_an_answer_end_and_then_the_process(model: Path) -> None:
    running = Process(model, model.parent / "cache")
    stream = running.client.completions.create(model="demo", prompt=PROMPT, max_tokens=30, stream=True)
    first = next(iter(stream))
    running.process.send_signal(signal.SIGTERM)
    rest = list(stream)
    assert rest[-1].choices[0].finish_reason is not None, first
    assert running.process.wait(WAIT_S) == -signal.SIGTERM


def test_answers_that_the_end_cuts_are_told_so_in_a_stream_and_in_the_queue(model: Path) -> None:
    running = Process(model, model.parent / "cache", grace_s=0)
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 110, "n": 128, "extra_body": {"ignore_eos": True}}
    stream = running.client.completions.create(**asked, stream=True)
    next(iter(stream))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(running.client.completions.create, **asked)
        deadline_s = time.monotonic() + WAIT_S
        while "num_requests_waiting 1.0" not in httpx.get(f"{running.facts['url']}/metrics").text:
            assert time.monotonic() < deadline_s
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="shutting down") as cut:
            waiting.result()
    assert cut.value.status_code == 503
    assert running.process.wait(WAIT_S) == -signal.SIGTERM
    assert "Traceback" not in running.stderr.read_text()


def test_a_signal_ends_a_server_that_is_loading(model: Path) -> None:
    command = [sys.executable, "-m", "moespeq", "serve", str(model), "--port", "0"]
    environment = os.environ | {"MOESPEQ_CACHE": str(model.parent / "slow")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as loading:
        assert loading.stderr is not None
        told = ""
        while "shows how far" not in told:
            told += loading.stderr.readline()
        loading.send_signal(signal.SIGTERM)
        assert loading.wait(WAIT_S) == -signal.SIGTERM
        assert "Traceback" not in loading.stderr.read()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_host_that_no_name_server_could_know_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="choose another --host or --port"):
        listen(f"{'a' * 70}.b", 0)


def test_a_connection_sends_each_piece_at_once() -> None:
    """A piece that waits for the acknowledgement of the one before is 40 ms late where a client delays those."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_of_ipv6_is_listened_on() -> None:
    with listen("::1", 0) as listening:
        assert listening.getsockname()[0] == "::1"


Cli = Callable[..., tuple[int, str, str]]


def test_a_port_that_is_taken_is_one_sentence(cli: Cli, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, told = cli("serve", model, "--port", taken.getsockname()[1])
    assert code == 2
    assert "choose another --host or --port" in told


def test_a_port_that_is_taken_is_told_before_anything_slow_is_imported(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-X", "importtime", "-m", "moespeq", "serve", str(model), "--port"]
        told = subprocess.run([*command, str(taken.getsockname()[1])], capture_output=True, text=True, timeout=WAIT_S)
    assert told.returncode == 2
    assert "choose another --host or --port" in told.stderr
    assert not re.search(r"\| +torch$", told.stderr, re.MULTILINE)


def test_the_log_does_not_read_as_ready_while_the_model_is_loaded(process: Process) -> None:
    told = process.stderr.read_text()
    assert f"loading demo; {process.facts['url']}/ shows how far" in told
    assert not any(words in told for words in ("startup", "Started server process", "Uvicorn running"))


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_a_server_that_is_ready_tells_its_addresses(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch, quiet: tuple[str, ...]
) -> None:
    def load_and_close(server: HttpServer, listening: socket.socket) -> None:
        worker = server._service.worker
        worker.start()
        while worker.state is WorkerState.LOADING:
            time.sleep(0.01)
        worker.close()
        listening.close()

    monkeypatch.setattr(HttpServer, "run", load_and_close)
    code, _, told = cli("serve", model, "--port", "0", "--ctx-size", "128", "--served-model-name", "demo", *quiet)
    assert code == 0
    assert told.count("\n") == 1 or not quiet
    assert re.search(r"demo is served at (http://127\.0\.0\.1:\d+)/v1; its live page is \1/$", told, re.MULTILINE)


def test_a_host_that_is_no_name_is_one_sentence(cli: Cli, model: Path) -> None:
    code, _, told = cli("serve", model, "--host", "a" * 70 + ".b", "--port", "0")
    assert code == 2
    assert "choose another --host or --port" in told


def test_a_load_that_fails_ends_the_server_with_its_sentence(cli: Cli, model: Path) -> None:
    code, _, told = cli("serve", model, "--port", "0", "--device-memory", "1KiB", "--quiet")
    assert code == 2
    assert told.count("\n") == 1
    assert told.startswith("moespeq: ")
