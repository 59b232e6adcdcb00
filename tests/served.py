"""A server in this process: the demo model with a chat template, and a client that calls the application directly."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from moespeq.decode.engine import Engine
from moespeq.demo.assets import MODEL_FOLDER
from moespeq.server.app import create_app
from moespeq.server.metrics import ServerMetrics
from moespeq.server.service import Service
from moespeq.server.worker import EngineWorker
from moespeq.transfer.clock import MonotonicClock

__all__ = ["MODEL", "PROMPT", "QWEN_TEMPLATE", "Client", "chat_model", "chunks_of", "serve"]

MODEL = "demo"
PROMPT = "Question: Tom has 5 apples.\nAnswer:"
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}Answer:"
QWEN_TEMPLATE = """\
{%- if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}assistant:{% if enable_thinking %}<think>
{% endif %}"""
"""Tools and reasoning as Qwen's templates write them, in few words."""
_WAIT_S = 60.0


def chat_model(folder: Path, template: str = _TEMPLATE) -> Path:
    """The demo model with a chat template, copied to `folder`."""
    shutil.copytree(MODEL_FOLDER, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@contextmanager
def serve(
    engine: Engine, *, max_waiting: int = 8, api_key: str | None = None, **service_fields: Any
) -> Iterator[Client]:
    """A client of a service whose worker has `engine`, which stays open."""
    settled, clock = threading.Event(), MonotonicClock()
    worker = EngineWorker(
        lambda: nullcontext(engine), max_waiting=max_waiting, clock=clock, on_state=lambda _: settled.set()
    )
    metrics = ServerMetrics(lambda: worker.num_running, lambda: worker.num_waiting)
    service = Service(worker, metrics, clock, MODEL, api_key, **service_fields)
    engine.show(service.history)
    worker.start()
    assert settled.wait(_WAIT_S)
    yield Client(service, create_app(service))
    worker.close()


class Client:
    """Calls one application; the worker's life is the caller's."""

    def __init__(self, service: Service, app: FastAPI) -> None:
        self.service, self.app = service, app

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self._call("GET", path, headers)

    def head(self, path: str) -> httpx.Response:
        return self._call("HEAD", path, {})

    def options(self, path: str, **headers: str) -> httpx.Response:
        return self._call("OPTIONS", path, headers)

    def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return self._call("POST", path, headers or {}, body)

    def send(self, path: str, content: bytes) -> httpx.Response:
        """A body that may be no JSON."""
        return self._call("POST", path, {}, content)

    def complete(self, prompt: Any = PROMPT, **body: Any) -> dict[str, Any]:
        """The JSON of a completion that must succeed."""
        answer = self.post("/v1/completions", model=MODEL, prompt=prompt, **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def text(self, prompt: Any = PROMPT, **body: Any) -> str:
        return str(self.complete(prompt, **body)["choices"][0]["text"])

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        return chunks_of(self.post(path, model=MODEL, stream=True, **body))

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = self.get("/metrics").text.splitlines()
        values = [
            line.rpartition(" ")[2] for line in lines if line.startswith((f"moespeq:{name} ", f"moespeq:{name}{{"))
        ]
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def _call(self, method: str, path: str, headers: dict[str, str], body: Any = None) -> httpx.Response:
        is_raw = body is None or isinstance(body, bytes)
        content = body if is_raw else json.dumps(body)  # as ASCII: half a character arrives as one
        headers = {"Content-Type": "application/json", **headers}

        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, headers=headers, content=content)

        return asyncio.run(asyncio.wait_for(call(), _WAIT_S))


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
