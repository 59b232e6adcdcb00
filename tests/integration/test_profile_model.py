"""A model is profiled through the engine; the command asks first, measures then, and writes what the planner reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from moespeq import profiling
from moespeq.cli.main import run
from moespeq.plan.profile import DiskRate, MachineProfile, ModelTimes, default_profile_path

Profile = Callable[..., tuple[int, str, str]]
EARLIER = MachineProfile(
    "cpu", {}, {65536: 5e8}, (DiskRate(1, 5e8, True),), (ModelTimes("earlier", 0.1, {17: 0.2}, 1e9),)
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine that is measured in no time; what was measured of it."""
    asked: list[str] = []

    def copies(device: object, is_pinned: bool) -> dict[int, float]:
        asked.append("copies")
        return {65536: 1e9}

    def reads(store: object, num_bytes: int, say: object) -> tuple[DiskRate, ...]:
        asked.append("disk")
        return (DiskRate(1, 1e9, True),)

    monkeypatch.setattr(profiling, "measure_copies", copies)
    monkeypatch.setattr(profiling, "_disk_rates", reads)
    return asked


@pytest.fixture
def profile(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Profile:
    """Runs `moespeq profile --device cpu`: (exit code, stdout, stderr)."""
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path / "cache"))

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moespeq", "profile", "--device", "cpu", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def open_files(pid: int) -> Iterator[str]:
    """What the open files of a process are, those without a name too."""
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield os.readlink(file)  # noqa: PTH115 - a path would lose what is said of a file without a name


def read(path: Path) -> MachineProfile:
    found = MachineProfile.load(path)
    assert found is not None
    return found


def test_the_command_times_a_model_and_writes_the_profile(profile: Profile, tiny_store: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "profile.json"
    code, text, _ = profile(tiny_store, "--out", out, "--rows", "17")
    assert code == 0
    (times,) = read(out).models
    assert list(times.verify_s) == [17]
    assert min(times.draft_s_per_tok, times.verify_s[17], times.decode_bytes_per_s) > 0
    assert f"model               {times.model}" in text
    assert "verify    17 rows" in text
    assert f"written to {out}" in text


def test_json_prints_the_profile_on_one_line(profile: Profile, tmp_path: Path) -> None:
    _, text, _ = profile("--json")
    assert json.loads(text) == json.loads((tmp_path / "cache" / "profile.json").read_text())


def test_times_of_models_stay_when_the_machine_or_another_model_is_measured(
    profile: Profile, tiny_store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "profile.json"
    EARLIER.save(out)
    _, _, said = profile("--out", out)
    assert "kept the times of earlier, measured earlier" in said
    assert read(out).models == EARLIER.models
    assert read(out).pageable_copy == {65536: 1e9}
    profile(tiny_store, "--out", out)
    assert [times.model for times in read(out).models] == ["earlier", "checkpoint"]


def test_a_profile_of_another_device_is_kept_unless_its_file_is_named(profile: Profile) -> None:
    path = default_profile_path()
    path.parent.mkdir(parents=True)
    replace(EARLIER, device="Some GPU").save(path)
    code, _, said = profile()
    assert (code, "the profile of Some GPU; give --out" in " ".join(said.split())) == (2, True)
    assert read(path).device == "Some GPU"


def test_a_profile_of_another_device_is_replaced_and_one_of_another_version_too(
    profile: Profile, tmp_path: Path
) -> None:
    out = tmp_path / "profile.json"
    replace(EARLIER, device="Some GPU").save(out)
    _, _, said = profile("--out", out)
    assert "replaced a profile of Some GPU" in said
    assert read(out).models == ()
    out.write_text(json.dumps({**json.loads(EARLIER.to_json()), "schema": 1}))
    assert profile("--out", out)[0] == 0
    assert read(out).device == "cpu"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("none/at/all",), "none/at/all does not exist"),
        (("--out", "."), "is not a file; give --out the name of one"),
        (("--out", "/proc/profile.json"), "/proc/profile.json cannot be written"),
        (("--device", "tpu"), "device 'tpu' is unknown; use 'auto', 'cpu' or 'cuda'"),
        (("--device", "cuda"), "--device cpu"),
        (("--rows", "17"), "give MODEL too"),
        (("--ctx-size", "128"), "give MODEL too"),
        (("MODEL", "--rows", "17", "--ctx-size", "40"), "40 tokens of context leave no round of 16 drafts"),
        (("MODEL", "--rows", "18"), "rows must be one of 1, 17, 33, 65, got 18"),
        (("MODEL", "--rows", "1"), "One row never drafts"),
        (("MODEL", "--device-memory", "lots"), "'lots' is not a size"),
        (("MODEL", "--device-memory", "1MB"), "too small"),
        (("--out", "notes.txt"), "notes.txt cannot be read as a profile"),
    ],
)
def test_what_is_wrong_is_one_sentence_before_anything_is_measured(
    profile: Profile,
    measured: list[str],
    tiny_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("Buy milk.")
    code, text, said = profile(*(str(tiny_store) if word == "MODEL" else word for word in arguments))
    assert (code, text, measured) == (2, "", [])
    assert sentence in said
    assert said.count("\n") == 1
    assert (tmp_path / "notes.txt").read_text() == "Buy milk."


def test_a_context_too_short_for_a_round_is_refused_before_anything_is_measured(
    profile: Profile, measured: list[str], tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_PROMPT", range(3, 500))
    code, _, said = profile(tiny_store)
    assert (code, measured) == (2, [])
    assert "512 tokens of context leave no round of 16 drafts; take fewer rows or a larger context" in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_run_that_is_ended_leaves_no_file(number: signal.Signals, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moespeq", "profile", "--device", "cpu"]
    process = subprocess.Popen(
        command, env={**os.environ, "MOESPEQ_CACHE": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "copies" in line:
            break
    deadline_s = time.monotonic() + 60
    while not any(str(tmp_path) in target for target in open_files(process.pid)):
        assert time.monotonic() < deadline_s, "no scratch file was opened"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
