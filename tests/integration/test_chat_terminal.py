"""A chat at a real terminal: Ctrl-C ends the answer and not the program, Ctrl-D ends the program, lines are edited."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from pathlib import Path

from served import chat_model

WAIT_S = 120.0
CTRL_C, CTRL_D, UP = b"\x03", b"\x04", b"\x1b[A"
SAID = b"Tom has 5 apples."


class Terminal:
    """`moespeq` behind a pseudo-terminal that does not draw."""

    def __init__(self, *arguments: str, cache: Path) -> None:
        self._pid, self._descriptor = pty.fork()
        if self._pid == 0:
            environment = {**os.environ, "TERM": "dumb", "MOESPEQ_CACHE": str(cache)}
            os.execve(sys.executable, [sys.executable, "-m", "moespeq", *arguments], environment)
        self.shown = b""

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def wait_for(self, expected: bytes) -> bytes:
        """What is shown until `expected` has been, from where the last wait ended; that is then forgotten."""
        end = time.monotonic() + WAIT_S
        while expected not in self.shown:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {expected!r} in {self.shown!r}"
            self.shown += self._read()
        before, _, self.shown = self.shown.partition(expected)
        return before

    def press_until(self, key: bytes, expected: bytes) -> None:
        """Press `key`, and again as long as nothing comes of it: the line editor does not see a signal between keys."""
        self.type(key)
        while expected not in self.shown:
            if select.select([self._descriptor], [], [], 5.0)[0]:
                self.shown += self._read()
            else:
                self.type(key)
        self.wait_for(expected)

    def wait_for_more(self) -> None:
        """Until anything is shown."""
        while not self.shown:
            self.shown += self._read()

    def end(self) -> int:
        """The exit code, after all output."""
        while chunk := self._read():
            self.shown += chunk
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _read(self) -> bytes:
        try:
            return os.read(self._descriptor, 65536)
        except OSError:  # what Linux says at the end of a terminal
            return b""


def test_interrupts_end_an_answer_and_the_end_of_input_ends_the_chat(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "demo")
    options = ("--ctx-size", "2048", "--max-new-tokens", "1900", "--k", "0")
    terminal = Terminal("chat", str(model), *options, cache=tmp_path / "cache")
    terminal.wait_for(b"2048 tokens of context; /help")
    terminal.wait_for(b"> ")
    terminal.type(b"/set ignore_eos=true\n")
    terminal.wait_for(b"acceptance=coupled")
    terminal.wait_for(b"> ")
    terminal.type(SAID + b"\n")
    terminal.wait_for(SAID + b"\r\n")
    terminal.wait_for_more()
    terminal.type(CTRL_C)
    terminal.wait_for(b"(interrupted after ")
    terminal.wait_for(b"what was said is kept)")
    terminal.wait_for(b"> ")
    terminal.type(b"half a line")
    terminal.wait_for(b"half a line")
    terminal.press_until(CTRL_C, b"/exit or Ctrl-D ends the chat.")
    terminal.wait_for(b"> ")
    terminal.type(b"/stats\n")
    terminal.wait_for(b"all answers  1: ")
    terminal.wait_for(b"> ")
    terminal.type(UP)
    terminal.wait_for(b"/stats")
    terminal.type(b"\n")
    terminal.wait_for(b"all answers  1: ")
    terminal.wait_for(b"> ")
    terminal.type(CTRL_D)
    assert terminal.end() == 0
    assert terminal.shown.endswith(b"\r\n")
    assert b"Traceback" not in terminal.shown
