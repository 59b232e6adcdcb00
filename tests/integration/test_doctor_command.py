"""`moespeq doctor` on a real engine and server: silent where all is well, and each fault that is planted is seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import torch

from doctor_facts import by_check
from moespeq.decode.engine import Engine
from moespeq.demo.assets import MODEL_FOLDER
from moespeq.doctor import Severity, server_probe
from moespeq.doctor.self_test import run_self_test
from moespeq.doctor.self_test_checks import check_self_test
from moespeq.doctor.server_probe import is_local, watch_server
from moespeq.errors import BudgetError, UsageError
from moespeq.model.kv_cache import SharedCache
from moespeq.prepare import prepare_cached
from served import PROMPT, Client, serve

Cli = Callable[..., tuple[int, str, str]]
TOKENS = list(range(3, 20))


@pytest.fixture(scope="module")
def demo_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESPEQ_CACHE", str(tmp_path_factory.mktemp("cache")))
        return prepare_cached(MODEL_FOLDER, device="cpu")


def self_test(store: Path) -> dict[str, Severity]:
    test = run_self_test(store, PROMPT, device="cpu")
    return {check: one.severity for check, one in by_check(check_self_test(test, "demo")).items()}


def test_a_sound_model_passes(demo_store: Path) -> None:
    assert set(self_test(demo_store).values()) == {Severity.FINE}


def test_a_cache_that_rounds_left_otherwise_is_seen(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, calls = SharedCache.rows, []

    def spoilt(cache: SharedCache, begin: int, end: int) -> list[tuple[torch.Tensor, ...]]:
        calls.append(end)
        return [(keys * 2 if len(calls) == 1 else keys, values) for keys, values in rows(cache, begin, end)]

    monkeypatch.setattr(SharedCache, "rows", spoilt)
    test = run_self_test(tiny_store, TOKENS, device="cpu")
    assert (test.first_difference, test.kv_differing) == (None, test.num_layers)


def test_a_store_that_was_damaged_is_seen(tiny_checkpoint: Path, tiny_store: Path, tmp_path: Path) -> None:
    from moespeq.doctor.base_probe import probe_base

    store = shutil.copytree(tiny_store, tmp_path / "store")
    sound = probe_base(store, tiny_checkpoint)
    assert (sound.damaged, sound.num_recoded, sound.num_unlike_checkpoint) == ((), 0, 0)
    assert 0.0 < sound.error_share < 0.2
    with (store / "experts.bin").open("r+b") as file:
        file.seek(64)
        byte = file.read(1)
        file.seek(64)
        file.write(bytes([byte[0] ^ 1]))
    damaged = probe_base(store, None)
    assert len(damaged.damaged) == 1
    assert damaged.num_unlike_checkpoint is None


class Bridge(httpx.Client):
    """Doctor's own client, answered by an application in this process."""

    def __init__(self, client: Client, **headers: str) -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            told = {name: value for name, value in request.headers.items() if name == "authorization"}
            if request.method == "GET":
                given = client.get(request.url.path, **told)
            else:
                given = client.post(request.url.path, told, **json.loads(request.content))
            return httpx.Response(given.status_code, content=given.content)

        super().__init__(transport=httpx.MockTransport(answer), base_url="http://server", headers=headers)


def watch(client: httpx.Client, during: Callable[[], object] = lambda: None) -> Any:
    return watch_server(client, prompt=PROMPT, watch_s=0.0, sleep=lambda _: during())


def test_a_server_is_watched_and_its_answer_scored_twice(client: Client) -> None:
    with Bridge(client) as bridge:
        watched = watch(bridge, lambda: client.complete(max_tokens=60, ignore_eos=True))
    signals = watched.signals
    assert watched.health.severity is Severity.FINE
    assert signals.echo_logprob_gap is not None
    assert signals.echo_logprob_gap < 0.1
    assert (signals.model, signals.device, signals.k_asked) == ("MODEL", "cpu", "4")
    assert signals.acceptance.drafts >= 12
    assert signals.routes.total > 0
    assert signals.record_bytes > 0
    assert signals.pass_s > 0


