"""`moespeq serve`: an OpenAI-compatible server of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moespeq.cli import options
from moespeq.cli.options import parse_k

if TYPE_CHECKING:
    from moespeq.decode.engine import Engine
    from moespeq.prepare import ProgressSink
    from moespeq.server.worker import WorkerState

__all__ = ["command"]

_PREFILL_ROWS = 512


def command(
    model: options.Model,
    *,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="MOESPEQ_API_KEY", help="Key that clients must send; by default none."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="What clients call the model; by default MODEL.")
    ] = None,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=1, help="Requests that may queue; more are refused with 429.")
    ] = 256,
    prefix_cache: Annotated[
        str,
        typer.Option("--prefix-cache", metavar="SIZE", help="Host memory for what prompts share; 0 keeps nothing."),
    ] = "1GiB",
    grace: Annotated[
        int, typer.Option("--grace", min=0, metavar="S", help="Seconds for answers to end after Ctrl-C or SIGTERM.")
    ] = 30,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors", metavar="ORIGIN", help="Let pages of this origin ask from a browser, * all; may be given again."
        ),
    ] = None,
    image_host: Annotated[
        list[str] | None,
        typer.Option(
            "--image-host",
            metavar="HOST",
            help="Fetch images that requests name by an address of this host; * is every public one; may be given "
            "again. By default images come as data URLs only.",
        ),
    ] = None,
    image_limit: Annotated[
        str, typer.Option("--image-limit", metavar="SIZE", help="The most that is fetched of one image.")
    ] = "8MiB",
    image_timeout: Annotated[
        int, typer.Option("--image-timeout", min=1, metavar="S", help="Seconds that fetching an image may take.")
    ] = 10,
    prefill_rows: Annotated[
        int,
        typer.Option(
            "--prefill-rows", min=1, help="Prompt tokens that one pass takes, and the most that an image may take."
        ),
    ] = _PREFILL_ROWS,
    k: options.K = "auto",
    k_min: options.KMin = 0,
    itl_budget: options.ItlBudget = None,
    lookahead: options.Lookahead = None,
    rows: options.Rows = None,
    ctx_size: options.CtxSize = None,
    device: options.Device = "auto",
    device_memory: options.DeviceMemory = None,
    base_memory: options.BaseMemory = None,
    host_memory: options.HostMemory = None,
    threads: options.Threads = None,
    link_bandwidth: options.LinkBandwidth = None,
    convert_to: options.ConvertTo = None,
    json: options.Json = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's API.

    One request is answered at a time, the others queue. Ctrl-C or SIGTERM lets answers end, then closes the engine.

    Example: moespeq serve allenai/OLMoE-1B-7B-0924-Instruct --port 8000
    """
    from moespeq.cli.console import err, print_json, progress_bar, replies, start_torch
    from moespeq.cli.refusals import refuse_at_once
    from moespeq.config import parse_bytes
    from moespeq.server.listening import listen

    loading: dict[str, Any] = {
        "k": parse_k(k),
        "k_min": k_min,
        "itl_budget_ms": itl_budget,
        "lookahead_tok": lookahead,
        "rows": rows,
        "ctx_size": ctx_size,
        "device": device,
        "device_memory": device_memory,
        "base_memory": base_memory,
        "host_memory": host_memory,
        "threads": threads,
        "link_bytes_per_s": link_bandwidth,
        "convert_to": convert_to,
        "prefill_rows": prefill_rows,
        "prefix_cache": prefix_cache,
    }
    refuse_at_once(model, loading)
    most_image_bytes = parse_bytes(image_limit)
    listening = listen(host, port)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    start_torch()
    from moespeq.api import load
    from moespeq.server.image_fetch import ImageFetcher
    from moespeq.server.metrics import ServerMetrics
    from moespeq.server.service import LoadProgress, Service
    from moespeq.server.serving import HttpServer
    from moespeq.server.worker import EngineWorker, WorkerState
    from moespeq.transfer.clock import MonotonicClock

    progress, clock = LoadProgress(), MonotonicClock()

    def open_engine() -> Engine:
        with progress_bar() as bar:
            return load(model, progress=_Both(progress, bar), **loading)

    def hear(state: WorkerState) -> None:
        if state is WorkerState.FAILED:
            server.stop()
        if state is WorkerState.READY:
            worker.engine.show(service.history)
            if json:
                print_json({"url": url, "model": service.model_name})
            else:
                replies.print(f"{service.model_name} is served at {url}/v1; its live page is {url}/")

    worker = EngineWorker(open_engine, max_waiting=max_waiting, clock=clock, on_state=hear)
    metrics = ServerMetrics(lambda: worker.num_running, lambda: worker.num_waiting)
    fetch = ImageFetcher(image_host or (), most_bytes=most_image_bytes, timeout_s=image_timeout, clock=clock)
    name = served_model_name or model
    service = Service(worker, metrics, clock, name, api_key, progress, fetch if image_host else None)
    server = HttpServer(service, grace_s=grace, cors_origins=cors or ())
    err.print(f"loading {service.model_name}; {url}/ shows how far")
    server.run(listening)


class _Both:
    """A ProgressSink that tells two."""

    def __init__(self, *sinks: ProgressSink) -> None:
        self._sinks = sinks

    def update(self, done_bytes: int, total_bytes: int, what: str) -> None:
        for sink in self._sinks:
            sink.update(done_bytes, total_bytes, what)
