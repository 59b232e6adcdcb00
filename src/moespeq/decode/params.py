"""What one generation asks for: `SamplingParams`, checked once.

Owns the legal ranges and the precedence: the user's value, then the checkpoint's generation config, then our
default; and which tokens end a text. Applies nothing; `processors` and `sampling` do. Temperature 0 is greedy
decoding, and as in transformers the warpers (temperature, top-k, top-p, min-p) then do not act, while repetition
penalty and min-new-tokens do.
"""

from __future__ import annotations

import secrets
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from moespeq.config import nearest_name
from moespeq.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LogitsProcessor", "SamplingParams", "end_token_ids"]

LogitsProcessor = Callable[["Tensor", "Tensor"], "Tensor"]
"""(input_ids [1, n], scores [1, V] float32) -> scores [1, V], without memory: a position is asked again."""

_MIN_TEMPERATURE = 1e-30  # far below this, float32 logits overflow when they are divided by it
_TUPLES = ("stop", "eos_token_ids", "logits_processors")
_SEED_BITS = 53  # of a drawn seed: a JSON number carries it unchanged

# Settings of a generation config that change the logits and are not applied, with the values of "off".
_NOT_APPLIED: dict[str, tuple[object, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "frequency_penalty": (0.0,),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "presence_penalty": (0.0,),
    "sequence_bias": (),
    "suppress_tokens": (),
    "top_h": (),
    "typical_p": (1.0,),
    "watermarking_config": (),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of one generation.

    seed: key of all randomness; None until `seeded` draws one.
    stop: the generation ends before the first of these texts.
    acceptance: "coupled" gives the same text for every k; "rejection" accepts more at a high temperature.
    logits_processors: transformers-style callables, applied row by row between the penalties and the warpers.
    logprobs: how many of the likeliest tokens are reported beside each new one; None reports nothing.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    acceptance: Literal["coupled", "rejection"] = "coupled"
    logits_processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_whole("max_new_tokens", self.max_new_tokens, 1, None)
        _check_whole("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        _check_whole("top_k", self.top_k, 0, None)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, None)
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, 2**64 - 1)
        _check_number("temperature", self.temperature, "0 (greedy) or at least 1e-30", _is_temperature)
        _check_number("top_p", self.top_p, "above 0 and at most 1", lambda value: 0 < value <= 1)
        _check_number("min_p", self.min_p, "from 0 to 1", lambda value: 0 <= value <= 1)
        _check_number("repetition_penalty", self.repetition_penalty, "above 0", lambda value: value > 0)
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos must be True or False, got {self.ignore_eos!r}.")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError(f"stop must be a tuple of texts of at least 1 character, got {self.stop!r}.")
        if not isinstance(self.eos_token_ids, tuple):
            raise UsageError(f"eos_token_ids must be a tuple of token ids, got {self.eos_token_ids!r}.")
        for token in self.eos_token_ids:
            _check_whole("every EOS token id", token, 0, None)
        if self.acceptance not in ("coupled", "rejection"):
            raise UsageError(f"acceptance must be 'coupled' or 'rejection', got {self.acceptance!r}.")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without randomness."""
        return self.temperature == 0

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end this text; none where EOS is an ordinary token."""
        return frozenset() if self.ignore_eos else frozenset(self.eos_token_ids)

    def seeded(self) -> SamplingParams:
        """These parameters with a seed: the one given, or a fresh one, to be reported with the result."""
        if self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(_SEED_BITS))

    @classmethod
    def from_generation_config(cls, config: object | None, **overrides: Any) -> SamplingParams:
        """Parameters from a Hugging Face generation config (any object with its attributes); `overrides` win.

        An override of None is "not given", and a single stop text or EOS id may stand for a tuple. Only what
        the config sets counts: transformers' own fallback of top_k = 50 for configs that are silent is not
        copied. Warns of settings that are not applied, unless the caller brings logits processors of his own.
        """
        known = [field.name for field in fields(cls)]
        for name in overrides:
            if name not in known:
                raise UsageError(f"Unknown sampling option '{name}'.{nearest_name(name, known)}")
        given = {name: value for name, value in overrides.items() if value is not None}
        given |= {name: _as_tuple(given[name]) for name in _TUPLES if name in given}
        if not given.get("logits_processors"):
            _warn_of_settings_not_applied(config)
        values = _checkpoint_defaults(config) | given
        if "min_new_tokens" not in given and isinstance(limit := given.get("max_new_tokens"), int):
            values["min_new_tokens"] = min(values.get("min_new_tokens", 0), limit)
        return cls(**values)


def end_token_ids(config: object | None, tokenizer_eos: int | None, vocab_size: int) -> tuple[int, ...]:
    """What ends a text: the ids of a generation config, and the tokenizer's own, which ends a turn in many chats.

    An id outside of the vocabulary, as -1 for "none", ends nothing.
    """
    named = getattr(config, "eos_token_id", None)
    ids = dict.fromkeys([*(() if named is None else _as_tuple(named)), tokenizer_eos])
    return tuple(token for token in ids if isinstance(token, int) and 0 <= token < vocab_size)


def _checkpoint_defaults(config: object | None) -> dict[str, Any]:
    """The options a generation config sets, under our names."""
    names = ("max_new_tokens", "min_new_tokens", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0  # "off" in files written for other engines
    if getattr(config, "do_sample", None):
        temperature = getattr(config, "temperature", None)
        values["temperature"] = 1.0 if temperature is None else temperature
    if (eos := getattr(config, "eos_token_id", None)) is not None:
        values["eos_token_ids"] = _as_tuple(eos)
    if stop := getattr(config, "stop_strings", None):
        values["stop"] = _as_tuple(stop)
    return values


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)):
        return tuple(value)
    return (value,)


def _warn_of_settings_not_applied(config: object | None) -> None:
    for name, off in _NOT_APPLIED.items():
        value = getattr(config, name, None)
        if value is not None and value not in off:
            advice = "pass a logits processor that does it"
            warnings.warn(f"The generation config's {name}={value} is not applied; {advice}.", stacklevel=3)


def _is_temperature(value: float) -> bool:
    return value == 0 or value >= _MIN_TEMPERATURE


def _check_number(name: str, value: float, allowed: str, is_legal: Callable[[float], bool]) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not is_number or not is_legal(value):
        raise UsageError(f"{name} must be {allowed}, got {value!r}.")


def _check_whole(name: str, value: int, low: int, high: int | None) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise UsageError(f"{name} must be a whole number {allowed}, got {value!r}.")
