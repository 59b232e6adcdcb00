"""A link that works on GitHub works on the site, in HTML as in Markdown, and one to nothing is a warning."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("mkdocs")

from mkdocs.config.base import load_config
from mkdocs.structure.files import Files, get_files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    found = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Files]:
    """The configuration without plugins, and the files of the documentation."""
    written = tmp_path_factory.mktemp("site") / "mkdocs.yml"
    written.write_text(f"site_name: s\ndocs_dir: {ROOT / 'docs'}\nplugins: []\n")
    config = load_config(str(written))
    return config, get_files(config)


def rewritten(hooks: ModuleType, site: tuple[Any, Files], name: str, markdown: str) -> str:
    config, files = site
    file = files.get_file_from_path(name)
    assert file is not None
    return str(hooks.on_page_markdown(markdown, Page(None, file, config), config, files))


@pytest.mark.parametrize(
    ("page", "markdown", "expected"),
    [
        ("dashboard.md", '<img src="images/dashboard-narrow.webp" width="9">', 'src="../images/dashboard-narrow.webp"'),
        ("dashboard.md", "<a href='plan.md'>plan</a>", "href='../plan/'"),
        ("dashboard.md", '<a href="plan.md#what">plan</a>', 'href="../plan/#what"'),
        ("adr/README.md", '<a href="../plan.md">plan</a>', 'href="../plan/"'),
        ("dashboard.md", '<img src="https://a.example/b.png">', 'src="https://a.example/b.png"'),
        ("dashboard.md", "[plan](plan.md#what)", "[plan](plan.md#what)"),
    ],
)
def test_links_lead_where_they_lead_in_the_repository(
    hooks: ModuleType, site: tuple[Any, Files], page: str, markdown: str, expected: str
) -> None:
    assert expected in rewritten(hooks, site, page, markdown)


def test_html_that_names_no_file_is_a_warning(
    hooks: ModuleType, site: tuple[Any, Files], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mkdocs.hooks"):
        rewritten(hooks, site, "dashboard.md", '<img src="images/none.webp">')
    assert "images/none.webp" in caplog.text


def test_the_page_on_families_ends_with_the_table_of_all(hooks: ModuleType, site: tuple[Any, Files]) -> None:
    page = rewritten(hooks, site, "guides/add-a-family.md", "Before.")
    assert page.startswith("Before.\n\n| family | |\n|---|---|\n| afmoe | supported |\n")
    assert "| llama4 | supported, with a shim of ours |" in page
    assert page.splitlines()[-1].startswith("| qwen4_exp | its embedding of several tokens")