def test_keys_and_values_that_are_not_the_texts_are_seen(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = Engine.prompt_logprobs
    shifted = lambda engine, prompt, **asked: scored(engine, [3, *prompt[1:]], **asked)  # noqa: E731
    monkeypatch.setattr(Engine, "prompt_logprobs", shifted)
    with Bridge(client) as bridge:
        assert watch(bridge).signals.echo_logprob_gap > 0.5


def test_a_key_is_asked_for_and_used(served_engine: Engine) -> None:
    with serve(served_engine, api_key="k") as locked:
        with Bridge(locked) as bridge:
            signals = watch(bridge).signals
        assert signals.echo_logprob_gap is None
        assert "give the server's --api-key" in signals.echo_refusal
        with Bridge(locked, Authorization="Bearer wrong") as bridge:
            assert "takes another key" in watch(bridge).signals.echo_refusal
        with Bridge(locked, Authorization="Bearer k") as bridge:
            assert watch(bridge).signals.echo_logprob_gap is not None


def test_requests_that_fail_for_memory_are_counted(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BudgetError("The GPU's memory ran out.")

    monkeypatch.setattr(Engine, "stream", fail)
    client.post("/v1/completions", model="demo", prompt=PROMPT)
    client.post("/v1/completions", model="demo", prompt=PROMPT)
    with Bridge(client) as bridge:
        assert watch(bridge).signals.failures["out_of_memory"] >= 2


def answers(**by_path: httpx.Response) -> httpx.Client:
    def answer(request: httpx.Request) -> httpx.Response:
        return by_path[request.url.path.strip("/")]

    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://other")


METRICS = "# TYPE moespeq:engine info\nmoespeq:engine_info 1.0\n"


@pytest.mark.parametrize(
    ("status", "severity"),
    [
        ({"status": "loading", "done_bytes": 1, "total_bytes": 9}, Severity.WARNING),
        ({"status": "unhealthy"}, Severity.PROBLEM),
    ],
)
def test_a_server_that_is_not_ready_is_told(status: dict[str, Any], severity: Severity) -> None:
    refusal = httpx.Response(503, json={"error": {"message": "The model is being loaded."}})
    health = httpx.Response(503, json=status)
    other = answers(health=health, metrics=httpx.Response(200, text=METRICS), **{"v1/models": refusal})
    watched = watch(other)
    assert watched.health.severity is severity
    assert "being loaded" in watched.signals.echo_refusal


def test_a_queue_that_is_too_long_is_not_waited_for() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            raise httpx.ReadTimeout("timed out")
        return httpx.Response(
            200, **({"text": METRICS} if "metrics" in request.url.path else {"json": {"status": "ok"}})
        )

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://busy") as busy:
        assert watch(busy).signals.echo_refusal == "a test request was not answered in 60 s"


@pytest.mark.parametrize(
    ("health", "metrics"),
    [
        (httpx.Response(200, text="hello"), httpx.Response(200, text=METRICS)),
        (httpx.Response(200, json=[]), httpx.Response(200, text=METRICS)),
        (httpx.Response(200, json={"status": "ok"}), httpx.Response(200, text="# TYPE a gauge\na 1\n")),
        (httpx.Response(200, json={"status": "ok"}), httpx.Response(200, text="<html>")),
    ],
)
def test_what_is_no_server_of_ours_is_refused(health: httpx.Response, metrics: httpx.Response) -> None:
    with pytest.raises(UsageError, match=r"^What answers at http://other is no moespeq server; check --server\.$"):
        watch(answers(health=health, metrics=metrics))


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1.0"])
def test_counters_that_cannot_be_are_refused(value: str) -> None:
    metrics = f"{METRICS}# TYPE moespeq:num_requests_waiting gauge\nmoespeq:num_requests_waiting {value}\n"
    lying = answers(health=httpx.Response(200, json={"status": "ok"}), metrics=httpx.Response(200, text=metrics))
    with pytest.raises(UsageError, match="of moespeq:num_requests_waiting, which cannot be"):
        watch(lying)


def test_an_answer_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_probe, "_TIMEOUT_S", 0.05)
    is_over = Event()

    def trickle() -> Iterator[bytes]:
        yield b"x"
        is_over.wait()

    with pytest.raises(UsageError, match=r"\(no whole answer in 0\.05 s\)"):
        watch(answers(health=httpx.Response(200, content=trickle())))
    is_over.set()


def test_an_answer_larger_than_any_of_ours_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_probe, "_MOST_BYTES", 1000)
    endless = httpx.Response(200, content=repeat(b"x" * 100))
    with pytest.raises(UsageError, match="an answer of more than 1000 bytes"):
        watch(answers(health=endless))


