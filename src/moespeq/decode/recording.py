"""A routing trace of a real run: the run itself, then what a draft and a look one layer ahead say of the same text.

Owns the order of passes that fill a trace; the format is `replay.routing_trace`'s, the passes are the runner's.

    generate   as ever; at each commit the loop tells the target's true routes. One more round, which nobody is shown,
               gives those of the text's last row.
    draft      along the given text, whatever the run drafted: in windows as deep as the deepest round, each step told
               the true next token, so that every row has routes and a proposal. A draft overwrites the keys and values
               of its window; going from the last window to the first, each still finds the target's before it.
    prefill    of the text, in which each layer's input is shown to the next layer's router. So the routes one layer
               ahead are those of a prefill, whose sums round a little differently from a verify's.

Shapes: L MoE layers, K experts a token, V vocabulary, W rows of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moespeq.config import LoadOptions
from moespeq.decode.engine import Engine, Prompt
from moespeq.decode.generation import GenerationResult
from moespeq.decode.loop import SpeculativeLoop
from moespeq.decode.params import SamplingParams
from moespeq.decode.sampling import Sampler
from moespeq.decode.timeline import RoundTimes
from moespeq.decode.trace_header import header_of, rounds_of
from moespeq.errors import UsageError
from moespeq.model.families import why_not_traced
from moespeq.model.passes import Runner
from moespeq.replay import RoutingTrace, TracePosition
from moespeq.replay.routing_trace import Routes

__all__ = ["Progress", "Recording", "record", "require_draft"]

Progress = Callable[[int, int, str], object]
"""(done, in all, what): of how many tokens a part of the recording is done."""

_DIGITS = 6  # of a probability; more would be most of a file


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace, the generation that it is of, and when its rounds were."""

    trace: RoutingTrace
    result: GenerationResult
    times: Sequence[RoundTimes]


def record(engine: Engine, prompt: Prompt, *, progress: Progress | None = None, **sampling: Any) -> Recording:
    """Generate an answer to `prompt`, and record it; `sampling` are the fields of SamplingParams.

    Afterwards the engine answers as before. Raises UsageError where it never drafts, and what `Engine.stream` raises.
    """
    require_draft(engine.options)
    reason = why_not_traced(engine.manifest.model_type)
    if reason is not None:
        raise UsageError(f"No trace can be recorded of a {engine.manifest.model_type} model: {reason}.")
    if sampling.get("acceptance") == "rejection":
        raise UsageError(
            "Under rejection sampling a text depends on how deep its rounds drafted, and a trace is replayed at other "
            "depths; record with acceptance='coupled'."
        )
    tell = progress or _tell_nobody
    observer, num_tok = _RouteObserver(tell), 0
    stream = engine.stream(prompt, observer=observer, **sampling)
    for piece in stream:
        if piece.tokens:
            num_tok += len(piece.tokens)
            tell(num_tok, stream.limit_tok, "generating")
    if observer.params is None or not observer.positions:
        raise UsageError("The generation was cancelled before its trace was complete; record it again.")
    stats = stream.result.stats
    if not stats.rounds:
        raise UsageError("The answer ended with its first token, before any round; ask for more tokens, or ignore EOS.")
    times = observer.times[: stats.rounds]  # the last one nobody was shown
    header = header_of(
        engine, observer.params, stats, resident=observer.resident, draft_step_s=median(observer.steps_s)
    )
    return Recording(RoutingTrace(header, observer.positions, rounds_of(stats.reports, times)), stream.result, times)


def require_draft(options: LoadOptions) -> None:
    """Raise UsageError where an engine of these options never drafts, so that no trace can say what a draft does."""
    if options.mode == "on_demand":
        reason, advice = "on demand nothing is drafted", "leave the mode out"
    elif options.records == "whole":
        reason, advice = "no base is resident to draft with", "give more --device-memory, or a --base-memory"
    elif options.rows == 1:
        reason, advice = "an engine of 1 row never drafts", "load with rows of 17, 33 or 65"
    else:
        return
    raise UsageError(f"A trace records what the draft says, and {reason}; {advice}.")


@dataclass(frozen=True, slots=True)
class _Drafted:
    """What the draft said of a row; see TracePosition."""

    routes: Routes
    step: int
    token: int
    confidence: float


