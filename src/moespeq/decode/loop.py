"""The speculative loop over one sequence: prefill, then rounds of draft, verify, accept, commit.

The order of one round is the order of statements in `propose`; `commit` ends it. Between the two the caller cuts the
proposed tokens (EOS, stop texts, limits), so that what is committed is exactly what is shown: later tokens are never
live. A round starts at the last committed token, whose key and value are not written yet: the draft writes
position..position+k, verify rewrites them, and the next round begins where the commit ended. Nothing is ever undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moespeq.decode.accept import Accepted
from moespeq.decode.link_meter import LinkMeter, LinkUse
from moespeq.decode.live_tokens import LiveTokens, Reuse
from moespeq.decode.measures import PrefillMeasures, RoundMeasures, report_of
from moespeq.decode.observer import Observer
from moespeq.decode.prefix_cache import PrefixCache
from moespeq.decode.prompt_rows import PromptRows
from moespeq.decode.sampling import DraftToken, Sampler, drafted_tokens
from moespeq.decode.spectator import PassSeen, Spectator
from moespeq.decode.statistics import RouteFidelity
from moespeq.decode.timeline import RoundTimes
from moespeq.model.passes import OnLayer, Runner
from moespeq.ports import Clock
from moespeq.residency import Governor, PassKind, Residency
from moespeq.types import StepReport

__all__ = ["SpeculativeLoop"]


class SpeculativeLoop:
    """One sequence at a time; `prefill` resets it, and may go on from what earlier ones left. One engine thread.
    Mutable: position, open round, cache contents.

    prefill_rows: chunk borders of a prompt lie at its multiples. stream_from_rows: from this many rows on nearly every
    expert of a layer is needed, and a chunk streams all records in layer order; below, only those that the draft
    foresees or the target asks for move. prefixes: keys and values of earlier prompts.
    """

    def __init__(
        self,
        runner: Runner,
        residency: Residency,
        governor: Governor,
        clock: Clock,
        *,
        link: LinkMeter,
        prefill_rows: int,
        stream_from_rows: int,
        prefixes: PrefixCache,
    ) -> None:
        self._runner, self._residency, self._governor, self._clock = runner, residency, governor, clock
        self._link = link
        self._prefill_rows, self._stream_from_rows = prefill_rows, stream_from_rows
        self._round = RoundMeasures()
        self._position = 0  # of the last committed token
        self._token = 0
        self._observer: Observer | None = None
        self._live, self._prefixes = LiveTokens(prefill_rows), prefixes
        self._rotation = 0  # that the live keys have
        self._begun = PrefillMeasures(0.0, residency.counters())
        self._spectator: Spectator | None = None
        self.fidelity = RouteFidelity()
        self.reused_tok = 0  # of the prompt, in the cache already

    @property
    def runner(self) -> Runner:
        """The passes, for an observer's own between two rounds."""
        return self._runner

    def prefill(
        self, prompt: PromptRows, observer: Observer | None = None, *, reuse: Reuse = "nothing"
    ) -> Iterator[None]:
        """Prefill what of `prompt` the cache lacks; yields between two chunks, where it may be closed. `first` follows.

        observer: hears of all commits until `abandon`. reuse: what the cache may be said to hold.
        """
        self._round, self.fidelity, self._observer = RoundMeasures(), RouteFidelity(), observer
        self._link.measure()  # what happened between two texts is nobody's
        begun = self._begun = PrefillMeasures(self._clock.now_s(), self._residency.counters())
        self._runner.begin_text(prompt.tokens, prompt.images)
        self.reused_tok = self._reuse(prompt, reuse)
        for begun.logits, known in self._prefill(prompt, start=self.reused_tok, num_logits=1):
            self._live.add_prefilled(known)
            if reuse == "prompt" and not self._rotation:
                self._prefixes.keep(self._live.chunked)
            if len(self._live) < len(prompt):
                yield
        if observer is not None:
            observer.hear_prompt(self._resident())
        self._position = len(prompt) - 1

    def first(self, sampler: Sampler) -> tuple[Accepted, StepReport]:
        """The first token behind a prefilled prompt, to be committed, and what the prefill moved."""
        begun = self._begun
        assert begun.logits is not None, "a prefill comes first"
        moved, link = self._residency.counters().since(begun.counters), self._link.measure()
        report = report_of(RoundMeasures(verify_s=self._clock.now_s() - begun.at_s), 1, moved, link)
        self._tell_spectator(begun.at_s, report, link, is_prefill=True)
        return sampler.accept(begun.logits, self._position + 1, []), report

    def prompt_logits(self, prompt: PromptRows) -> torch.Tensor:
        """The target's logits after every token of `prompt`, [n, V]."""
        return torch.cat(list(self.prompt_logit_chunks(prompt)))

    def prompt_logit_chunks(self, prompt: PromptRows) -> Iterator[torch.Tensor]:
        """The same chunk by chunk, each valid until the next."""
        self._live.cut(0)
        self._rotation = self._runner.rotation_of(len(prompt))
        self._runner.begin_text(prompt.tokens, prompt.images)
        return (logits for logits, _ in self._prefill(prompt, num_logits=0))

    def look_ahead(self, tokens: Sequence[int], start: int, on_ahead: OnLayer) -> Iterator[None]:
        """Prefill `tokens` from position `start` on, chunk by chunk, for what routers say one layer early."""
        for _ in self._prefill(PromptRows(tokens, first=start), start=start, num_logits=1, on_ahead=on_ahead):
            yield

    def propose(self, sampler: Sampler, limit_tok: int) -> Accepted:
        """Draft and verify; returns the 1 to `limit_tok` tokens the round emits. `commit` must follow."""
        begin_s = self._clock.now_s()
        self._turn_keys()
        times = None if self._observer is None else RoundTimes(self._clock, begin_s)
        self._round = RoundMeasures(begin_s=begin_s, k=self._choose_k(limit_tok), times=times)
        if self._round.k:
            self._residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=self._round.k + 1)
            drafts = self._draft_tokens(sampler)
        else:
            self._residency.begin_pass(PassKind.PLAIN)
            drafts = []
        drafted = drafted_tokens(drafts)
        drafted_s = self._clock.now_s()
        is_heard = bool(drafted) or self._observer is not None
        on_layer = self._round.hear_target_routes if is_heard else None
        logits = self._runner.verify([self._token, *drafted], self._position, on_layer)
        self._residency.confirm()
        accepted = sampler.accept(logits, self._position + 1, drafts)
        self._round.draft_s, self._round.verify_s = drafted_s - begin_s, self._clock.now_s() - drafted_s
        self._round.accepted = accepted.accepted
        return accepted

    def commit_first(self, token: int, sampler: Sampler) -> None:
        """Commit the token that prefill gave."""
        self._advance([token], sampler)

    def commit(self, tokens: Sequence[int], sampler: Sampler) -> StepReport:
        """End the round with the tokens that remain of its proposal."""
        if self._round.k:
            rows = self._round.accepted + 1
            self.fidelity.compare(self._round.draft_routes, self._round.target_routes, rows)
        moved, link = self._residency.end_pass(len(tokens)), self._link.measure()
        report = report_of(self._round, len(tokens), moved, link)
        self._governor.observe(report)
        self._tell_observer(report, link)
        self._tell_spectator(self._round.begin_s, report, link, is_prefill=False)
        self._live.add_decoded([self._token, *tokens[:-1]])  # the last one's key is the next round's to write
        self._advance(tokens, sampler)
        return report

    def use(self, governor: Governor) -> None:
        """Choose depths by `governor` from the next round on."""
        self._governor = governor

    def show(self, spectator: Spectator) -> None:
        """Let `spectator` hear of every pass from the next one on."""
        self._spectator = spectator

    def forget(self) -> None:
        """Clear what a failed pass left in the cache. Nothing of a sequence is kept."""
        self._live.cut(0)
        self._runner.forget()

    def abandon(self) -> None:
        """Drop an open round or prefill, after an error or a cancel, and the observer: leases back, no predictions."""
        if self._observer is not None:
            self._live.cut(0)  # its passes wrote what they liked
        self._observer = None
        self._residency.cancel()

    def _reuse(self, prompt: PromptRows, reuse: Reuse) -> int:
        """Make the front of `prompt` live that needs no prefill; returns its length."""
        rotation = self._runner.rotation_of(len(prompt))
        live_tok = prompt.uncut(self._live.reusable_tok(prompt.known, reuse))
        if rotation != self._rotation or not self._runner.can_resume(live_tok):
            live_tok = 0
        self._live.cut(live_tok)
        self._rotation = rotation  # keys that others left for a prefix have the first
        if reuse != "prompt" or rotation:
            return live_tok
        reused_tok = self._prefixes.restore(prompt.known, live_tok)
        self._live.add_prefilled(prompt.known[live_tok:reused_tok])
        return reused_tok

    def _turn_keys(self) -> None:
        """Compute all keys anew where the text has become so long that the model turns them otherwise."""
        rotation = self._runner.rotation_of(self._position + 1)
        if rotation != self._rotation:
            tokens, self._rotation = self._live.tokens, rotation
            self._live.cut(0)
            list(self._prefill(PromptRows(tokens), num_logits=1, text_tok=self._position + 1))
            self._live.add_prefilled(tokens)

    def _prefill(
        self,
        prompt: PromptRows,
        *,
        num_logits: int,
        start: int = 0,
        on_ahead: OnLayer | None = None,
        text_tok: int | None = None,
    ) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
        """From `start` on: logits of the last `num_logits` rows of each chunk (0: all), and what its rows are known by.
        The text may go on behind `prompt`.
        """
        text_tok = text_tok or prompt.end
        for chunk in prompt.chunks(start, self._prefill_rows):
            self._residency.begin_pass(PassKind.PREFILL)
            if len(chunk.tokens) >= self._stream_from_rows:
                self._residency.expect_all()
            elif self._residency.looks_ahead:
                self._runner.foresee(chunk.tokens, chunk.start, self._residency.expect)
            logits = self._runner.prefill(
                chunk.tokens,
                chunk.start,
                num_logits=num_logits,
                images=chunk.images,
                on_ahead=on_ahead,
                text_tok=text_tok,
            )
            self._residency.end_pass(1)
            yield logits, chunk.known

    def _resident(self) -> list[list[int]]:
        """[layer]: the experts in slots."""
        num_experts = self._residency.cache.num_experts
        experts: list[list[int]] = [[] for _ in range(self._residency.lookahead.num_layers)]
        for record in sorted(self._residency.cache.resident):
            experts[record // num_experts].append(record % num_experts)
        return experts

    def _tell_observer(self, report: StepReport, link: LinkUse) -> None:
        times = self._round.times
        if self._observer is None or times is None:
            return
        times.end_s, times.k, times.accepted, times.link = self._clock.now_s(), report.k, report.accepted, link
        routes = [rows[: report.committed] for rows in self._round.target_routes]
        self._observer.hear_commit(self._position, routes, times)

    def _tell_spectator(self, begin_s: float, report: StepReport, link: LinkUse, *, is_prefill: bool) -> None:
        if self._spectator is not None:
            seen = PassSeen(begin_s, self._clock.now_s(), is_prefill, report, link, self._residency)
            self._spectator.hear_pass(seen)

    def _advance(self, tokens: Sequence[int], sampler: Sampler) -> None:
        sampler.commit(tokens)
        self._position += len(tokens)
        self._token = tokens[-1]

    def _choose_k(self, limit_tok: int) -> int:
        return self._governor.choose(min(self._runner.max_k(self._position), limit_tok - 1))

    def _draft_tokens(self, sampler: Sampler) -> list[DraftToken]:
        """k tokens in k + 1 steps: the last step is run for its routes only. A watch may end the draft earlier."""
        drafts: list[DraftToken] = []
        watch, confidences = self._governor.watch(self._round.k), self._round.confidences

        def choose(logits: torch.Tensor, step: int) -> torch.Tensor:
            drafts.append(sampler.draft_token(logits, self._position + 1 + step, [draft.token for draft in drafts]))
            if watch is not None:
                confidences.append(_confidence(logits, drafts[-1].token))
            return drafts[-1].token

        asked = None if watch is None else watch.goes_on
        goes_on = None if asked is None else lambda: asked(float(confidences[-1]))
        num_steps = self._round.k + 1
        self._runner.draft(self._token, self._position, num_steps, choose, self._on_draft_step, goes_on=goes_on)
        self._round.k = len(drafts)
        return drafts

    def _on_draft_step(self, step: int, routes: Sequence[Sequence[int]]) -> None:
        self._round.draft_routes.append(routes)
        if self._round.times is not None:
            self._round.times.note_step()
        self._residency.predict(routes)
        self._residency.pump()


def _confidence(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The draft's own probability of its token, float32 [1] on its device, from `logits` [1, V]; 0 of NaN."""
    return logits[0].to(torch.float32).softmax(dim=-1)[token].nan_to_num(nan=0.0)
