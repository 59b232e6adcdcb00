"""What a line that begins with a slash does to a conversation. Knows no terminal: lines in, lines out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moespeq.cli.generation_text import rounds_text, speed_text
from moespeq.config import format_count, nearest_name
from moespeq.decode.conversation import SETTINGS, Conversation
from moespeq.errors import UsageError
from moespeq.model.image_file import read_image_file
from moespeq.whole_file import write_whole

__all__ = ["ChatCommands"]

_HELP = (
    ("/help", "these lines"),
    ("/reset", "forget what was said; system message and settings stay"),
    ("/system [TEXT]", "system message from the next answer on; no TEXT: none"),
    ("/image [PATH]", "the next question is about it too; no PATH: about none"),
    ("/set [NAME=VALUE ...]", "sampling: temperature=0.7 or =default; alone, show it"),
    ("/stats", "what the last answer and all answers took"),
    ("/save FILE", "write the conversation as JSON"),
    ("/exit", "end; so does Ctrl-D. Ctrl-C ends an answer"),
)
_DEFAULT = "default"


class ChatCommands:
    """Runs commands on one conversation. `is_over` after /exit."""

    def __init__(self, conversation: Conversation, model: str) -> None:
        self._conversation, self._model = conversation, model
        self._saved: set[Path] = set()
        self.is_over = False
        self._commands: dict[str, Callable[[str], Iterator[str]]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._system,
            "/image": self._image,
            "/set": self._set,
            "/stats": self._stats,
            "/save": self._save,
            "/exit": self._exit,
        }

    def run(self, line: str) -> list[str]:
        """Do what `line` says and return what to show. Raises UsageError."""
        name, _, argument = line.strip().partition(" ")
        command = self._commands.get(name)
        if command is None:
            advice = nearest_name(name, list(self._commands)) or " /help lists the commands."
            raise UsageError(f"Unknown command '{name}'.{advice}")
        return list(command(argument.strip()))

    def _help(self, _: str) -> Iterator[str]:
        width = max(len(usage) for usage, _ in _HELP)
        yield from (f"{usage:<{width}}  {meaning}" for usage, meaning in _HELP)

    def _reset(self, _: str) -> Iterator[str]:
        self._conversation.reset()
        yield "The conversation begins anew."

    def _system(self, text: str) -> Iterator[str]:
        self._conversation.set_system(text)
        yield "The system message is set." if text else "There is no system message."

    def _image(self, path: str) -> Iterator[str]:
        if path:
            self._conversation.attach(read_image_file(path), path)
            yield "The next question is about this image too."
        else:
            yield f"{format_count(self._conversation.detach(), 'image')} taken back."

    def _set(self, argument: str) -> Iterator[str]:
        self._conversation.set(dict(_assignment(word) for word in argument.split()))
        params = self._conversation.settings
        shown = {name: getattr(params, name) for name in SETTINGS}
        yield " ".join(f"{name}={_shown(value)}" for name, value in shown.items())

    def _stats(self, _: str) -> Iterator[str]:
        last, totals = self._conversation.last, self._conversation.totals
        if last is None:
            yield "There was no answer yet."
            return
        yield f"last answer  {speed_text(last.tokens_per_s)} after {last.ttft_s:.2f} s, seed {last.seed}"
        yield f"  prompt     {format_count(last.prompt_tok, 'token')}, {last.reused_tok} of them in the cache already"
        yield f"  rounds     {rounds_text(last)}"
        yield f"  experts    {last.hits} hits, {last.late} late, {last.misses} misses"
        answer_tok = format_count(totals.answer_tok, "token")
        yield f"all answers  {totals.answers}: {answer_tok}, {speed_text(totals.tokens_per_s)}"
        yield f"  prompts    {format_count(totals.prefilled_tok, 'token')} prefilled, {totals.reused_tok} reused"
        yield f"context      {self._conversation.used_tok} of {self._conversation.context_tok} tokens used"

    def _save(self, argument: str) -> Iterator[str]:
        if not argument:
            raise UsageError("/save needs the name of a file to write.")
        saved = {"model": self._model, "messages": self._conversation.messages}
        text = json.dumps(saved, indent=1, ensure_ascii=False) + "\n"
        try:
            path = Path(argument).expanduser()
            place = path.resolve()
            if path.exists() and place not in self._saved:
                raise UsageError(f"{path} exists already; give another name.")
            is_new_folder = not place.parent.exists()
            if is_new_folder:
                place.parent.mkdir(parents=True)
            write_whole(path, text.encode(errors="replace"))
        except (OSError, ValueError, RuntimeError) as error:  # of the disk, of a NUL in the name, of an unknown ~user
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise UsageError(f"{argument} cannot be written ({reason}); give another name.") from error
        self._saved.add(place)
        if is_new_folder:
            yield f"The folder {place.parent} was made."
        yield f"{path} holds {format_count(len(self._conversation.messages), 'message')}."

    def _exit(self, _: str) -> Iterator[str]:
        self.is_over = True
        yield from ()


def _assignment(word: str) -> tuple[str, Any]:
    """`name=value`: a number, true, false, a JSON value, else text; `default` is None."""
    name, equals, text = word.partition("=")
    if not equals or not text:
        raise UsageError(f"'{word}' sets nothing; write it like temperature=0.7.")
    if text == _DEFAULT:
        return name, None
    try:
        return name, json.loads(text)
    except (ValueError, RecursionError):
        return name, text


def _shown(value: object) -> str:
    """As it would be typed."""
    if value is None or value == ():
        return _DEFAULT
    return value if isinstance(value, str) else json.dumps(value)
