"""What mkdocs does not do by itself, so that nothing is written twice.

Pages of the repository's root join the site, the command line's reference is made from the Typer app and the table of
families from theirs, and a link that works on GitHub works here: to another page, or to a source file, which then comes
along; in HTML too, which mkdocs leaves as it is.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File
from typer import Context
from typer.main import get_command

from moespeq.cli.main import app
from moespeq.cli.manual import ManualGroup, example_of, paragraphs_of, params_by_panel
from moespeq.model.families import tell_families

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs"
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "repeat-benchmarks.md",
}
"""Paths in the repository, and in the site."""
_REPO_PATH = {site: repo for repo, site in ROOT_PAGES.items()}
_ATTRIBUTE = re.compile(r"""(?<=\s)((?:src|href)=)(["'])(?!\w+:|[#/])([^"'#]+)""")
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root."""
    for repo, site in ROOT_PAGES.items():
        files.append(File.generated(config, site, content=(ROOT / repo).read_text(encoding="utf-8")))
    return files


_log = logging.getLogger("mkdocs.hooks")  # whose warnings `strict` counts


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site, and make the reference."""
    here = page.file.src_uri
    folder = posixpath.dirname(_REPO_PATH.get(here, f"{DOCS}/{here}"))

    def site_path(link: str) -> str:
        """Where what is linked lies in the site; a source file comes along."""
        repo = posixpath.normpath(posixpath.join(folder, link))
        site = _site_path(repo)
        if files.get_file_from_path(site) is None and (ROOT / repo).is_file():
            files.append(File.generated(config, site, content=(ROOT / repo).read_bytes()))
        return site

    def relinked(match: re.Match[str]) -> str:
        return posixpath.relpath(site_path(match[1]), posixpath.dirname(here) or ".") + (match[2] or "")

    def readdressed(match: re.Match[str]) -> str:
        file = files.get_file_from_path(site_path(match[3]))
        if file is None:
            _log.warning("%s: %s%s%s%s is no file.", here, match[1], match[2], match[3], match[2])
            return match[0]
        return f"{match[1]}{match[2]}{file.url_relative_to(page.file)}"

    markdown = _ATTRIBUTE.sub(readdressed, _LINK.sub(relinked, markdown))
    return "\n".join([markdown, *_GENERATED[here]()]) if here in _GENERATED else markdown


def _site_path(repo: str) -> str:
    """Where a file of the repository lies in the site."""
    if repo in ROOT_PAGES:
        return ROOT_PAGES[repo]
    return repo.removeprefix(f"{DOCS}/") if repo.startswith(f"{DOCS}/") else f"source/{repo}"


def _families() -> Iterator[str]:
    """What `moespeq info --families` says."""
    yield from ("", "| family | |", "|---|---|")
    yield from (f"| {name} | {_cell(told)} |" for name, told in tell_families())


def _command_line() -> Iterator[str]:
    """A section for each command: what it does, its parameters by panel, its example."""
    group = get_command(app)
    yield from _commands(group, Context(group, info_name="moespeq"))


def _commands(group: Any, context: Context) -> Iterator[str]:
    for name, command in group.commands.items():
        own = Context(command, info_name=name, parent=context)
        if isinstance(command, ManualGroup):
            yield from _commands(command, own)
            continue
        yield from ("", f"### {own.command_path}", "", paragraphs_of(command.help))
        yield from ("", "```bash", *example_of(command.help), "```")
        for panel, rows in params_by_panel(command, own).items():
            yield from ("", f"| {panel} | |", "|---|---|")
            yield from (f"| `{_cell(declared)}` | {_cell(meaning)} |" for declared, meaning in rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("[default:", "[default:")


_GENERATED = {"cli.md": _command_line, "guides/add-a-family.md": _families}
"""Pages that go on with what the code says."""
