"""What a client may ask, as OpenAI's API names it, checked for its shape.

Ranges are the engine's to check, so that they are said once. A field that we do not know is refused: a setting that is
silently ignored gives wrong answers. Those that change nothing in an answer are listed, and accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "Listed",
    "ResponseFormat",
    "StreamOptions",
    "Strict",
    "only",
]

T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""Read up to the first wrong item: a list may have a million of them."""
_StopText = Annotated[str, Field(min_length=1, max_length=1000)]
_MOST_STOPS = 64  # each is looked for in every piece of the text


def only(neutral: Any) -> AfterValidator:
    """Of a field that is known and not applied: it may have the value that changes nothing."""

    def check(given: Any) -> Any:
        if given is not None and given != neutral:
            raise ValueError("is not applied here; leave it out")
        return given

    return AfterValidator(check)


class Strict(BaseModel):
    """Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, given: Any) -> Any:
        """All that is known, and the first field that is not: a million of those would be a million errors."""
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in given if name not in known), None)
        return {name: value for name, value in given.items() if name in known or name == unknown}


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
    stop: _StopText | Annotated[Listed[_StopText], Field(max_length=_MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    # Accepted at the one value that means what we do.
    frequency_penalty: Annotated[Any, only(0)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    logit_bias: Annotated[Any, only({})] = None
    # Nothing in an answer depends on these.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. A prompt is text or token ids, or a list of either."""

    prompt: str | Listed[int] | Listed[str] | Listed[Listed[int]]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: Annotated[Any, only(1)] = None
    suffix: Annotated[Any, only("")] = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Listed[int]
