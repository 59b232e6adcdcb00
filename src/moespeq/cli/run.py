"""`moespeq run`: one prompt, streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from moespeq.cli import options
from moespeq.cli.options import parse_k

if TYPE_CHECKING:
    from moespeq.decode.stream import GenerationStream

__all__ = ["command"]


def command(
    model: options.Model,
    prompt: options.Prompt,
    *,
    chat: options.Chat = False,
    system: options.System = None,
    image: options.Images = None,
    max_new_tokens: options.MaxNewTokens = None,
    min_new_tokens: options.MinNewTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            metavar="coupled|rejection",
            help="How sampled drafts are accepted: coupled by default; rejection accepts more at high temperature, and "
            "the text then depends on k.",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    stop: options.Stop = None,
    seed: options.Seed = None,
    ignore_eos: options.IgnoreEos = False,
    k: options.K = "auto",
    k_min: options.KMin = 0,
    itl_budget: options.ItlBudget = None,
    lookahead: options.Lookahead = None,
    rows: options.Rows = None,
    ctx_size: options.CtxSize = None,
    prefill_rows: options.PrefillRows = None,
    device: options.Device = "auto",
    device_memory: options.DeviceMemory = None,
    base_memory: options.BaseMemory = None,
    host_memory: options.HostMemory = None,
    threads: options.Threads = None,
    link_bandwidth: options.LinkBandwidth = None,
    convert_to: options.ConvertTo = None,
    mode: options.Mode = "speculative",
    json: options.Json = False,
) -> None:
    """Answer one prompt, streamed as rounds commit tokens.

    A checkpoint is prepared into the cache the first time. Ctrl-C ends the answer after the running round and keeps it.

    Example: moespeq run allenai/OLMoE-1B-7B-0924 -p "The capital of France is" -n 16
    """
    from moespeq.cli.console import err, print_json, progress_bar, start_torch, text_stream
    from moespeq.cli.generation_text import rounds_text, speed_text
    from moespeq.cli.prompts import read_images, read_prompt, request_of
    from moespeq.cli.refusals import refuse_at_once, refuse_early
    from moespeq.config import format_count

    loading: dict[str, Any] = {
        "k": parse_k(k),
        "k_min": k_min,
        "itl_budget_ms": itl_budget,
        "lookahead_tok": lookahead,
        "rows": rows,
        "ctx_size": ctx_size,
        "prefill_rows": prefill_rows,
        "device": device,
        "device_memory": device_memory,
        "base_memory": base_memory,
        "host_memory": host_memory,
        "threads": threads,
        "link_bytes_per_s": link_bandwidth,
        "convert_to": convert_to,
        "mode": mode,
    }
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "acceptance": acceptance,
        "stop": tuple(stop) if stop else None,
        "seed": seed,
        "ignore_eos": ignore_eos or None,
    }
    refuse_at_once(model, loading)
    text, images = read_prompt(prompt), read_images(image or [])
    start_torch()
    from moespeq.api import load

    has_chat = chat or bool(system or images)
    refuse_early(model, loading, sampling, chat=(system or "") if has_chat else None, images=images)
    with progress_bar() as bar:
        engine = load(model, progress=bar, **loading)
    with engine:
        stream = engine.stream(request_of(engine, text, chat=chat, system=system, images=images), **sampling)
        was_interrupted = _show(stream, text_stream(has_json=json))
        stats = stream.result.stats
        if json:
            print_json(
                {
                    **stream.result.to_json(),
                    "device": engine.options.device,
                    "records": engine.options.records,
                    "passes": dict(engine.facts),
                }
            )
        else:
            err.print(
                f"{format_count(len(stream.result.tokens), 'token')} ({stream.result.finish_reason.value}), "
                f"{speed_text(stats.tokens_per_s)} after {stats.ttft_s:.2f} s; {rounds_text(stats)}; "
                f"{stats.hits} hits, {stats.late} late, {stats.misses} misses; seed {stats.seed}",
                style="dim",
            )
    if was_interrupted:
        raise KeyboardInterrupt("what is shown of the answer is what was committed.")


def _show(stream: GenerationStream, target: TextIO) -> bool:
    """Write pieces as they come; Ctrl-C ends the generation after the running round. Returns whether it did."""
    from moespeq.cli.console import err

    was_interrupted = False
    with err.status("reading the prompt") as waiting:
        while True:
            try:
                for piece in stream:
                    waiting.stop()
                    target.write(piece.text)
                    target.flush()
                target.write("\n")
                return was_interrupted
            except KeyboardInterrupt:
                was_interrupted = True
                stream.cancel()
