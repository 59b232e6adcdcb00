"""The sampler of one generation: turns logits into tokens, for draft and target by the same rules.

Owns the committed tokens as processors see them, the seed, and the round's noise. Knows neither models nor
caches. Row j of a verify pass sees the committed tokens and drafted 1..j, and its noise belongs to the
absolute position of the token it emits; so a row's choice is a function of its logits and of the text before
it, and never of k.

The choice is argmax(log-probabilities + Gumbel), a sample of their softmax. Log-probabilities are taken up to
a constant of the row (the maximum is subtracted), which the argmax does not see: a maximum is exact, where
the last bit of a log-sum-exp would depend on the kernel.

Shapes: R rows, V vocabulary, k drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moespeq.decode.accept import Accepted, accept_coupled, accept_rejection
from moespeq.decode.logprobs import TokenLogprob, token_logprobs
from moespeq.decode.noise import Stream, gumbel, uniform
from moespeq.decode.params import SamplingParams
from moespeq.decode.processors import merge_custom, penalize_repetition, suppress_before, warp
from moespeq.errors import MoespeqError, UsageError

__all__ = ["DraftToken", "Sampler", "drafted_tokens"]

_NOISE_AHEAD = 8  # positions: 150 small kernels draw eight rows as soon as one


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A drafted token, int64 [1] on the device, and under rejection sampling the draft's probabilities [V].

    Nobody has waited for either: a device may still be computing them. Probabilities of NaN accept nothing.
    """

    token: Tensor
    probs: Tensor | None


def drafted_tokens(drafts: Sequence[DraftToken]) -> list[int]:
    """The tokens themselves; waits for the device, once."""
    return _to_list([draft.token for draft in drafts])


def _to_list(tokens: Sequence[Tensor]) -> list[int]:
    return torch.cat(list(tokens)).tolist() if tokens else []


