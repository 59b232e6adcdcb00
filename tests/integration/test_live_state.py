"""The page's files and the state it shows: what the engine measured, nothing of what was asked, and only to who may."""

from __future__ import annotations

import base64
import logging
import re
from importlib import resources
from typing import Any

import pytest

from moespeq.cli.logs import configure_logs
from moespeq.decode.engine import Engine
from moespeq.server.serving import HttpServer
from moespeq.server.worker import WorkerState
from served import PROMPT, Client, serve

PAGE = resources.files("moespeq.server") / "page"
FILES = sorted(file.name for file in PAGE.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]


def live(client: Client, **asked: int) -> dict[str, Any]:
    query = "&".join(f"{name}={value}" for name, value in asked.items())
    answer = client.get(f"/live?{query}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def passes(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(state["columns"], row, strict=True)) for row in state["passes"]]


def total(rows: list[dict[str, Any]], name: str) -> int:
    return sum(row[name] for row in rows)


def test_the_passes_are_those_that_the_engine_measured(client: Client, served_engine: Engine) -> None:
    stats = served_engine.generate(PROMPT, max_new_tokens=24, ignore_eos=True).stats
    before = live(client)
    last = before["passes"][-1][0]
    client.complete(max_tokens=24, ignore_eos=True)
    state = live(client, since=last)
    prefill, *rounds = passes(state)
    assert prefill["is_prefill"] == 1
    assert [row["number"] for row in (prefill, *rounds)] == list(range(last + 1, last + 2 + len(rounds)))
    assert not any(row["is_prefill"] for row in rounds)
    assert [row["k"] for row in rounds] == list(stats.k_per_round)
    assert [row["accepted"] for row in rounds] == list(stats.accepted_per_round)
    assert total(rounds, "committed") == stats.committed
    assert all(0 <= row["draft_s"] + row["verify_s"] <= row["end_s"] - row["begin_s"] + 1e-4 for row in rounds)
    asked = sum(total([prefill, *rounds], name) for name in ("hits", "late", "misses"))
    assert asked == stats.hits + stats.late + stats.misses
    assert state["totals"]["committed"] - before["totals"]["committed"] == stats.committed + 1


def test_spans_lie_within_their_pass_and_do_not_overlap(client: Client) -> None:
    client.complete(max_tokens=8)
    for spans in live(client)["spans"]:
        for shares in (spans["copies"], spans["waits"]):
            assert shares == sorted(shares)
            assert len(shares) % 2 == 0
            assert all(0 <= share <= 1 for share in shares)


def test_the_experts_are_those_with_slots_and_come_once(served_engine: Engine) -> None:
    with serve(served_engine) as client:  # a history of its own looks at once
        client.complete(max_tokens=1)
        state = live(client)
        experts = state["experts"]
        levels = base64.b64decode(experts["levels"])
        cache = served_engine._parts.residency.cache
        assert {index for index, level in enumerate(levels) if level & 0x80} == set(cache.resident)
        assert len(levels) == experts["num_layers"] * experts["num_experts"] == len(cache.record_bytes)
        assert experts["num_resident"] == len(cache.resident)
        assert max(level & 0x7F for level in levels) == 0x7F
        assert "experts" not in live(client, experts_since=experts["number"])


def test_memory_is_the_plans(client: Client, served_engine: Engine) -> None:
    told, plan = live(client)["engine"], served_engine.plan
    assert sum(told["device_bytes"].values()) == plan.total_bytes
    assert told["device_bytes"]["slots"] == told["num_slots"] * told["slot_bytes"]
    assert told["context_tok"] == 128
    assert told["has_chat"] is True


def test_the_state_says_nothing_of_prompts_or_answers(client: Client) -> None:
    words = ["zebra", "quartz"]
    body = client.complete(f"Question: {words[0]} {words[1]}\nAnswer:", max_tokens=6)
    state = client.get("/live").text
    assert not any(word in state for word in [*words, "Question", body["id"], body["choices"][0]["text"]])
    keys = {"start", "version", "model", "status", "running", "waiting", "totals", "columns", "passes", "spans"}
    assert set(live(client)) == keys | {"engine", "experts"}


def test_files_are_for_everybody_and_the_state_for_who_has_the_key(served_engine: Engine) -> None:
    with serve(served_engine, api_key="secret") as client:
        assert client.get("/").status_code == 200
        assert client.get("/page/main.js").status_code == 200
        assert client.get("/live").status_code == 401
        assert client.get("/live", Authorization="Bearer secret").status_code == 200


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_as_it_is_with_its_policy(client: Client, name: str) -> None:
    answer = client.get(f"/page/{name}")
    assert answer.content == (PAGE / name).read_bytes()
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_the_access_log_is_of_requests_and_not_of_looks(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", as_json=False)
    HttpServer(client.service, grace_s=1, cors_origins=())  # what its access log leaves out
    for path in ("/live?since=3&experts_since=1", "/v1/models"):
        logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", path, "1.1", 200)
    logged = capsys.readouterr().err
    assert "/v1/models" in logged
    assert "/live" not in logged


def test_the_first_page_is_the_index(client: Client) -> None:
    answer = client.get("/")
    assert answer.headers["Content-Type"].startswith("text/html")
    assert answer.content == (PAGE / "index.html").read_bytes()


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fpage_routes.py", "%2e%2e/history.py", "index.html/.."])
def test_nothing_else_is_served(client: Client, name: str) -> None:
    answer = client.get(f"/page/{name}")
    assert answer.status_code == 404 or answer.content == (PAGE / "index.html").read_bytes()


def test_no_file_asks_another_host_or_writes_markup() -> None:
    for name in FILES:
        text = (PAGE / name).read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", text), name
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|<script(?! type=\"module\" src)|\son\w+=|\sstyle=", html)
    assert all(
        f"{name}" in html or any(f"./{name}" in (PAGE / other).read_text() for other in SCRIPTS) for name in SCRIPTS
    )


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


TEXT = [("ink", "card"), ("ink", "ground"), ("dim", "card"), ("dim", "ground"), ("on-accent", "accent")]
TEXT += [(kind, f"{kind}-ground") for kind in ("good", "wait", "bad")]
LINES = ["draft", "verify", "stall", "copy", "accent", "focus"]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_have_the_contrast_that_wcag_asks_for(theme: int) -> None:
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", (PAGE / "style.css").read_text())
    colours = dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", blocks[theme]))
    for text, ground in TEXT:
        assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for line in LINES:
        assert _contrast(colours[line], colours["card"]) >= 3, line


def test_a_server_that_is_loading_says_so(client: Client) -> None:
    worker = client.service.worker
    client.service.progress.update(3, 8, "experts")
    worker._state = WorkerState.LOADING
    try:
        state = live(client)
    finally:
        worker._state = WorkerState.READY
    assert state["status"] == "loading"
    assert state["loading"] == {"what": "experts", "done_bytes": 3, "total_bytes": 8}
    assert "engine" not in state


def test_an_engine_that_fails_again_and_again_is_said_to(client: Client) -> None:
    client.service.worker._num_faults, before = 3, client.service.worker._num_faults
    try:
        assert live(client)["status"] == "unhealthy"
    finally:
        client.service.worker._num_faults = before
