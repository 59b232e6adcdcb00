"""Talking with a model: turns, commands, settings, and Ctrl-C, which ends an answer and not the chat."""

from __future__ import annotations

import io
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import open_tight
from moespeq.cli.chat_commands import ChatCommands
from moespeq.cli.chat_session import ChatSession
from moespeq.decode.conversation import Conversation
from moespeq.decode.engine import Engine
from moespeq.errors import UsageError

Cli = Callable[..., tuple[int, str, str]]
FIRST, SECOND = "A router sends every token", "to the experts it likes"


@pytest.fixture(scope="module")
def engine(tiny_store: Path) -> Iterator[Engine]:
    with open_tight(tiny_store, 12, k=4, ctx_size=512) as opened:
        yield opened


@pytest.fixture
def conversation(engine: Engine) -> Conversation:
    engine.generate("something else in between", max_new_tokens=2)
    return Conversation(engine, max_new_tokens=12, ignore_eos=True)


def talk(conversation: Conversation, *lines: str, answers: io.StringIO | None = None) -> tuple[str, list[str]]:
    """What the model said, and what else was shown."""
    typed, shown, text = iter(lines), list[str](), answers or io.StringIO()

    def read() -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    session = ChatSession(
        conversation,
        ChatCommands(conversation, "tiny"),
        read=read,
        answers=text,
        say=shown.append,
        on_answer=lambda result: None,
    )
    session.run()
    return text.getvalue(), shown


def roles(conversation: Conversation) -> list[str]:
    return [message["role"] for message in conversation.messages]


def test_an_answer_is_the_one_that_the_whole_conversation_gets(engine: Engine, conversation: Conversation) -> None:
    talk(conversation, FIRST, SECOND)
    assert roles(conversation) == ["user", "assistant"] * 2
    *before, last = conversation.messages
    assert engine.chat(before, max_new_tokens=12, ignore_eos=True).text == last["content"]


def test_a_turn_prefills_only_what_is_new(conversation: Conversation) -> None:
    talk(conversation, FIRST)
    first = conversation.last
    talk(conversation, SECOND)
    second = conversation.last
    assert first is not None
    assert second is not None
    assert second.reused_tok >= first.prompt_tok
    assert conversation.totals.reused_tok == second.reused_tok
    assert conversation.totals.prefilled_tok == first.prompt_tok + second.prompt_tok - second.reused_tok


def test_reset_forgets_what_was_said_and_keeps_the_system_message(conversation: Conversation) -> None:
    talk(conversation, "/system Be brief.", FIRST, "/reset")
    assert roles(conversation) == ["system"]
    talk(conversation, FIRST, "/system")
    assert roles(conversation) == ["user", "assistant"]


