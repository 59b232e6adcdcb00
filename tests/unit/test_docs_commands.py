"""Every command of README and docs is one that the program takes: a renamed option fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from command_tree import COMMANDS, parse, words_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guides").glob("*.md"))]
FENCE = re.compile(r"^ *```", re.MULTILINE)
INLINE = re.compile(r"`(moespeq [^`]*)`")
PLACEHOLDERS = re.compile(r"\b[A-Z]{3,}\b|\.\.\.|--help|--install-completion")


def lines_of(page: Path) -> list[str]:
    """The command lines in a page's blocks."""
    blocks = FENCE.split(page.read_text(encoding="utf-8"))[1::2]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("moespeq ") and "--help" not in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_of_a_page_parses(page: Path) -> None:
    for line in lines_of(page):
        parse(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_mentions_exists_with_its_options(page: Path) -> None:
    for mention in INLINE.findall(page.read_text(encoding="utf-8")):
        words = [word for word in words_of(mention)[1:] if not PLACEHOLDERS.search(word)]
        if not words or (words[0] == "trace" and len(words) == 1):
            continue
        path = tuple(words[:2]) if words[0] == "trace" else tuple(words[:1])
        assert path in COMMANDS, mention
        known = {name for param in COMMANDS[path].params for name in (*param.opts, *param.secondary_opts)}
        assert {word for word in words if word.startswith("-")} <= known, mention


def test_the_quick_start_shows_every_command() -> None:
    shown = {tuple(line.split()[1:3]) for line in lines_of(ROOT / "docs" / "quick-start.md")}
    names = {words if words[0] == "trace" else words[:1] for words in shown}
    assert names >= {*COMMANDS} - {("doctor",), ("upgrade",)}  # a newcomer has nothing to mend or upgrade


def test_the_index_of_decisions_names_every_one_by_its_title() -> None:
    folder = ROOT / "docs" / "adr"
    titles = {page.name: page.read_text(encoding="utf-8").splitlines()[0][2:] for page in folder.glob("0*.md")}
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^- \[(.*)\]\((.*)\)$", index, re.MULTILINE) == [
        (title, name) for name, title in sorted(titles.items())
    ]