class Sampler:
    """Mutable: `commit` after each round. One sampler serves one generation.

    `seed` is the one given or drawn; with `choice_index`, the n-th answer to one prompt, it repeats the text.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_tokens: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        choice_index: int = 0,
    ) -> None:
        if isinstance(choice_index, bool) or not isinstance(choice_index, int) or choice_index < 0:
            raise UsageError(f"choice_index must be a whole number of at least 0, got {choice_index!r}.")
        if not all(callable(processor) for processor in params.logits_processors):
            raise UsageError(f"logits_processors must be callables, got {params.logits_processors!r}.")
        self.params = params.seeded()
        assert self.params.seed is not None
        self.seed = self.params.seed
        self._choice_index = choice_index
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._rules = merge_custom(self.params)
        self._ends = params.ends
        self._eos = torch.tensor(self.params.eos_token_ids, dtype=torch.int64, device=self._device)
        self._prompt_tok = len(prompt_tokens)
        self._tokens: list[int] = []
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=self._device)
        self._noise_rows: dict[tuple[Stream, int], Tensor] = {}
        self._failures: dict[int, Exception] = {}  # of processors, by the row of the last pass
        self._verified: Tensor | None = None  # raw logits [R, V] of the tokens to commit next, where they are reported
        self._logprobs: list[TokenLogprob] = []
        self.commit(prompt_tokens)

    @property
    def uses_rejection(self) -> bool:
        """Whether acceptance is by rejection sampling; greedy choices are coupled by nature."""
        return self.params.acceptance == "rejection" and not self.params.is_greedy

    @property
    def _reads_drafted(self) -> bool:
        """Whether a row's processors depend on the drafted tokens before it."""
        return self._rules.repetition_penalty != 1 or bool(self._rules.logits_processors)

    @property
    def num_tok(self) -> int:
        """Committed tokens, the prompt's included."""
        return len(self._tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens that are final; the noise of their positions is forgotten."""
        if self._verified is not None:
            self._logprobs += token_logprobs(self._verified[: len(tokens)], tokens, self.params.logprobs or 0)
            self._verified = None
        self._tokens.extend(tokens)
        self._seen[torch.tensor(tokens, dtype=torch.int64, device=self._device)] = True
        self._noise_rows = {key: row for key, row in self._noise_rows.items() if key[1] >= len(self._tokens)}

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the tokens committed since the last call, where `params.logprobs` asks for them."""
        taken, self._logprobs = tuple(self._logprobs), []
        return taken

    def rewound(self, num_tok: int) -> Sampler:
        """One that makes the same choices and has seen the first `num_tok` tokens only, the prompt's included."""
        assert self._prompt_tok <= num_tok <= len(self._tokens), f"{num_tok} of {len(self._tokens)} tokens"
        prompt, kept = self._tokens[: self._prompt_tok], self._tokens[self._prompt_tok : num_tok]
        sampler = Sampler(self.params, self._vocab_size, prompt, self._device, choice_index=self._choice_index)
        sampler.commit(kept)
        return sampler

    def draft_token(self, logits: Tensor, position: int, drafted: Sequence[Tensor]) -> DraftToken:
        """The draft's choice for `position` from `logits` [1, V], behind what the round `drafted` so far.

        Waits for the device only where a processor must see the drafted tokens. A draft of NaN is some token, which the
        target refuses, or by chance has chosen too; processors are shown zeros, so that it is one they allow.
        """
        assert position == len(self._tokens) + len(drafted), f"position {position} is not the next to draft"
        prefix = _to_list(drafted) if self._reads_drafted else []
        shown = torch.where(_is_number(logits), logits, 0.0) if self._rules.logits_processors else logits
        scores = self._process(shown, position, [prefix])
        stream = Stream.DRAFT if self.uses_rejection else Stream.TARGET
        token = self._choose(scores, position, stream)
        if not self.uses_rejection:
            return DraftToken(token, None)
        return DraftToken(token, torch.where(_is_number(logits), scores[0].softmax(dim=-1), torch.nan))

    def target_tokens(self, logits: Tensor, first_position: int, drafted: Sequence[int]) -> list[int]:
        """The target's own choice in each of the k + 1 live rows of `logits` [R, V]; the rest is padding."""
        scores = self._process_rows(logits, first_position, drafted)
        tokens: list[int] = self._choose(scores, first_position, Stream.TARGET).tolist()
        return tokens

    def accept(self, logits: Tensor, first_position: int, drafts: Sequence[DraftToken]) -> Accepted:
        """Verify `drafts` against the target's `logits` [R, V] in the mode that `params.acceptance` names.

        Raises MoespeqError for NaN in a row that counts, and what processors raised there; behind a rejected token no
        row does, as without a draft.
        """
        drafted = drafted_tokens(drafts)
        scores = self._process_rows(logits, first_position, drafted)
        if self.uses_rejection:
            accepted = self._accept_rejection(scores, first_position, drafts, drafted)
        else:
            accepted = accept_coupled(drafted, self._choose(scores, first_position, Stream.TARGET).tolist())
        for row in range(accepted.accepted + 1):
            if row in self._failures:
                raise self._failures[row]
        _check_numbers(scores[: accepted.accepted + 1], first_position)
        if self.params.logprobs is not None:
            self._verified = logits
        return accepted

    def _accept_rejection(
        self, scores: Tensor, first_position: int, drafts: Sequence[DraftToken], drafted: Sequence[int]
    ) -> Accepted:
        probs = scores.softmax(dim=-1)
        rows = [draft.probs for draft in drafts if draft.probs is not None]
        assert len(rows) == len(drafts), "under rejection sampling a draft token carries its probabilities"
        positions = torch.arange(first_position, first_position + len(drafted), device=self._device)
        uniforms = uniform(self.seed, self._choice_index, positions)
        noise = self._noise(first_position, len(drafted) + 1, Stream.TARGET)
        return accept_rejection(drafted, torch.stack(rows) if rows else probs[:0], probs, uniforms, noise)

    def _process_rows(self, logits: Tensor, first_position: int, drafted: Sequence[int]) -> Tensor:
        assert first_position == len(self._tokens), f"position {first_position} is not the next to commit"
        prefixes = [drafted[:length] for length in range(len(drafted) + 1)]
        return self._process(logits[: len(prefixes)], first_position, prefixes)

    def _process(self, logits: Tensor, first_position: int, prefixes: Sequence[Sequence[int]]) -> Tensor:
        """Processed logits, float32 [R, V]. `prefixes[r]` holds the drafted tokens before row r's own."""
        rules, scores = self._rules, logits.to(torch.float32)
        if rules.repetition_penalty != 1:
            scores = penalize_repetition(scores, self._seen_by(prefixes), rules.repetition_penalty)
        num_new = first_position - self._prompt_tok
        if num_new < rules.min_new_tokens and rules.eos_token_ids:
            num_new_tok = torch.arange(num_new, num_new + len(prefixes), device=self._device)
            scores = suppress_before(scores, self._eos, num_new_tok, rules.min_new_tokens)
        self._failures = {}
        if rules.logits_processors:
            scores = torch.cat(
                [self._try_custom(row, scores[row, None], prefix) for row, prefix in enumerate(prefixes)]
            )
        return warp(scores, rules)

    def _seen_by(self, prefixes: Sequence[Sequence[int]]) -> Tensor:
        """Tokens seen by each row, bool [R, V]: committed, and drafted before it."""
        seen = self._seen.repeat(len(prefixes), 1)
        pairs = [(row, token) for row, prefix in enumerate(prefixes) for token in prefix]
        if pairs:
            rows, tokens = torch.tensor(pairs, device=self._device).unbind(dim=1)
            seen[rows, tokens] = True
        return seen

    def _try_custom(self, row: int, scores: Tensor, prefix: Sequence[int]) -> Tensor:
        """What fails behind drafted tokens is noted: it counts where those are kept."""
        try:
            return self._run_custom(scores, prefix)
        except Exception as error:
            if not prefix:
                raise
            self._failures[row] = error
            return scores

    def _run_custom(self, scores: Tensor, prefix: Sequence[int]) -> Tensor:
        """The caller's processors on one row [1, V], a copy, since some write into what they are given."""
        if not self._ends.isdisjoint(prefix):
            return scores  # a row behind a drafted EOS is never live, and a grammar cannot go on there
        scores = scores.clone()
        input_ids = torch.tensor([[*self._tokens, *prefix]], dtype=torch.int64, device=self._device)
        for processor in self._rules.logits_processors:
            result = processor(input_ids, scores)
            if not isinstance(result, Tensor) or result.shape != scores.shape:
                got = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else repr(result)
                raise UsageError(
                    f"The logits processor {type(processor).__name__} returned {got}; "
                    f"it must return {tuple(scores.shape)}, the shape it was given."
                )
            scores = result
        if bool((scores == -torch.inf).all()):
            raise UsageError(
                f"The logits processors left no token to choose at position {input_ids.shape[1]}; "
                "loosen them, or lower min_new_tokens if it holds back EOS."
            )
        return scores

    def _choose(self, scores: Tensor, first_position: int, stream: Stream) -> Tensor:
        """The chosen token of each row, int64 [R]; the lowest id among equals."""
        if self.params.is_greedy:
            return scores.argmax(dim=-1)
        noise = self._noise(first_position, len(scores), stream)
        return (scores - scores.amax(dim=-1, keepdim=True) + noise).argmax(dim=-1)

    def _noise(self, first_position: int, num_rows: int, stream: Stream) -> Tensor:
        """Gumbel rows [R, V]; a position that draft and target share is drawn once, and some ahead."""
        wanted = range(first_position, first_position + num_rows)
        missing = [position for position in wanted if (stream, position) not in self._noise_rows]
        if missing:
            drawn = range(missing[0], max(wanted.stop, missing[0] + _NOISE_AHEAD))
            positions = torch.arange(drawn.start, drawn.stop, device=self._device)
            rows = gumbel(self.seed, self._choice_index, positions, self._vocab_size, stream=stream)
            self._noise_rows.update(zip(((stream, position) for position in drawn), rows, strict=True))
        return torch.stack([self._noise_rows[stream, position] for position in wanted])


def _is_number(logits: Tensor) -> Tensor:
    """Whether the one row of `logits` [1, V] has a softmax, bool [] on its device."""
    return logits.amax().isfinite()


def _check_numbers(scores: Tensor, first_position: int) -> None:
    """Refuse rows with NaN, which would decode as some token: a maximum is NaN where any element is."""
    is_nan = scores.amax(dim=-1).isnan()  # [R]
    if bool(is_nan.any()):
        position = first_position + int(is_nan.to(torch.uint8).argmax())
        raise MoespeqError(
            f"The model produced NaN at position {position}; check the checkpoint and the logits processors."
        )
