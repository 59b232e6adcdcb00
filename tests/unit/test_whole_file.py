"""Files that people keep are written whole or not at all."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moespeq.cli.trace_show import _write
from moespeq.decode.timeline import write_timeline
from moespeq.errors import MoespeqError
from moespeq.figures.canvas import sheet
from moespeq.plan.profile import DiskRate, MachineProfile
from moespeq.replay.findings import findings
from moespeq.replay.study import study_trace
from moespeq.whole_file import write_whole
from synthetic_trace import synthetic_trace

Write = Callable[[Path], None]
TRACE = synthetic_trace(2, 4, 2, 24, stickiness=0.4, fidelity=0.8, same_set=0.1, acceptance=0.8)


def draw(path: Path) -> None:
    pytest.importorskip("matplotlib")
    with sheet(path, title="Title", caption="Caption"):
        pass


def show(path: Path) -> None:
    pytest.importorskip("matplotlib")
    study = study_trace(TRACE)
    _write(TRACE, study, findings(study), path.parent)


WRITERS: dict[str, Write] = {
    "any.txt": lambda path: write_whole(path, "longer than there is room"),
    "profile.json": MachineProfile("cpu", {}, {65536: 1e9}, (DiskRate(1, 1e9, False),)).save,
    "t.trace": TRACE.write,
    "t.json": lambda path: write_timeline([], path),
    "study.json": show,
    "figure.svg": draw,
}


@contextmanager
def no_room() -> Iterator[None]:
    """Of a file only three bytes can be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", WRITERS)
def test_where_there_is_no_room_an_earlier_file_stays_and_no_part_of_a_new_one(name: str, tmp_path: Path) -> None:
    earlier, new = tmp_path / "earlier" / name, tmp_path / "new" / name
    for path in (earlier, new):
        path.parent.mkdir()
    WRITERS[name](earlier)
    before = {path: path.read_bytes() for path in earlier.parent.iterdir()}
    for path in (earlier, new):
        with no_room(), pytest.raises((OSError, MoespeqError), match="File too large"):
            WRITERS[name](path)
    assert {path: path.read_bytes() for path in earlier.parent.iterdir()} == before
    assert list(new.parent.iterdir()) == []


def test_an_interrupt_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere") as error:
        write_whole(tmp_path / "nowhere" / "file", "new")
    assert error.value.filename == str(tmp_path / "nowhere" / "file")


def test_a_file_written_again_keeps_its_mode_and_a_long_name_is_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)
    write_whole(path, json.dumps(["old"]))
    path.chmod(0o600)
    write_whole(path, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


def test_a_link_in_the_place_of_the_file_beside_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write into the folder could otherwise choose which file is overwritten."""
    monkeypatch.setattr("moespeq.whole_file.secrets.token_hex", lambda _: "guessed")
    other = tmp_path / "other"
    other.write_text("kept")
    planted = tmp_path / ".moespeq-guessed.partial"
    planted.symlink_to(other)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "file", "new")
    assert other.read_text() == "kept"
    assert planted.is_symlink()
