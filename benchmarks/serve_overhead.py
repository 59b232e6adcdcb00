"""What the server adds to an engine: milliseconds a token, and until a piece that is ready is read by a client.

    python benchmarks/serve_overhead.py [--tokens 3000]

A real server on a local socket, over an engine that takes no time: each token is a round of its own, counted,
formatted, sent as a server-sent event and read. Client and server share this process and its lock, so what is printed
is more than what the server takes; the processor's time is also right on a busy machine. A piece's way to the client:
from the moment the engine's thread has it to the moment it was read, between two pauses. Kind: micro; the last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

from moespeq.server.answer_reader import AnswerReader
from moespeq.server.generating import ChoiceEnd, ChoicePiece, GenerationTask
from moespeq.server.listening import listen
from moespeq.server.metrics import ServerMetrics
from moespeq.server.service import Service
from moespeq.server.styles import ChatStyle
from moespeq.server.worker import EngineWorker, WorkerState
from moespeq.transfer.clock import MonotonicClock
from moespeq.types import FinishReason, StepReport

ROUND = StepReport(k=0, accepted=0, committed=1, hits=1, late=0, misses=0, draft_s=0.0, verify_s=1e-3, stall_s=0.0)
NUM_PAUSED, PAUSE_S = 50, 0.02


@dataclass(frozen=True)
class TimedTask(GenerationTask):
    """Pieces whose text is when they were made; `pause_s` before each."""

    num_tok: int = 0
    pause_s: float = 0.0

    def turns(self, metrics: ServerMetrics, *_: Any) -> Iterator[Any]:
        yield lambda engine: self._pieces(metrics)

    def _pieces(self, metrics: ServerMetrics) -> Iterator[Any]:
        for _ in range(self.num_tok):
            time.sleep(self.pause_s)
            metrics.observe_round(ROUND, 1, 1e-3)
            yield ChoicePiece(0, repr(time.monotonic()), (5,), ())
        yield ChoiceEnd(0, FinishReason.LENGTH)


def application(service: Service, tasks: dict[str, TimedTask]) -> FastAPI:
    app = FastAPI()

    @app.get("/{name}")
    async def stream(request: Request, name: str) -> Response:
        style = ChatStyle(None, lambda: AnswerReader(None), has_logprobs=False)  # type: ignore[arg-type]
        return await service.reply(request, tasks[name], style, is_streamed=True, has_usage=False)

    return app


def delays_s(url: str) -> list[float]:
    """Read a stream; how old each piece was when it came."""
    delays = []
    with httpx.stream("GET", url) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and (text := json.loads(line[6:])["choices"][0]["delta"].get("content")):
                delays.append(time.monotonic() - float(text))
    return delays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3000)
    num_tok = parser.parse_args().tokens
    ready, clock = threading.Event(), MonotonicClock()
    worker: EngineWorker[Any] = EngineWorker(
        lambda: nullcontext(object()), max_waiting=1, clock=clock, on_state=lambda _: ready.set()
    )
    worker.start()
    assert ready.wait()
    assert worker.state is WorkerState.READY
    service = Service(worker, ServerMetrics(lambda: 0, lambda: 0), clock, "model")
    tasks = {
        "fast": TimedTask(((1,),), {}, num_tok=num_tok),
        "paused": TimedTask(((1,),), {}, num_tok=NUM_PAUSED, pause_s=PAUSE_S),
    }
    listening = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(application(service, tasks), log_level="error"))
    threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True).start()
    delays_s(f"{url}/paused")  # warm
    begin_s, begin_busy_s = time.monotonic(), time.process_time()
    count = len(delays_s(f"{url}/fast"))
    per_token_ms, busy_ms = (
        (end_s - start_s) / count * 1e3
        for end_s, start_s in ((time.monotonic(), begin_s), (time.process_time(), begin_busy_s))
    )
    delays_ms = sorted(delay_s * 1e3 for delay_s in delays_s(f"{url}/paused"))
    result = {
        "tokens": count,
        "per_token_ms": round(per_token_ms, 3),
        "processor_ms_a_token": round(busy_ms, 3),
        "piece_to_client_ms_median": round(statistics.median(delays_ms), 3),
        "piece_to_client_ms_worst": round(delays_ms[-1], 3),
    }
    for name, value in result.items():
        print(f"{name:26} {value}")
    print(json.dumps(result))
    server.should_exit = True
    worker.close()


if __name__ == "__main__":
    main()
