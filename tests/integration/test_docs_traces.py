"""Every command of docs/traces.md runs as it is written, in order, from the repository root."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moespeq.demo.assets import MODEL_FOLDER

Cli = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """What a shell makes of each line; $'...' holds one escape, a new line."""
    text = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    return [
        shlex.split(re.sub(r"\$'(.*?)'", lambda match: shlex.quote(match[1].replace(r"\n", "\n")), line))
        for line in lines
    ]


def test_every_command_of_the_page_runs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    shutil.copytree(MODEL_FOLDER, tmp_path / "src/moespeq/demo/model")
    monkeypatch.chdir(tmp_path)
    mkdir, *others = commands()
    subprocess.run(mkdir, check=True)
    for program, *arguments in others:
        code, out, err = cli(*arguments)
        assert (program, code) == ("moespeq", 0), err
        if "--json" in arguments:
            json.loads(out)
    assert (tmp_path / "build/traces/demo.json").exists()
    assert len(list((tmp_path / "build/traces/figures").iterdir())) == 8


def test_the_page_shows_every_command_about_traces() -> None:
    assert {tuple(arguments[1:3]) for arguments in commands()[1:]} == {
        ("trace", "record"),
        ("trace", "show"),
        ("trace", "replay"),
    }
