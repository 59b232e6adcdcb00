"""Does the server stay what it is under load? Many clients, some of which leave at random, on one served model.

    python benchmarks/serve_load.py [--model FOLDER] [--clients 64] [--seconds 180] [--leave 0.2] [--max-waiting 48]

Starts `moespeq serve` on a free port, asks every question once by one client alone, then lets the clients ask them at
random, streamed or whole, while a share of them leaves at a random moment. At the end, and for the exit code: every
complete text is the lone client's, every refusal was 429 or 503 with Retry-After, the queue is empty and the engine
idle, threads are no more than the pool adds, and memory did not grow from the first third on. Without --model it serves
the packaged demo model. Kind: e2e; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import psutil

from moespeq.demo.assets import MODEL_FOLDER

NAME = "load"
MOST_GROWN_BYTES = 64 << 20
MOST_THREADS_MORE = 40  # the pool in which requests are encoded
ASKED_TWICE = {429, 503}
ENDED_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """How much, for how long. leave: the share of requests whose client leaves. max_waiting: too few for all."""

    clients: int = 64
    seconds: float = 180.0
    leave: float = 0.2
    max_tokens: int = 8
    max_waiting: int = 48
    seed: int = 1


@dataclass(slots=True)
class Outcome:
    """What happened to the requests, and what the server took meanwhile."""

    counts: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    most_waiting: int = 0
    is_idle: bool = False

    @property
    def grown_bytes(self) -> int:
        """From the first third, when all is warm, to the end: the largest of each."""
        third = max(1, len(self.rss_bytes) // 3)
        return max(self.rss_bytes[-third:]) - max(self.rss_bytes[:third])

    @property
    def failures(self) -> list[str]:
        """What must not be."""
        allowed = {"same", "left", "refused"}
        found = [f"{number} x {what}" for what, number in self.counts.items() if what not in allowed]
        if not self.counts["same"]:
            found.append("no complete answer")
        if not self.is_idle:
            found.append("the engine or its queue is not idle at the end")
        if self.threads[-1] > self.threads[0] + MOST_THREADS_MORE:
            found.append(f"{self.threads[-1]} threads, {self.threads[0]} at the start")
        if self.grown_bytes > MOST_GROWN_BYTES:
            found.append(f"memory grew by {self.grown_bytes >> 20} MiB")
        return found

    def to_json(self) -> dict[str, Any]:
        ttft_s = sorted(self.ttft_s) or [0.0]
        return {
            **self.counts,
            "ttft_s_median": round(ttft_s[len(ttft_s) // 2], 3),
            "rss_mib": [bytes_ >> 20 for bytes_ in (self.rss_bytes[0], self.rss_bytes[-1])],
            "threads": [self.threads[0], self.threads[-1]],
            "most_waiting": self.most_waiting,
            "failures": self.failures,
        }


def questions() -> list[dict[str, Any]]:
    """Bodies of requests that differ in all that changes a text."""
    sampled = ({}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.0, "top_p": 0.9, "seed": 2, "n": 2})
    return [
        {"prompt": f"Question: Tom has {apples} apples.\nAnswer:", **sampling}
        for apples in range(2)
        for sampling in sampled
    ]


class Clients:
    """All of one server's. process: the server's, to be watched."""

    def __init__(self, url: str, process: psutil.Process, load: Load) -> None:
        self._load, self._process, self._random = load, process, random.Random(load.seed)
        limits = httpx.Limits(max_connections=load.clients + 2)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)
        self._expected: dict[str, list[str]] = {}
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Ask everything alone, then together, then wait until the server is idle."""
        asked = questions()
        async with self._http:
            for body in asked:
                answer = await self._http.post("/v1/completions", json=self._whole(body))
                answer.raise_for_status()
                self._expected[json.dumps(body)] = [choice["text"] for choice in answer.json()["choices"]]
            end_s = time.monotonic() + self._load.seconds
            await self._watch()
            watcher = asyncio.create_task(self._keep_watching())
            await asyncio.gather(*(self._client(asked, end_s) for _ in range(self._load.clients)))
            watcher.cancel()
            await self._settle()
        return self.outcome

    async def _client(self, asked: Sequence[dict[str, Any]], end_s: float) -> None:
        while time.monotonic() < end_s:
            body, leaves = self._random.choice(asked), self._random.random() < self._load.leave
            is_streamed = self._random.random() < 0.5
            asking = self._ask(self._whole(body) | {"stream": is_streamed}, self._expected[json.dumps(body)])
            try:
                counted = await asyncio.wait_for(asking, self._random.random() * 4 if leaves else None)
            except TimeoutError:
                counted = "left"
            except httpx.HTTPError as error:
                counted = type(error).__name__
            self.outcome.counts[counted] += 1

    async def _ask(self, body: dict[str, Any], expected: list[str]) -> str:
        begin_s, texts = time.monotonic(), [""] * len(expected)
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code in ASKED_TWICE:
                await asyncio.sleep(float(answer.headers["Retry-After"]))
                return "refused"
            if answer.status_code != 200:
                return f"status {answer.status_code}"
            if not body["stream"]:
                choices = json.loads(await answer.aread())["choices"]
                return "same" if [choice["text"] for choice in choices] == expected else "another text"
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if not any(texts):
                    self.outcome.ttft_s.append(time.monotonic() - begin_s)
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
        return "same" if texts == expected else "another text"

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": NAME, "max_tokens": self._load.max_tokens, **body}

    async def _keep_watching(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self._watch()

    async def _watch(self) -> None:
        busy = await self._busy()
        self.outcome.most_waiting = max(self.outcome.most_waiting, busy)
        self.outcome.rss_bytes.append(self._process.memory_info().rss)
        self.outcome.threads.append(self._process.num_threads())

    async def _settle(self) -> None:
        deadline_s = time.monotonic() + ENDED_S
        while await self._busy() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.1)
        await self._watch()
        self.outcome.is_idle = not await self._busy()

    async def _busy(self) -> int:
        """Requests that run or wait."""
        lines = (await self._http.get("/metrics")).text.splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("moespeq:num_requests_"))


def serve_and_load(model: str, load: Load) -> Outcome:
    """Start a server, load it, end it."""
    command = [sys.executable, "-m", "moespeq", "serve", model, "--port", "0", "--json", "--served-model-name", NAME]
    command += ["--ctx-size", "256", "--max-waiting", str(load.max_waiting), "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            return asyncio.run(Clients(url, psutil.Process(server.pid), load).run())
        finally:
            server.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL_FOLDER))
    for name, default in asdict(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = parser.parse_args()
    outcome = serve_and_load(given.model, Load(**{name: getattr(given, name) for name in asdict(Load())}))
    for name, value in outcome.to_json().items():
        print(f"{name:16} {value}")
    print(json.dumps(outcome.to_json()))
    return int(bool(outcome.failures))


if __name__ == "__main__":
    sys.exit(main())