class _RouteObserver:
    """An Observer that fills `positions`. Mutable, for one generation; it holds nothing of the engine."""

    def __init__(self, tell: Progress) -> None:
        self._tell = tell
        self._first = -1  # position of the first generated token; none was heard of
        self._true: list[Routes] = []
        self.resident: Sequence[Sequence[int]] = ()
        self.params: SamplingParams | None = None
        self.positions: list[TracePosition] = []
        self.times: list[RoundTimes] = []
        self.steps_s: list[float] = []  # a draft step's, of each window along the finished text

    def hear_prompt(self, resident: Sequence[Sequence[int]]) -> None:
        self.resident = resident

    def hear_commit(self, position: int, routes: Sequence[Sequence[Sequence[int]]], times: RoundTimes) -> None:
        if not self._true:
            self._first = position
        assert position == self._first + len(self._true), f"rows before {position} were not heard of"
        self._true += _by_row(routes)
        self.times.append(times)

    def follow(self, loop: SpeculativeLoop, sampler: Sampler, tokens: Sequence[int]) -> Iterator[None]:
        self.params = sampler.params
        (successor,) = loop.propose(sampler, 1).tokens
        loop.commit([successor], sampler)
        yield
        assert len(self._true) == len(tokens), f"{len(self._true)} rows of {len(tokens)} tokens"
        text = [*tokens, successor]
        drafted = yield from self._draft(loop.runner, sampler, text)
        ahead = yield from self._look_ahead(loop, tokens)
        rows = zip(tokens, text[1:], self._true, drafted, _by_row(ahead), strict=True)
        self.positions = [
            TracePosition(
                token=token,
                true=true,
                draft=said.routes,
                ahead=early,
                step=said.step,
                drafted=said.token,
                confidence=said.confidence,
                accepted=said.token == following,
            )
            for token, following, true, said, early in rows
        ]

    def _draft(self, runner: Runner, sampler: Sampler, text: Sequence[int]) -> Generator[None, None, list[_Drafted]]:
        """What the draft says at each token of `text` but the last; a pass for each window."""
        drafted: list[_Drafted] = []
        num_tok = len(text) - 1
        for begin, end in reversed(_windows(runner, self._first, num_tok)):
            before, clock = sampler.rewound(self._first + begin + 1), self.times[0].clock
            begin_s = clock.now_s()
            drafted[:0] = _draft_along(runner, before, text[begin : end + 1])
            self.steps_s.append((clock.now_s() - begin_s) / (end - begin))
            self._tell(len(drafted), num_tok, "drafting along the text")
            yield
        return drafted

    def _look_ahead(
        self, loop: SpeculativeLoop, tokens: Sequence[int]
    ) -> Generator[None, None, list[list[Sequence[int]]]]:
        """[layer][row][K], nothing in the first layer; a pass for each chunk."""
        ahead: list[list[Sequence[int]]] = [[] for _ in self._true[0]]
        for _ in loop.look_ahead(tokens, self._first, lambda layer, rows: ahead[layer].extend(rows)):
            self._tell(len(ahead[-1]), len(tokens), "looking one layer ahead")
            yield
        ahead[0] = [[] for _ in tokens]
        return ahead


def _tell_nobody(done_tok: int, all_tok: int, what: str) -> None:
    pass


def _by_row(routes: Sequence[Sequence[Sequence[int]]]) -> list[Routes]:
    """[layer][row][K] -> [row][layer][K]."""
    return [list(layers) for layers in zip(*routes, strict=True)]


def _windows(runner: Runner, first: int, num_tok: int) -> list[tuple[int, int]]:
    """Where a draft that goes on as deep as it may begins anew: (begin, end), counted from position `first`."""
    windows, begin = [], 0
    while begin < num_tok:
        end = min(num_tok, begin + runner.max_k(first + begin) + 1)
        windows.append((begin, end))
        begin = end
    return windows


def _draft_along(runner: Runner, sampler: Sampler, text: Sequence[int]) -> list[_Drafted]:
    """Draft from text[0], the sampler's last token, at each step told the next of `text`, W + 1 tokens."""
    given: Sequence[Tensor] = torch.tensor(text[1:], device=runner.device).split(1)  # W times [1]
    position = sampler.num_tok - 1
    routes: list[Routes] = []
    tokens: list[Tensor] = []
    probs: list[Tensor] = []

    def choose(logits: Tensor, step: int) -> Tensor:
        token = sampler.draft_token(logits, position + 1 + step, given[:step]).token
        tokens.append(token)
        probs.append(logits[0].to(torch.float32).softmax(dim=-1)[token])
        return given[step]

    def hear_routes(step: int, layers: Routes) -> None:
        routes.append(layers)

    runner.draft(text[0], position, len(given), choose, hear_routes, num_chosen=len(given))
    confidences = torch.cat(probs).nan_to_num(nan=0.0).tolist()
    said = zip(routes, torch.cat(tokens).tolist(), confidences, strict=True)
    return [_Drafted(layers, step, token, round(prob, _DIGITS)) for step, (layers, token, prob) in enumerate(said)]
