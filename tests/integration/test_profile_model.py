"""A model is profiled through the engine, and the command writes what the planner reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moespeq import profiling
from moespeq.cli.main import app
from moespeq.plan.profile import DiskRate, MachineProfile


@pytest.fixture(autouse=True)
def _quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "measure_copies", lambda device, is_pinned: {65536: 1e9})
    monkeypatch.setattr(profiling, "_disk_rates", lambda store, num_bytes, say: (DiskRate(1, 1e9, True),))


def test_the_command_times_a_model_and_writes_the_profile(tiny_store: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    result = CliRunner().invoke(app, ["profile", str(tiny_store), "--out", str(out), "--device", "cpu", "--rows", "17"])
    assert result.exit_code == 0, result.output
    profile = MachineProfile.load(out)
    assert profile.model is not None
    assert list(profile.model.verify_s) == [17]
    assert profile.model.draft_s_per_tok > 0
    assert profile.model.verify_s[17] > 0
    assert profile.model.decode_bytes_per_s > 0
    assert "verify    17 rows" in result.output
    assert f"written to {out}" in result.output


def test_json_prints_the_profile_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path))
    result = CliRunner().invoke(app, ["profile", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed == json.loads((tmp_path / "profile.json").read_text())
