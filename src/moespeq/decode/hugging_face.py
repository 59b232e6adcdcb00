"""The Hugging Face face: a PreTrainedModel whose ordinary `generate` runs the speculative loop.

transformers prepares everything as usual (generation config, processors, stopping criteria) and then calls our decoding
function in place of its own. It drops `streamer` and `tokenizer` for such a function, so they are bound beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput

from moespeq.decode.engine import Engine
from moespeq.decode.text import StreamDelta
from moespeq.errors import UsageError

__all__ = ["speculative_model"]

_APPLIED_BY_US = (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
_NOT_RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def speculative_model(engine: Engine) -> PreTrainedModel:
    """The engine's model, its class extended with our `generate`; the model keeps the engine alive."""
    model = engine.model
    family = type(model)
    model.__class__ = type(f"Speculative{family.__name__}", (_SpeculativeGeneration, family), {})
    model.moespeq_engine = engine
    model.generation_config = engine.generation_config
    return model


class _SpeculativeGeneration:
    """Mixed in before a model class."""

    moespeq_engine: Engine

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *,
        streamer: Any = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' `generate`, for one sequence."""
        config: GenerationConfig | None = kwargs.get("generation_config")
        stop_strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None)
        if stop_strings is not None:
            if tokenizer is None:
                raise UsageError("stop_strings need the tokenizer: pass tokenizer=... to generate as well.")
            criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
            kwargs["stopping_criteria"] = [*criteria, StopStringCriteria(tokenizer, stop_strings)]
        decode = functools.partial(_decode, streamer=streamer)
        return super().generate(inputs, custom_generate=decode, **kwargs)  # type: ignore[misc]


def _decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    streamer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """transformers' decoding method: input_ids [1, n] -> sequences [1, n + new]."""
    _check_supported(input_ids, generation_config, model_kwargs.get("attention_mask"))
    engine: Engine = model.moespeq_engine
    prompt: list[int] = input_ids[0].tolist()
    others = tuple(processor for processor in logits_processor if not isinstance(processor, _APPLIED_BY_US))
    if streamer is not None:
        streamer.put(input_ids.cpu())
    stream = engine.stream(
        prompt,
        generation_config=generation_config,
        sink=_CriteriaSink(input_ids, stopping_criteria, streamer),
        max_new_tokens=generation_config.max_length - len(prompt),
        seed=int(torch.randint(2**53, ())) if generation_config.do_sample else 0,
        logits_processors=others,
    )
    for _ in stream:
        pass
    if streamer is not None:
        streamer.end()
    new = torch.tensor([stream.result.tokens], dtype=input_ids.dtype, device=input_ids.device)
    sequences = torch.cat([input_ids, new], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def _check_supported(input_ids: torch.Tensor, config: GenerationConfig, mask: torch.Tensor | None) -> None:
    if input_ids.shape[0] != 1 or config.num_beams not in (None, 1):
        raise UsageError(
            f"One sequence at a time is supported, got a batch of {input_ids.shape[0]}; call generate for each."
        )
    if mask is not None and not bool(mask.bool().all()):
        raise UsageError("The prompt has masked (padding) tokens; give it without padding.")
    wanted = [name for name in _NOT_RETURNED if getattr(config, name, None)]
    if wanted:
        raise UsageError(f"{wanted[0]} is not returned by speculative decoding; leave it out.")


class _CriteriaSink:
    """Stopping criteria asked token by token, and the streamer fed with what is committed."""

    def __init__(self, input_ids: torch.Tensor, criteria: StoppingCriteriaList, streamer: Any) -> None:
        self._ids, self._criteria, self._streamer = input_ids, criteria, streamer

    def push(self, tokens: Sequence[int]) -> StreamDelta:
        for count, token in enumerate(tokens, start=1):
            one = torch.tensor([[token]], dtype=self._ids.dtype, device=self._ids.device)
            self._ids = torch.cat([self._ids, one], dim=1)
            if self._streamer is not None:
                self._streamer.put(one[0].cpu())
            if bool(self._criteria(self._ids, None).all()):
                return StreamDelta("", count, True)
        return StreamDelta("", len(tokens), False)

    def flush(self) -> str:
        return ""