def test_set_changes_how_answers_are_sampled_and_default_takes_it_back(conversation: Conversation) -> None:
    _, shown = talk(conversation, "/set temperature=0.7 top_k=5 stop=END acceptance=rejection seed=3", "/set")
    assert "temperature=0.7" in shown[0]
    assert shown[0] == shown[1]
    params = conversation.settings
    assert (params.temperature, params.top_k, params.stop, params.seed) == (0.7, 5, ("END",), 3)
    talk(conversation, "/set temperature=default")
    assert conversation.settings.temperature == 0.0
    assert conversation.settings.top_k == 5


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/set temprature=1", "Did you mean 'temperature'"),
        ("/set temperature=-1", "temperature must be"),
        ("/set top_k=2.5", "top_k must be"),
        ("/set temperature", "write it like temperature=0.7"),
        ("/set logits_processors=1", "Unknown setting"),
        ("/set foo=1", "Settings are max_new_tokens, min_new_tokens, temperature, "),
        ("/rest", "Did you mean '/reset'"),
        ("/", "/help lists"),
        ("/save", "needs the name of a file"),
        ("/save /dev/null/chat.json", "cannot be written (Not a directory)"),
        ("/save ~nosuchuser/chat.json", "cannot be written (Could not determine home directory)"),
        ("/save chat\0.json", "cannot be written (embedded null byte)"),
        (f"/save {'a' * 300}", "cannot be written (File name too long)"),
        (f"/set temperature={'[' * 20_000}", "temperature must be"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_changes_nothing(
    conversation: Conversation, line: str, sentence: str
) -> None:
    before = conversation.settings
    _, shown = talk(conversation, line)
    assert len(shown) == 1
    assert sentence in shown[0]
    assert conversation.settings == before


def test_a_chat_goes_on_behind_a_question_that_is_too_long(conversation: Conversation) -> None:
    _, shown = talk(conversation, "word " * 600, FIRST)
    assert "/reset makes room" in shown[0]
    assert roles(conversation) == ["user", "assistant"]


def test_a_saved_chat_is_its_messages_and_other_files_are_left_alone(
    conversation: Conversation, tmp_path: Path
) -> None:
    saved, other = tmp_path / "chat.json", tmp_path / "other.json"
    other.write_text("mine")
    _, shown = talk(conversation, FIRST, f"/save {saved}", SECOND, f"/save {saved}", f"/save {other}")
    assert "exists already" in shown[-1]
    assert other.read_text() == "mine"
    assert json.loads(saved.read_text()) == {"model": "tiny", "messages": conversation.messages}


def test_a_folder_that_a_save_needs_is_made_and_told(conversation: Conversation, tmp_path: Path) -> None:
    saved = tmp_path / "new" / "a folder" / "chat.json"
    _, shown = talk(conversation, f"/save {saved}", f"/save {saved}")
    assert shown == [f"The folder {saved.parent} was made.", *[f"{saved} holds 0 messages."] * 2]


def test_a_save_that_fails_leaves_the_earlier_one(conversation: Conversation, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    commands = ChatCommands(conversation, "tiny")
    commands.run(f"/save {path}")
    before, limits = path.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, limits[1]))
    try:
        with pytest.raises(UsageError, match="cannot be written"):
            commands.run(f"/save {path}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_stats_say_what_was_reused_and_how_full_the_context_is(conversation: Conversation) -> None:
    _, shown = talk(conversation, "/stats", FIRST, SECOND, "/stats")
    assert shown[0] == "There was no answer yet."
    last = conversation.last
    assert last is not None
    assert f"{last.reused_tok} of them in the cache already" in "\n".join(shown)
    assert f"{last.prompt_tok + 12} of 512 tokens used" in shown[-1]


def test_after_a_reset_the_context_is_empty(conversation: Conversation) -> None:
    _, shown = talk(conversation, FIRST, "/reset", "/stats")
    assert "0 of 512 tokens used" in shown[-1]


def test_an_answer_without_a_round_has_no_figures_of_one(conversation: Conversation) -> None:
    _, shown = talk(conversation, "/set max_new_tokens=1", FIRST, "/stats")
    text = "\n".join(shown[1:])
    assert "(cut after 1 token;" in text
    assert "last answer  - tok/s" in text
    assert "no round was needed" in text
    assert "committed" not in text


def test_an_answer_that_was_cut_says_what_allows_more(conversation: Conversation) -> None:
    _, shown = talk(conversation, FIRST)
    assert shown == ["(cut after 12 tokens; /set max_new_tokens=N allows more)"]
    conversation.set({"max_new_tokens": None})
    _, shown = talk(conversation, FIRST)
    assert shown == ["(the context of 512 tokens is full: /reset makes room, or a larger --ctx-size)"]


def test_lines_about_the_chat_fit_a_terminal(conversation: Conversation) -> None:
    _, shown = talk(conversation, FIRST, "/help", "/stats")
    assert max(map(len, shown)) <= 80


def test_exit_ends_the_chat_and_help_names_every_command(conversation: Conversation) -> None:
    said, shown = talk(conversation, "/help", "/exit", FIRST)
    assert said == ""
    assert [line.split()[0] for line in shown] == list(ChatCommands(conversation, "tiny")._commands)


class Interrupting(io.StringIO):
    """Where an answer goes, and where Ctrl-C arrives while the n-th pieces of it are written."""

    def __init__(self, *pieces: int) -> None:
        super().__init__()
        self._pieces, self._num_written = pieces, 0

    def write(self, text: str) -> int:
        self._num_written += 1
        if self._num_written in self._pieces:
            raise KeyboardInterrupt
        return super().write(text)


def test_an_interrupt_ends_the_answer_keeps_it_and_the_chat_goes_on(conversation: Conversation) -> None:
    conversation.set({"max_new_tokens": 200})
    _, shown = talk(conversation, FIRST, answers=Interrupting(3))
    assert shown[0].startswith("(interrupted after ")
    assert roles(conversation) == ["user", "assistant"]
    conversation.set({"max_new_tokens": 6})
    talk(conversation, SECOND)
    assert roles(conversation) == ["user", "assistant"] * 2


def test_an_answer_interrupted_twice_is_dropped_with_its_question(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = conversation._engine.stream
    rounds = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        one = stream(*args, **kwargs)
        honest = one._generation._loop.propose

        def propose(*args: Any) -> Any:
            nonlocal rounds
            rounds += 1
            if rounds == 2:
                raise KeyboardInterrupt
            return honest(*args)

        monkeypatch.setattr(one._generation._loop, "propose", propose)
        return one

    monkeypatch.setattr(conversation._engine, "stream", interrupted)
    _, shown = talk(conversation, FIRST)
    assert shown == ["The answer was dropped, and its question with it."]
    assert roles(conversation) == []
    talk(conversation, SECOND)
    assert roles(conversation) == ["user", "assistant"]


def test_an_interrupt_at_the_prompt_only_says_how_to_leave(conversation: Conversation) -> None:
    _, shown = talk(conversation, "^C", "  ", FIRST)
    assert any("Ctrl-D" in line for line in shown)
    assert roles(conversation) == ["user", "assistant"]


def test_an_unknown_setting_is_refused_at_the_start(engine: Engine) -> None:
    with pytest.raises(UsageError, match="Unknown setting 'tempo'"):
        Conversation(engine, tempo=1)


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode())))


def test_the_command_answers_line_by_line(cli: Cli, tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, FIRST, "/stats", SECOND)
    code, out, err = cli("chat", tiny_store, "-n", "8", "--seed", "3")
    assert code == 0
    assert out.count("\n") >= 2
    assert "tokens used" in err


def test_json_is_one_object_an_answer(cli: Cli, tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, FIRST, SECOND)
    code, out, _ = cli("chat", tiny_store, "-n", "8", "--json", "--system", "Be brief.")
    first, second = map(json.loads, out.splitlines())
    assert code == 0
    assert second["reused_tokens"] > first["reused_tokens"] == 0
    assert [message["role"] for message in second["messages"]] == ["system", *["user", "assistant"] * 2]
    assert second["messages"][-1]["content"] == second["text"]


def test_a_script_learns_that_a_line_failed(cli: Cli, tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "/rest", FIRST)
    code, out, err = cli("chat", tiny_store, "-n", "8")
    assert (code, bool(out.strip())) == (2, True)
    assert "Did you mean '/reset'" in err
