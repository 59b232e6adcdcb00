"""A store of the schema before this one is named as such, upgraded when that is asked for, and otherwise left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import synthetic_store
from moespeq.errors import StorageError, StoreError
from moespeq.store import Store
from moespeq.store.manifest import SCHEMA, digest_of
from moespeq.store.upgrade import upgrade_store
from synthetic_store import files_of


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """As the version before wrote it: one number for the one file of expert records."""
    store = synthetic_store.build(tmp_path / "store")
    rewrite(store, schema=1, experts_file_bytes=(store / "experts.bin").stat().st_size)
    return store


def rewrite(store: Path, **changes: object) -> None:
    values = json.loads((store / "manifest.json").read_text())
    del values["digest"]
    signed = {**values, **changes}
    (store / "manifest.json").write_text(json.dumps({**signed, "digest": digest_of(signed)}, indent=1) + "\n")


def test_an_older_store_is_not_read_and_the_sentence_names_the_command(old: Path) -> None:
    before = files_of(old)
    with pytest.raises(StoreError, match=rf"has schema 1 and this version reads schema {SCHEMA}; `moespeq upgrade"):
        Store.open(old)
    assert files_of(old) == before


def test_an_upgraded_store_is_the_one_that_this_version_makes(old: Path, tmp_path: Path) -> None:
    assert upgrade_store(old) == 1
    assert files_of(old) == files_of(synthetic_store.build(tmp_path / "new"))
    assert upgrade_store(old) is None
    assert files_of(old) == files_of(tmp_path / "new")


@pytest.mark.parametrize("schema", [0, SCHEMA + 1, "1", None, 1.0, True])
def test_a_schema_that_no_step_begins_at_is_refused(old: Path, schema: object) -> None:
    rewrite(old, schema=schema)
    before = files_of(old)
    with pytest.raises(StoreError, match=r"manifest\.json (has schema|names no schema).* prepare the store again"):
        upgrade_store(old)
    assert files_of(old) == before


def test_a_damaged_older_store_is_refused_and_left_as_it_is(old: Path) -> None:
    os.truncate(old / "experts.bin", 4096)
    before = files_of(old)
    with pytest.raises(StoreError, match=r"experts\.bin has 4096 bytes and should have"):
        upgrade_store(old)
    rewrite(old, experts_file_bytes="many")
    with pytest.raises(StoreError, match=r"manifest\.json is damaged \('many' is not of type int\)"):
        upgrade_store(old)
    rewrite(old, schema=1, experts_file_bytes=len(before["experts.bin"]))
    (old / "manifest.json").write_text((old / "manifest.json").read_text().replace('"top_k": 1', '"top_k": 2'))
    with pytest.raises(StoreError, match=r"manifest\.json is damaged .*digest"):
        upgrade_store(old)


def test_a_store_that_cannot_be_written_stays_whole(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(old)

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("moespeq.whole_file.os.fsync", refuse)
    with pytest.raises(StorageError, match=r"manifest\.json cannot be written \(Read-only file system\)"):
        upgrade_store(old)
    assert files_of(old) == before
