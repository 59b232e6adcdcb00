"""An engine plans with the profile of its machine, where there is one: it sets the depth of the queue, and no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engines import memory_for
from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine
from moespeq.errors import UsageError
from moespeq.plan.profile import DiskRate, MachineProfile, ModelTimes, default_profile_path, require_writable
from moespeq.store import Store

PROFILE = MachineProfile("cpu", {}, {65536: 1e9}, (DiskRate(1, 1e9, True),))


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the profile lies."""
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path / "cache"))
    require_writable(default_profile_path())
    return default_profile_path()


def opened(store: Path) -> tuple[int, dict[str, str], tuple[int, ...]]:
    """Depth of the queue, reasons and a text of an engine in slots for half of the experts."""
    options = LoadOptions(device="cpu", k=4, device_memory=memory_for(store, 24))
    with open_engine(store, options) as engine:
        text = engine.generate("A router sends every token", max_new_tokens=8, ignore_eos=True).tokens
        assert engine._parts.residency._options.link_depth == engine.plan.link_depth
        engine.retune(k=2)
        assert engine._parts.residency._options.link_depth == engine.plan.link_depth
        return engine.plan.link_depth, dict(engine.plan.reasons), text


def test_the_measured_times_of_a_model_set_the_depth_and_change_no_token(tiny_store: Path, path: Path) -> None:
    usual, reasons, text = opened(tiny_store)
    assert "nothing was measured here" in reasons["link_depth"]
    with Store.open(tiny_store) as store:
        times = ModelTimes(store.manifest.name, 1.0, {17: 0.01}, 1e9)
    replace(PROFILE, models=(times,)).save(path)
    deeper, reasons, same_text = opened(tiny_store)
    assert str(path) in reasons["link_depth"]
    assert deeper == max(usual, 24 // 10)
    assert same_text == text


def test_a_profile_of_another_device_is_ignored_with_the_reason(tiny_store: Path, path: Path) -> None:
    replace(PROFILE, device="Some GPU").save(path)
    assert opened(tiny_store)[1]["profile"] == f"{path} was measured on Some GPU, not on cpu: not used"


def test_a_broken_profile_is_one_sentence(tiny_store: Path, path: Path) -> None:
    path.write_text("{")
    with pytest.raises(
        UsageError, match=r"cannot be read as a profile .* delete it, then run `moespeq profile`"
    ) as error:
        opened(tiny_store)
    assert str(path) in str(error.value)
