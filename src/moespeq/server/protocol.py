"""What a client may ask, as OpenAI's API names it, checked for its shape.

Ranges are the engine's to check, so that they are said once. A field that we do not know is refused: a setting that is
silently ignored gives wrong answers. Those that change nothing in an answer are listed, and accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "ResponseFormat",
    "StreamOptions",
    "Strict",
]

_StopText = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(Strict):
    """include_usage: a last chunk counts the tokens."""

    include_usage: bool = False


class JsonSchema(Strict):
    """The schema an answer must match; it is always enforced, `strict` or not."""

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Strict):
    """text: anything; json_object: some JSON object; json_schema: JSON that the schema admits."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(Strict):
    """What both ways to ask have in common; None is "not given", and the checkpoint's own default."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: _StopText | list[_StopText] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    # Accepted at the one value that means what we do.
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=0)
    # Nothing in an answer depends on these.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. A prompt is text or token ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
