"""Damage is never silent: of the checkpoint, of the store, or of the copy that is exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from families import make_tiny
from moespeq.errors import CheckpointError, StorageError, StoreError, UsageError
from moespeq.prepare import export_checkpoint, prepare_store, verify_store
from moespeq.store import Store, open_checkpoint


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    prepare_store(make_tiny("qwen3_moe", folder / "source"), folder / "store")
    return folder


@pytest.fixture
def source(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared / "source", tmp_path / "source")


@pytest.fixture
def store(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared / "store", tmp_path / "store")


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    "pattern", ["base.bin", "experts.bin", "pieces.bin", "dense/*", "model/config.json", "headers/*"]
)
def test_a_flipped_bit_of_a_store_is_found_and_named(store: Path, pattern: str) -> None:
    path = sorted(store.glob(pattern))[-1]
    flip(path, 100)
    with pytest.raises(StoreError, match=path.name):
        verify_store(store)


def test_a_model_file_with_a_flipped_bit_is_not_opened(store: Path) -> None:
    flip(store / "model" / "config.json", 100)
    with pytest.raises(StoreError, match=r"config\.json is damaged"):
        Store.open(store)


@pytest.mark.parametrize(
    ("pattern", "position"),
    [
        ("base.bin", 100),
        ("experts.bin", 100),
        ("dense/*", -1),
        ("dense/*", 20),
        ("headers/*.safetensors", 20),
    ],
)
def test_an_export_of_a_damaged_store_leaves_no_wrong_file(
    store: Path, source: Path, pattern: str, position: int
) -> None:
    flip(sorted(store.glob(pattern))[0], position)
    out = store.with_name("exported")
    with pytest.raises(StoreError):
        export_checkpoint(store, out)
    for path in out.glob("*"):
        assert path.read_bytes() == (source / path.name).read_bytes()


def test_a_checkpoint_that_differs_in_one_bit_of_an_expert_is_told_apart(store: Path, source: Path) -> None:
    checkpoint = open_checkpoint(source)
    file, entry = checkpoint.tensors["model.layers.2.mlp.experts.11.up_proj.weight"]
    flip(checkpoint.files[file].path, entry.offset + 9)
    with pytest.raises(StoreError, match="Expert 11 of MoE layer 2"):
        verify_store(store, against=source)


def test_a_checkpoint_that_differs_in_one_bit_of_a_dense_tensor_is_told_apart(store: Path, source: Path) -> None:
    checkpoint = open_checkpoint(source)
    file, entry = checkpoint.tensors["model.norm.weight"]
    flip(checkpoint.files[file].path, entry.offset + 1)
    with pytest.raises(StoreError, match=r"'model\.norm\.weight'"):
        verify_store(store, against=source)


def test_another_checkpoint_is_told_apart_by_its_headers(store: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="was not made from"):
        verify_store(store, against=make_tiny("olmoe", tmp_path / "other"))


def test_a_truncated_shard_is_named_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    shard = sorted(source.glob("*.safetensors"))[3]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=shard.name):
        prepare_store(source, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_checkpoint_is_not_prepared_onto_itself(source: Path) -> None:
    with pytest.raises(UsageError, match="is the checkpoint itself"):
        prepare_store(source, source)


def test_a_disk_that_fills_up_during_export_is_explained(store: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    out.mkdir()
    name = min(path.name for path in source.glob("*.safetensors"))
    (out / f"{name}.partial").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="is full"):
        export_checkpoint(store, out)
    export_checkpoint(store, out)
    assert (out / name).read_bytes() == (source / name).read_bytes()
