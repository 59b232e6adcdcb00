"""`moespeq chat`: a conversation at the terminal, or a line of standard input at a time."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moespeq.cli import options
from moespeq.cli.options import parse_k

if TYPE_CHECKING:
    from moespeq.decode.generation import GenerationResult

__all__ = ["command"]

EXIT_FAILED = 2


def command(
    model: options.Model,
    *,
    system: Annotated[
        str | None, typer.Option("--system", help="System message.", rich_help_panel=options.PROMPT)
    ] = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    stop: options.Stop = None,
    seed: options.Seed = None,
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
    json: options.Json = False,
) -> None:
    """Talk with a model by its chat template.

    A turn prefills only what is new; /help lists what can be typed besides questions. Ctrl-C ends an answer, Ctrl-D the
    chat. Standard input may be a file: each line is a question or a command.

    Example: moespeq chat allenai/OLMoE-1B-7B-0924-Instruct --temperature 0.7
    """
    from moespeq.cli.console import err, print_json, progress_bar, replies, start_torch, text_stream
    from moespeq.cli.refusals import refuse_at_once, refuse_early

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
    }
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": tuple(stop) if stop else None,
        "seed": seed,
    }
    refuse_at_once(model, loading)
    start_torch()
    from moespeq.api import load
    from moespeq.cli.chat_commands import ChatCommands
    from moespeq.cli.chat_session import ChatSession, read_line
    from moespeq.decode.conversation import Conversation

    refuse_early(model, loading, sampling, chat=system or "")
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` its keys
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is refused with its place
    with progress_bar() as bar:
        engine = load(model, progress=bar, **loading)
    with engine:
        conversation = Conversation(engine, system=system, **sampling)

        def on_answer(result: GenerationResult) -> None:
            if json:
                print_json({**result.to_json(), "messages": conversation.messages})

        waiting = err.status("reading what is new")
        session = ChatSession(
            conversation,
            ChatCommands(conversation, engine.manifest.name),
            read=lambda: read_line("> "),
            answers=text_stream(has_json=json),
            say=lambda line: replies.print(line, style="dim"),
            on_answer=on_answer,
            wait=lambda is_waiting: waiting.start() if is_waiting else waiting.stop(),
        )
        if sys.stdin.isatty():
            err.print(f"{engine.manifest.name}, {engine.plan.context_tok} tokens of context; /help", style="dim")
        num_failed = session.run()
    if num_failed and not sys.stdin.isatty():
        raise typer.Exit(EXIT_FAILED)
