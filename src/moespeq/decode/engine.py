"""The engine people hold: a loaded model that generates, one sequence at a time.

Owns the life cycle (threads, files, memory) and the public calls; the loop underneath owns exactness. One thread at a
time may call; a second generation while one runs is refused, not queued.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch

from moespeq.config import LoadOptions, nearest_name
from moespeq.decode.engine_parts import EngineParts
from moespeq.decode.failures import cleaned_up
from moespeq.decode.generation import Generation, GenerationResult, TokenSink
from moespeq.decode.interrupts import InterruptShield
from moespeq.decode.live_tokens import Reuse, check_reuse
from moespeq.decode.logprobs import TokenLogprob, token_logprobs
from moespeq.decode.observer import Observer
from moespeq.decode.params import SamplingParams, end_token_ids
from moespeq.decode.prompt import Prompt, prompt_tokens
from moespeq.decode.prompt_rows import PromptRows
from moespeq.decode.sampling import Sampler
from moespeq.decode.spectator import Spectator
from moespeq.decode.stream import GenerationStream
from moespeq.decode.text import text_stream
from moespeq.errors import UsageError
from moespeq.model.chat_prompt import chat_prompt
from moespeq.model.image_reader import ImageReader
from moespeq.model.images import ImagePrompt
from moespeq.model.tokenizer import Tokenizer
from moespeq.plan import MemoryPlan
from moespeq.store import Manifest
from moespeq.types import HostFill

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["Engine", "Prompt"]

_CLOSED = "The engine is closed; load it again."
_BUSY = "The engine is generating already, one sequence at a time; finish or close that one first."
_RETUNABLE = ("k", "prefetch", "lookahead_tok", "eviction", "link_bytes_per_s")


class Engine:
    """A context manager; `close` releases everything."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._options = parts.options
        self._busy = threading.Lock()
        self._running: weakref.ref[GenerationStream] | None = None
        self._is_closed = False
        # Called once, by `close` or when the engine is dropped without it.
        self._release = weakref.finalize(self, parts.close)
        self._release.atexit = False

    @property
    def manifest(self) -> Manifest:
        """What the store says of the model."""
        return self._parts.manifest

    @property
    def plan(self) -> MemoryPlan:
        """Every byte by purpose."""
        return self._parts.plan

    @property
    def options(self) -> LoadOptions:
        """The options it runs with: those it was loaded with, and what `retune` changed."""
        return self._options

    @property
    def record_bytes(self) -> Sequence[int]:
        """What the link carries now for each expert: all of the first MoE layer, then of the next."""
        return tuple(self._parts.residency.cache.record_bytes)

    @property
    def facts(self) -> Mapping[str, str]:
        """How draft, verify and prefill run: as graphs, or eagerly and why."""
        return MappingProxyType(dict(self._parts.facts))

    @property
    def host_fill(self) -> HostFill:
        """How far the background load of host memory is; generating needs not wait for it."""
        return self._parts.host_fill()

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises UsageError where it has none."""
        if self._parts.tokenizer is None:
            raise UsageError("This checkpoint has no tokenizer; give the prompt as token ids.")
        return self._parts.tokenizer

    @property
    def images(self) -> ImageReader:
        """Reads images for prompts. Raises UsageError where the model takes none."""
        reader = self._parts.images
        if reader is None:
            raise UsageError("This checkpoint has no tokenizer, which prompts with images need; leave them out.")
        reader.check()
        return reader

    @property
    def generation_config(self) -> GenerationConfig:
        """The checkpoint's own defaults."""
        return self._parts.generation_config

    @property
    def vocab_size(self) -> int:
        """Width of the logits; a tokenizer may know fewer tokens."""
        return self._parts.vocab_size

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model underneath, its experts elsewhere."""
        return self._parts.runner.model

    def sampling_params(self, **sampling: Any) -> SamplingParams:
        """`sampling` with every default resolved: the checkpoint's settings, and all tokens that end its texts."""
        of_tokenizer = None if self._parts.tokenizer is None else self._parts.tokenizer.eos_token_id
        ends = end_token_ids(self.generation_config, of_tokenizer, self.vocab_size)
        given = {name: value for name, value in sampling.items() if value is not None}
        return SamplingParams.from_generation_config(self.generation_config, **{"eos_token_ids": ends, **given})

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokens of `prompt`, checked. Raises PromptError where it is empty or leaves the answer no room."""
        vocab_size, context_tok = self._parts.vocab_size, self.plan.context_tok
        return prompt_tokens(
            prompt, lambda text: self.tokenizer.encode(text), vocab_size=vocab_size, context_tok=context_tok
        )

    def generate(self, prompt: Prompt, **sampling: Any) -> GenerationResult:
        """The whole answer to `prompt` (text or token ids); `sampling` are the fields of SamplingParams.

        Raises PromptError for an empty or too long prompt, UsageError for a wrong option.
        """
        stream = self.stream(prompt, **sampling)
        for _ in stream:
            pass
        return stream.result

    def chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> GenerationResult:
        """The answer to a conversation of {"role", "content"}, by the model's chat template; see `encode_chat`."""
        return self.generate(self.encode_chat(messages), **sampling)

    def encode_chat(self, messages: Sequence[dict[str, Any]], **rendering: Any) -> list[int] | ImagePrompt:
        """The prompt of a conversation. A content is text, or a list of parts: {"type": "text", "text"} and
        {"type": "image", "image"}, what `images.read` made of a file. `rendering`: as for `Tokenizer.encode_chat`.
        """
        return chat_prompt(self.tokenizer, self._parts.images, messages, **rendering)

    def stream(
        self,
        prompt: Prompt,
        *,
        generation_config: GenerationConfig | None = None,
        sink: TokenSink | None = None,
        choice_index: int = 0,
        observer: Observer | None = None,
        reuse: Reuse = "nothing",
        **sampling: Any,
    ) -> GenerationStream:
        """Pieces of the answer as rounds commit them.

        generation_config: defaults in place of the checkpoint's; sink: takes the tokens in place of our text stream.
        observer: looks on, then runs passes of its own, an empty piece each, before the engine is free again.
        reuse: begin with the keys and values that earlier texts left: "prompt", those of whole prefill chunks, changes
        no bit; "history", all that the last one shares, makes the text one of this conversation (see live_tokens).
        """
        check_reuse(reuse)
        if generation_config is None:
            params = self.sampling_params(**sampling)
        else:
            params = SamplingParams.from_generation_config(generation_config, **sampling)
        rows = self._rows_of(prompt)
        if observer is not None and rows.images:
            raise UsageError("Nobody looks on while a prompt with images is answered; leave the images out.")
        limit_tok = min(params.max_new_tokens, self.plan.context_tok - len(rows))
        sink = sink or text_stream(self._parts.tokenizer, params.stop, hidden=params.ends)
        return self._start(rows, params, sink, limit_tok, choice_index, observer, reuse)

    def prompt_logits(self, prompt: Prompt) -> torch.Tensor:
        """The target's logits after every token of `prompt`, [n, V], by one prefill."""
        rows, shield = self._rows_of(prompt), InterruptShield()
        with self._claim(None), cleaned_up(self._parts.loop), shield:
            logits = self._parts.loop.prompt_logits(rows)
        shield.raise_pending()
        return logits

    def prompt_logprobs(self, prompt: Prompt, *, num_top: int = 0) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of all tokens of `prompt` but the first, by one prefill; `num_top` others beside each."""
        rows, shield = self._rows_of(prompt), InterruptShield()
        scored: list[TokenLogprob] = []
        with self._claim(None), cleaned_up(self._parts.loop), shield:
            for logits in self._parts.loop.prompt_logit_chunks(rows):
                following = rows.tokens[len(scored) + 1 :][: len(logits)]
                scored += token_logprobs(logits[: len(following)], following, num_top)
        shield.raise_pending()
        return tuple(scored)

    def retune(self, **changes: Any) -> None:
        """Change what takes no memory (k, prefetch, lookahead_tok, eviction, link_bytes_per_s); slots start empty.

        Raises UsageError for any other option, and while a generation runs.
        """
        for name in changes:
            if name not in _RETUNABLE:
                if name not in LoadOptions.__slots__:
                    raise UsageError(f"Unknown option '{name}'.{nearest_name(name, list(_RETUNABLE))}")
                raise UsageError(f"'{name}' is fixed when an engine is loaded; retune takes {', '.join(_RETUNABLE)}.")
        options = self._options.replaced(changes)
        shield = InterruptShield()
        with self._claim(None), shield:
            self._parts.retune(options)
            self._options = options
        shield.raise_pending()

    def show(self, spectator: Spectator) -> None:
        """Let `spectator` hear of every pass of every text from now on, on the thread that generates."""
        self._parts.loop.show(spectator)

    def close(self) -> None:
        """End a generation that runs, then release threads, files and the records' memory. Calling it twice is allowed.

        The device's memory is free when nothing holds the engine any more.

        From inside a round, by a logits processor say, it cancels, and the end of the generation releases.
        """
        self._is_closed = True
        running = self._running() if self._running is not None else None
        if running is not None and not running.abort():
            return
        with self._busy:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows_of(self, prompt: Prompt) -> PromptRows:
        tokens = self.encode(prompt)
        if not isinstance(prompt, ImagePrompt):
            return PromptRows(tokens)
        self.images.check_lengths(prompt)
        return PromptRows(tokens, prompt.images)

    @contextmanager
    def _claim(self, stream: weakref.ref[GenerationStream] | None) -> Iterator[None]:
        """Claim the engine for one generation. Raises UsageError when it is closed or busy."""
        if not self._busy.acquire(blocking=False):
            raise UsageError(_CLOSED if self._is_closed else _BUSY)
        try:
            self._running = stream  # before the check: either it sees a close, or the close sees the stream
            if self._is_closed:
                raise UsageError(_CLOSED)
            yield
        finally:
            self._running = None
            self._busy.release()
            if self._is_closed:
                self._release()

    def _start(
        self,
        rows: PromptRows,
        params: SamplingParams,
        sink: TokenSink,
        limit_tok: int,
        choice_index: int,
        observer: Observer | None,
        reuse: Reuse,
    ) -> GenerationStream:
        parts, cancelled = self._parts, threading.Event()
        device = torch.device(parts.runner.device)
        sampler = Sampler(params, parts.vocab_size, rows.tokens, device, choice_index=choice_index)
        generation = Generation(
            parts.loop,
            parts.residency,
            parts.clock,
            rows,
            sampler,
            sink,
            limit_tok=limit_tok,
            rows=parts.runner.rows,
            is_cancelled=cancelled.is_set,
            observer=observer,
            reuse=reuse,
        )
        return GenerationStream(generation, cancelled, self._claim)
