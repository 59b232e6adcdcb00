"""What a client may ask of a chat: messages, tools, and how both reach the chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field

from moespeq.errors import UsageError
from moespeq.model.images import PreparedImage
from moespeq.server.failures import FieldError
from moespeq.server.protocol import GenerationRequest, Listed, Strict, only

__all__ = ["ChatRequest", "Message", "TokenizeRequest", "Tool", "ToolChoice"]


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """url: a data URL, or where the server fetches images, an address."""

    url: str
    detail: Annotated[Any, only("auto")] = None


class ImagePart(Strict):
    """An image between the text of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class CalledFunction(Strict):
    """arguments: JSON, as an answer has it."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """A turn of a conversation. What an answer of ours holds may be sent back as it is."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Listed[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Annotated[Any, only(None)] = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only(None)] = None
    function_call: Annotated[Any, only(None)] = None

    def for_template(self, read: Callable[[str], PreparedImage]) -> dict[str, Any]:
        """As `Engine.encode_chat` takes it: the arguments of calls are values, and URLs are `read`. Raises UsageError
        where there is no content.
        """
        if self.content is None and not self.tool_calls and not self.reasoning_content:
            raise UsageError(f"A message of role '{self.role}' has no content; give it one, even an empty one.")
        given: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if isinstance(self.content, list):
            given["content"] = [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": "image", "image": read(part.image_url.url)}
                for part in self.content
            ]
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        if self.tool_calls:
            given["tool_calls"] = [_for_template(call) for call in self.tool_calls]
        return given


def _for_template(call: ToolCall) -> dict[str, Any]:
    """Arguments that are no JSON are the text that the model wrote in their place."""
    arguments: Any = call.function.arguments
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments or "{}")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


class Function(Strict):
    """parameters: a JSON schema; strict: a call's arguments must match it."""

    name: str = Field(min_length=1, pattern=r"^[\w.-]+$")
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None


class Tool(Strict):
    """What the model may call."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = self.function
        told = {} if function.description is None else {"description": function.description}
        return {"type": "function", "function": {"name": function.name, **told, "parameters": function.parameters}}


class NamedFunction(Strict):
    name: str


class ToolChoice(Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. chat_template_kwargs: variables of the model's own template, as enable_thinking."""

    messages: Annotated[Listed[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def usable_tools(self) -> list[Tool]:
        """Those that may be called. Raises UsageError where the choice names another one, or asks for one of none."""
        names = [tool.function.name for tool in self.tools or []]
        if isinstance(self.tool_choice, ToolChoice):
            wanted = self.tool_choice.function.name
            if wanted not in names:
                sentence = f"tool_choice names '{wanted:.60}', which is not among the tools; add it to them."
                raise FieldError(sentence, "tool_choice")
            return [tool for tool in self.tools or [] if tool.function.name == wanted]
        if self.tool_choice == "required" and not names:
            raise FieldError("tool_choice is 'required', and there are no tools; add some.", "tool_choice")
        return [] if self.tool_choice == "none" else list(self.tools or [])

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)


class TokenizeRequest(Strict):
    """POST /tokenize: of a text, or of a conversation by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Listed[Message], Field(min_length=1)] | None = None
    tools: Listed[Tool] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool = True
