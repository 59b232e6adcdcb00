"""The Hugging Face face: a PreTrainedModel whose ordinary `generate` runs the speculative loop.

transformers prepares everything as usual (generation config, processors, stopping criteria) and then calls our decoding
function in place of its own. It drops `streamer` and `tokenizer` for such a function, so we carry them past it.
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
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput

from moespeq.decode.engine import Engine
from moespeq.decode.text import StreamDelta
from moespeq.errors import UsageError

__all__ = ["speculative_model"]

# Made from a generation config, these are applied by our sampler, on all rows at once.
_APPLIED_BY_US = (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
_OUR_OWN_OFF = {"min_new_tokens": 0, "min_p": 0.0, "repetition_penalty": 1.0, "top_k": 0, "top_p": 1.0}
_NOT_TAKEN = ("pixel_values", "pixel_values_videos", "input_features")
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
    moespeq_tokenizer: Any = None  # of the running call

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        streamer: Any = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' `generate`, for one sequence."""
        decode = functools.partial(_decode, streamer=streamer, has_custom=bool(kwargs.get("logits_processor")))
        self.moespeq_tokenizer = tokenizer
        try:
            return super().generate(inputs, generation_config, custom_generate=decode, **kwargs)  # type: ignore[misc]
        finally:
            self.moespeq_tokenizer = None

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """With the tokenizer, which stop strings need wherever they are set."""
        kwargs["tokenizer"] = self.moespeq_tokenizer
        return super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]


def _decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    streamer: Any = None,
    has_custom: bool = False,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """transformers' decoding method: input_ids [1, n] -> sequences [1, n + new]."""
    _check_supported(input_ids, generation_config, model_kwargs)
    engine: Engine = model.moespeq_engine
    prompt: list[int] = input_ids[0].tolist()
    if streamer is not None:
        streamer.put(input_ids.cpu())
    stream = engine.stream(
        prompt,
        generation_config=generation_config,
        sink=_CriteriaSink(input_ids, stopping_criteria, streamer),
        max_new_tokens=generation_config.max_length - len(prompt),
        seed=int(torch.randint(2**53, ())) if generation_config.do_sample else 0,
        **_processing(logits_processor, generation_config, has_custom),
    )
    for _ in stream:
        pass
    if streamer is not None:
        streamer.end()
    new = torch.tensor([stream.result.tokens], dtype=input_ids.dtype, device=input_ids.device)
    sequences = torch.cat([input_ids, new], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def _processing(processors: LogitsProcessorList, config: GenerationConfig, has_custom: bool) -> dict[str, Any]:
    """Sampling options that apply `processors`: our own where all are the config's, else each of them in its order.

    A custom processor may replace, precede or repeat a built-in of its class, so then ours are all turned off.
    """
    if not has_custom and all(type(processor) in _APPLIED_BY_US for processor in processors):
        return {}
    temperature = {"temperature": 1.0} if config.do_sample else {}
    return {"logits_processors": tuple(processors), **_OUR_OWN_OFF, **temperature}


def _check_supported(input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    if (config.num_beams or 1) > 1:
        raise UsageError(f"Beam search is not supported, got num_beams={config.num_beams}; leave it out.")
    if input_ids.shape[0] != 1:
        raise UsageError(
            f"One sequence at a time is supported, got a batch of {input_ids.shape[0]}; call generate for each."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise UsageError("inputs_embeds are not supported by speculative decoding; give input_ids.")
    seen = [name for name in _NOT_TAKEN if model_kwargs.get(name) is not None]
    if seen:
        raise UsageError(f"generate takes no {seen[0]} here; give images to Engine.chat, by way of Engine.images.")
    mask = model_kwargs.get("attention_mask")
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
