"""How each family writes a chat: its template as published, in few words, its markers, its ends, and one answer.

Tokenizers of the hub cannot be had in a test; a byte-level one with a family's markers added cuts text the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerFast

from families import tiny_tokenizer

__all__ = ["CHAT_FAMILIES", "TOOL", "ChatFamily", "Said", "chat_tokenizer"]

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "t": {"type": "string"}}},
    },
}
Calls = tuple[Mapping[str, Any], ...]
_TEMPLATES = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Said:
    """An answer as the model writes it, without its end, and what is to be read in it. calls: the arguments of each."""

    text: str
    content: str
    reasoning: str = ""
    calls: Calls = ()


@dataclass(frozen=True)
class ChatFamily:
    """prompt: of the question "Hi". special: markers that text leaves out. plain: markers of one token that it shows.

    ends: what ends an answer, the tokenizer's own first. tricky: a call whose text holds the marker that ends a call.
    """

    prompt: str
    ends: tuple[str, ...]
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    said: tuple[Said, ...] = ()
    tricky: Said | None = None
    bos: str | None = None


def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the family's markers behind its vocabulary."""
    family, tokenizer = CHAT_FAMILIES[name], tiny_tokenizer()
    markers = dict.fromkeys([*family.ends, *family.special, *([family.bos] if family.bos else [])], True)
    markers |= dict.fromkeys(family.plain, False)
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in markers.items()])
    tokenizer.eos_token = family.ends[0]
    if family.bos:
        tokenizer.bos_token = family.bos
    tokenizer.chat_template = (_TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


_CHATML_PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"

_ONE, _TWO = {"a": 1}, {"a": 2, "t": "x < y [0]"}
_ONE_JSON, _TWO_JSON = '{"a": 1}', '{"a": 2, "t": "x < y [0]"}'
_HERMES_CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "t": "x < y [0]"}}\n</tool_call>'
)
_THOUGHT = '<think>\nIs 1 < 2? "Yes"\n</think>\n\n'
_IS_TWO = 'Is 1 < 2? "Yes"'
_BOTH = (_ONE, _TWO)


def _tricky_hermes() -> Said:
    inside = 'a "</tool_call>" b \\ <tool_call> {'
    written = '{"name": "add", "arguments": {"a": 1, "t": "a \\"</tool_call>\\" b \\\\ <tool_call> {"}}'
    return Said(f"So: <tool_call>\n{written}\n</tool_call>", "So:", calls=({"a": 1, "t": inside},))


def _tricky_json(begin: str, end: str, next_marker: str) -> Said:
    """A call with arguments alone as JSON, whose text holds `end` and `next_marker`."""
    inside = f'a "{end.strip()}" {next_marker} b'
    written = inside.replace('"', '\\"')
    return Said(f'{begin}{{"a": 1, "t": "{written}"}}{end}', "", calls=({"a": 1, "t": inside},))


_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK: dict[str, Any] = {
    "bos": "<｜begin▁of▁sentence｜>",
    "ends": ("<｜end▁of▁sentence｜>",),
    "special": ("<｜User｜>", "<｜Assistant｜>"),
    "plain": (_CALLS, _CALLS_END, _CALL, _SEPARATOR, _CALL_END, "<think>", "</think>"),
}


def _v3_call(arguments: str) -> str:
    return f"{_CALL}function{_SEPARATOR}add\n```json\n{arguments}\n```{_CALL_END}"


_HARMONY_PROMPT = (
    "<|start|>system<|message|>You are ChatGPT.\n# Valid channels: analysis, commentary, final.<|end|>"
    "<|start|>user<|message|>Hi<|end|><|start|>assistant"
)
_ANALYSIS = '<|channel|>analysis<|message|>Is 1 < 2? "Yes"<|end|>'
_TO_ADD = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


_KIMI_CALL = "<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>"


_MISTRAL_MARKERS = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")