def test_only_a_server_of_this_machine_has_this_machines_facts() -> None:
    assert is_local("http://127.0.0.1:8000")
    assert is_local("http://[::1]:8000")
    assert not is_local("http://gpu-box:8000")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--server", "http://127.0.0.1:9"), "No server answers at http://127.0.0.1:9"),
        (("--server", f"http://{'a' * 70}.b"), f"No server answers at http://{'a' * 70}.b"),
        (("--server", "nonsense"), "No server answers at nonsense"),
        (("--server", "http://host:port"), "is no address of a server"),
        (("--run", "nothing.json"), "nothing.json cannot be read"),
        (("--run", "a", "--server", "b"), "give one of them"),
    ],
)
def test_what_cannot_be_looked_at_is_one_sentence(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    code, out, told = cli("doctor", "--device", "cpu", *arguments)
    assert (code, out) == (2, "")
    assert words in told
    assert told.count("\n") == 1


def test_the_command_looks_at_machine_and_model(cli: Cli, tiny_store: Path) -> None:
    code, out, told = cli("doctor", tiny_store, "--device", "cpu", "--json")
    found = json.loads(out)
    assert list(found["sections"]) == ["this machine", "test generation"]
    everything = [one for section in found["sections"].values() for one in section]
    assert [one["check"] for one in found["sections"]["test generation"]] == [
        "self-test: text",
        "self-test: KV cache",
        "self-test: base calibration",
        "self-test: draft",
    ]
    assert code == found["exit_code"]
    assert all(one["remedy"] for one in everything if one["severity"] in ("warning", "problem"))
    assert told == ""


def test_the_command_looks_at_a_run(cli: Cli, tiny_store: Path, tmp_path: Path) -> None:
    code, out, _ = cli("run", tiny_store, "-p", "ab", "-n", "24", "--k", "0", "--ignore-eos", "--json")
    assert code == 0
    path = tmp_path / "run.json"
    path.write_text(out)
    _, out, _ = cli("doctor", "--device", "cpu", "--run", path)
    assert "k = 0 was asked for" in out
    assert "verdict: " in out
    assert "test generation" not in out


def test_a_model_that_does_not_fit_is_a_finding(cli: Cli, tiny_store: Path) -> None:
    code, out, _ = cli("doctor", tiny_store, "--device", "cpu", "--device-memory", "1KiB")
    assert code == 2
    assert "--ctx-size." not in out, "doctor has no such option"
    (mend,) = (line for line in out.splitlines() if "moespeq plan" in line)
    command = mend[mend.index("moespeq plan") :]
    assert command.startswith(f"moespeq plan {tiny_store} --device cpu --device-memory 1KiB")
    code, out, _ = cli(*command.split()[1:])
    assert (code, "does not fit" in out) == (2, True), "it says what is missing"


def test_a_model_that_is_given_is_what_commands_name(cli: Cli, tiny_store: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    _, out, _ = cli("run", tiny_store, "-p", "ab", "-n", "8", "--k", "0", "--ignore-eos", "--json")
    path.write_text(out)
    assert "`moespeq doctor MODEL`" in cli("doctor", "--device", "cpu", "--run", path)[1]
    assert f"`moespeq doctor {tiny_store}`" in cli("doctor", tiny_store, "--device", "cpu", "--run", path)[1]
