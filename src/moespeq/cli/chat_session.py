"""The loop of a chat: a line is read, a command is done or an answer streamed, until the input ends.

Ctrl-C ends the answer that runs, after its round, and keeps what was said of it; a second one drops the answer at
once. At the prompt it empties the line. Only the end of the input and /exit end the loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from moespeq.cli.chat_commands import ChatCommands
from moespeq.config import format_count
from moespeq.errors import MoespeqError

if TYPE_CHECKING:
    from moespeq.decode.conversation import Conversation
    from moespeq.decode.generation import GenerationResult
    from moespeq.decode.stream import GenerationStream

__all__ = ["ChatSession", "read_line"]


class ChatSession:
    """answers: where text goes; say: shows a line that is none of the model's; on_answer: hears of every answer kept.

    read: the next line, EOFError at the end; wait: hears that nothing of an answer is there yet, and when that ends.
    """

    def __init__(
        self,
        conversation: Conversation,
        commands: ChatCommands,
        *,
        read: Callable[[], str],
        answers: TextIO,
        say: Callable[[str], None],
        on_answer: Callable[[GenerationResult], None],
        wait: Callable[[bool], None] = lambda is_waiting: None,
    ) -> None:
        self._conversation, self._commands = conversation, commands
        self._read, self._answers, self._say, self._on_answer = read, answers, say, on_answer
        self._wait = wait

    def run(self) -> int:
        """Talk until the input ends; returns how many lines failed."""
        num_failed = 0
        for line in self._lines():
            try:
                self._do(line)
            except MoespeqError as error:
                num_failed += 1
                self._say(str(error))
            if self._commands.is_over:
                break
        return num_failed

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                self._say("")
                self._say("/exit or Ctrl-D ends the chat.")
            except EOFError:
                return
            else:
                if line.strip():
                    yield line

    def _do(self, line: str) -> None:
        if line.startswith("/"):
            for shown in self._commands.run(line):
                self._say(shown)
            return
        stream = self._conversation.ask(line)
        try:
            self._wait(True)
            self._show(stream)
        finally:
            self._wait(False)
            self._answers.write("\n")
            self._answers.flush()
        if not stream.has_result:
            self._say("The answer was dropped, and its question with it.")
            return
        self._conversation.keep(line, stream.result)
        self._say_why_it_ended(stream.result)
        self._on_answer(stream.result)

    def _say_why_it_ended(self, result: GenerationResult) -> None:
        """Where the model did not end the answer itself."""
        num_tok, context_tok = len(result.tokens), self._conversation.context_tok
        if result.finish_reason.value == "cancelled":
            self._say(f"(interrupted after {format_count(num_tok, 'token')}; what was said is kept)")
        elif result.finish_reason.value == "length" and result.stats.prompt_tok + num_tok >= context_tok:
            self._say(f"(the context of {context_tok} tokens is full: /reset makes room, or a larger --ctx-size)")
        elif result.finish_reason.value == "length":
            self._say(f"(cut after {format_count(num_tok, 'token')}; /set max_new_tokens=N allows more)")

    def _show(self, stream: GenerationStream) -> None:
        """Write pieces as they come."""
        is_interrupted = False
        while True:
            try:
                for piece in stream:
                    self._wait(False)
                    self._answers.write(piece.text)
                    self._answers.flush()
                return
            except KeyboardInterrupt:
                stream.cancel()
                if is_interrupted:
                    stream.close()
                is_interrupted = True


def read_line(prompt: str) -> str:
    """A line of standard input, EOFError at its end; a terminal is shown `prompt`, on stderr where stdout is none."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")
    if not sys.stdout.isatty():
        if sys.stderr.isatty():
            sys.stderr.write(prompt)
            sys.stderr.flush()
        prompt = ""
    try:
        return input(prompt)
    except EOFError:
        sys.stderr.write("\n")  # or the shell's prompt comes behind ours
        raise