_IM = ("<|im_end|>", "<|endoftext|>")
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHAT_FAMILIES: dict[str, ChatFamily] = {
    "qwen3": ChatFamily(
        _CHATML_PROMPT,
        _IM,
        special=("<|im_start|>",),
        plain=_MARKS,
        said=(Said(f"{_THOUGHT}I add.\n{_HERMES_CALLS}", "I add.", _IS_TWO, _BOTH), Said("Hello < you", "Hello < you")),
        tricky=_tricky_hermes(),
    ),
    "qwen3_5": ChatFamily(
        _CHATML_PROMPT,
        _IM,
        special=("<|im_start|>",),
        plain=_MARKS,
        said=(
            Said(
                f"{_THOUGHT}I add.\n\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=t>\n"
                "x < y [0]\n</parameter>\n</function>\n</tool_call>",
                "I add.",
                _IS_TWO,
                (_TWO,),
            ),
        ),
    ),
    "deepseek_v3": ChatFamily(
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>",
        said=(
            Said(
                f"I add.{_CALLS}{_v3_call(_ONE_JSON)}\n{_v3_call(_TWO_JSON)}{_CALLS_END}",
                "I add.",
                calls=_BOTH,
            ),
        ),
        tricky=_tricky_json(f"{_CALLS}{_CALL}function{_SEPARATOR}add\n```json\n", f"\n```{_CALL_END}", _CALL),
        **_DEEPSEEK,
    ),
    "deepseek_v31": ChatFamily(
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>",
        said=(
            Said(
                f'Is 1 < 2? "Yes"</think>I add.{_CALLS}{_CALL}add{_SEPARATOR}{{"a": 1}}{_CALL_END}'
                f'{_CALL}add{_SEPARATOR}{{"a": 2, "t": "x < y [0]"}}{_CALL_END}{_CALLS_END}',
                "I add.",
                _IS_TWO,
                _BOTH,
            ),
        ),
        tricky=Said(
            f'</think>{_CALL}add{_SEPARATOR}{{"a": 1, "t": "{_CALL_END}{_CALL}"}}{_CALL_END}',
            "",
            calls=({"a": 1, "t": f"{_CALL_END}{_CALL}"},),
        ),
        **_DEEPSEEK,
    ),
    "gpt_oss": ChatFamily(
        _HARMONY_PROMPT,
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        special=("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>"),
        said=(
            Said(f"{_ANALYSIS}<|start|>assistant<|channel|>final<|message|>It is < 2.", "It is < 2.", _IS_TWO),
            Said(
                f"{_ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
                f'{_TO_ADD}{{"a": 2, "t": "x < y [0]"}}',
                "I add.",
                _IS_TWO,
                (_TWO,),
            ),
            Said(
                f'{_ANALYSIS}<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}',
                "",
                _IS_TWO,
                (_ONE,),
            ),
        ),
        tricky=_tricky_json(_TO_ADD, "", "<|end|><|channel|>final<|message|>"),
    ),
    "glm4_moe": ChatFamily(
        "[gMASK]<sop><|user|>\nHi<|assistant|>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        special=("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        plain=(*_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        said=(
            Said(
                f"\n{_THOUGHT}I add.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
                "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value><arg_key>t</arg_key>"
                "<arg_value>x < y [0]</arg_value></tool_call>\n<tool_call>add\n</tool_call>",
                "\nI add.",
                _IS_TWO,
                (*_BOTH, {}),
            ),
        ),
    ),
    "kimi": ChatFamily(
        "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>",
        ("<|im_end|>", "[EOS]"),
        special=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        plain=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
        ),
        said=(
            Said(
                f'I add.<|tool_calls_section_begin|>{_KIMI_CALL.format(0)}{{"a": 1}}<|tool_call_end|>'
                f'{_KIMI_CALL.format(1)}{{"a": 2, "t": "x < y [0]"}}<|tool_call_end|><|tool_calls_section_end|>',
                "I add.",
                calls=_BOTH,
            ),
        ),
        tricky=_tricky_json(_KIMI_CALL.format(0), "<|tool_call_end|>", "<|tool_call_begin|>"),
    ),
    "gemma": ChatFamily(
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        ("<eos>", "<end_of_turn>"),
        special=("<start_of_turn>",),
        bos="<bos>",
    ),
    "mistral": ChatFamily(
        "<s>[INST]Hi[/INST]",
        ("</s>",),
        special=(*_MISTRAL_MARKERS, "[ARGS]"),
        bos="<s>",
        said=(
            Said(
                'I add.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 2, "t": "x < y [0]"}',
                "I add.",
                calls=_BOTH,
            ),
        ),
        tricky=_tricky_json("[TOOL_CALLS]add[ARGS]", "", "[TOOL_CALLS]add[ARGS]"),
    ),
    "mixtral": ChatFamily(
        "<s>[INST]Hi[/INST]",
        ("</s>",),
        special=_MISTRAL_MARKERS,
        bos="<s>",
        said=(
            Said(
                '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, '
                '{"name": "add", "arguments": {"a": 2, "t": "x < y [0]"}}]',
                "",
                calls=_BOTH,
            ),
        ),
        tricky=Said(
            '[TOOL_CALLS][{"name": "add", "arguments": {"t": "[TOOL_CALLS]"}}]', "", calls=({"t": "[TOOL_CALLS]"},)
        ),
    ),
    "granite": ChatFamily(
        "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        ("<|end_of_text|>",),
        special=("<|start_of_role|>", "<|end_of_role|>"),
        plain=("<tool_call>", "</tool_call>"),
        said=(Said(f"I add.\n{_HERMES_CALLS}", "I add.", calls=_BOTH),),
        tricky=_tricky_hermes(),
    ),
    "hunyuan": ChatFamily(
        "<|startoftext|>Hi<|extra_0|>",
        ("<|eos|>",),
        special=("<|startoftext|>", "<|extra_0|>", "<|extra_4|>"),
        said=(
            Said(
                f'{_THOUGHT}I add.<tool_calls>\n<tool_call>add\n```json\n{{"a": 1}}\n```</tool_call>\n'
                '<tool_call>add\n```json\n{"a": 2, "t": "x < y [0]"}\n```</tool_call>\n</tool_calls>',
                "I add.",
                _IS_TWO,
                _BOTH,
            ),
        ),
        tricky=_tricky_json("<tool_call>add\n```json\n", "\n```</tool_call>", "<tool_call>"),
    ),
    "minimax_m2": ChatFamily(
        "]~!b[]~b]user\nHi[e~[\n]~b]ai\n<think>\n",
        ("[e~[",),
        special=("]~!b[", "]~b]"),
        plain=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        said=(
            Said(
                'Is 1 < 2? "Yes"\n</think>\n\nI add.\n<minimax:tool_call>\n<invoke name="add">\n'
                '<parameter name="a">1</parameter>\n</invoke>\n<invoke name="add">\n<parameter name="a">2</parameter>\n'
                '<parameter name="t">x < y [0]</parameter>\n</invoke>\n</minimax:tool_call>',
                "I add.",
                _IS_TWO,
                _BOTH,
            ),
        ),
    ),
    "nemotron_h": ChatFamily(
        "<s><SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\n<think>\n",
        ("</s>", "<SPECIAL_12>"),
        special=("<SPECIAL_10>", "<SPECIAL_11>"),
        bos="<s>",
        said=(
            Said(
                'Is 1 < 2? "Yes"\n</think>\n\nI add.\n<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}, '
                '{"name": "add", "arguments": {"a": 2, "t": "x < y [0]"}}]</TOOLCALL>',
                "I add.",
                _IS_TWO,
                _BOTH,
            ),
        ),
        tricky=Said(
            '</think><TOOLCALL>[{"name": "add", "arguments": {"t": "</TOOLCALL>"}}]</TOOLCALL>',
            "",
            calls=({"t": "</TOOLCALL>"},),
        ),
    ),
    "ernie4_5_moe": ChatFamily(
        "<|im_start|>system\n<|im_end|>\n\n<|im_start|>user\nHi<|im_end|>\n\n<|im_start|>assistant\n<think>\n",
        ("</s>", "<|im_end|>"),
        special=("<|im_start|>",),
        plain=_MARKS,
        said=(Said(f'Is 1 < 2? "Yes"\n</think>\n\n{_HERMES_CALLS}', "", _IS_TWO, _BOTH),),
    ),
    "phimoe": ChatFamily(
        "<|user|>\nHi<|end|>\n<|assistant|>\n",
        ("<|endoftext|>", "<|end|>"),
        special=("<|user|>", "<|assistant|>"),
    ),
    "lfm2_moe": ChatFamily(
        "<|startoftext|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ("<|im_end|>",),
        special=("<|im_start|>",),
        bos="<|startoftext|>",
    ),
    "llama4": ChatFamily(
        "<|begin_of_text|><|header_start|>user<|header_end|>\n\nHi<|eot|><|header_start|>assistant<|header_end|>\n\n",
        ("<|eot|>", "<|end_of_text|>", "<|eom|>"),
        special=("<|header_start|>", "<|header_end|>"),
        bos="<|begin_of_text|>",
    ),
    "olmoe": ChatFamily("<|endoftext|><|user|>\nHi\n<|assistant|>\n", ("<|endoftext|>",), bos="<|endoftext|>"),
    "dots1": ChatFamily(
        "<|system|>You are a helpful assistant.<|endofsystem|><|userprompt|>Hi<|endofuserprompt|><|response|>",
        ("<|endofresponse|>", "<|endoftext|>"),
        special=("<|system|>", "<|endofsystem|>", "<|userprompt|>", "<|endofuserprompt|>", "<|response|>"),
    ),
    "dbrx": ChatFamily(
        f"<|im_start|>system\nYou are DBRX, created by Databricks.<|im_end|>\n{_CHATML_PROMPT}",
        ("<|endoftext|>", "<|im_end|>"),
        special=("<|im_start|>",),
    ),
}
