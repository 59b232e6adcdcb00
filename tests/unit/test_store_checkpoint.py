"""A checkpoint folder: which files belong to it, and that its index can name nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moespeq.errors import CheckpointError
from moespeq.store import open_checkpoint
from moespeq.store.checkpoint import INDEX_NAME, SINGLE_NAME, is_plain_name, read_small
from synthetic_store import write_safetensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / FIRST, {"a": ("U8", [3], b"abc")})
    write_safetensors(tmp_path / SECOND, {"b": ("U8", [2], b"de"), "extra": ("U8", [1], b"f")})
    write_index(tmp_path, {"a": FIRST, "b": SECOND})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_tensors_of_all_shards_are_found_listed_or_not(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert {name: place.file for name, place in checkpoint.tensors.items()} == {"a": 0, "b": 1, "extra": 1}
    assert checkpoint.size_bytes == sum(path.stat().st_size for path in sharded.glob("*.safetensors"))


def test_a_single_file_wins_over_an_index_as_in_transformers(sharded: Path) -> None:
    write_safetensors(sharded / SINGLE_NAME, {"only": ("U8", [1], b"x")})
    assert set(open_checkpoint(sharded).tensors) == {"only"}


def test_every_other_small_file_of_the_top_level_is_kept_and_the_rest_is_named(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moespeq.store.checkpoint.MAX_KEPT_BYTES", 4)
    names = [".gitattributes", "config.json", "extra.safetensors", "pytorch_model.bin", "tokenizer.model"]
    for name in names:
        (sharded / name).write_bytes(b"xxx")
    (sharded / "model.gguf").write_bytes(b"xxxx")
    (sharded / "original").mkdir()
    (sharded / "bad\x1bname").write_bytes(b"x")
    (sharded / "link").symlink_to(sharded / "nothing")
    checkpoint = open_checkpoint(sharded)
    assert [path.name for path in checkpoint.kept_files()] == names
    assert checkpoint.not_kept() == (r"'bad\x1bname'", "link", "model.gguf", "original/")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.pt"]
)
def test_pickles_are_never_opened_and_refused_with_the_conversion(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match=rf"pickles \({name}\).*never are here; .*save_pretrained\(NEW_FOLDER\)"):
        open_checkpoint(tmp_path)


def test_pickles_beside_safetensors_do_no_harm(sharded: Path) -> None:
    (sharded / "pytorch_model.bin").write_bytes(b"x")
    assert set(open_checkpoint(sharded).tensors) == {"a", "b", "extra"}


def test_shards_beside_a_single_file_are_not_dropped_silently(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(sharded / SINGLE_NAME, {"only": ("U8", [1], b"x")})
    assert [path.name for path in open_checkpoint(sharded).kept_files()] == [FIRST, SECOND]
    monkeypatch.setattr("moespeq.store.checkpoint.MAX_KEPT_BYTES", 1)
    assert open_checkpoint(sharded).not_kept() == (FIRST, SECOND)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.model", INDEX_NAME])
def test_the_fingerprint_covers_the_small_files(sharded: Path, name: str) -> None:
    (sharded / name).touch()
    write_index(sharded, {"a": FIRST, "b": SECOND})
    before = open_checkpoint(sharded).fingerprint()
    with (sharded / name).open("a") as file:
        file.write(" ")
    assert open_checkpoint(sharded).fingerprint() != before


def test_the_fingerprint_tells_headers_data_and_times_apart(sharded: Path) -> None:
    def fingerprint(dtype: str, data: bytes, modified_ns: int) -> str:
        write_safetensors(sharded / FIRST, {"a": (dtype, [3], data)})
        os.utime(sharded / FIRST, ns=(modified_ns, modified_ns))
        return open_checkpoint(sharded).fingerprint()

    same = fingerprint("U8", b"abc", 1)
    assert same == fingerprint("U8", b"abc", 1)
    assert len({same, fingerprint("I8", b"abc", 1), fingerprint("U8", b"abd", 1), fingerprint("U8", b"abc", 2)}) == 4


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND} is missing"):
        open_checkpoint(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    write_index(sharded, {"a": FIRST, "b": FIRST, "extra": SECOND})
    with pytest.raises(CheckpointError, match="puts 'b' into"):
        open_checkpoint(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    write_safetensors(sharded / SECOND, {"b": ("U8", [2], b"de"), "a": ("U8", [1], b"f")})
    with pytest.raises(CheckpointError, match="'a' is in both"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "x.bin",
        "a\n.safetensors",
        "a\0.safetensors",
        "\ud800.safetensors",
        "n" * 300 + ".safetensors",
        "..",
        3,
        True,
        None,
        ["a.safetensors"],
    ],
)
def test_an_index_cannot_name_anything_outside_its_folder(sharded: Path, name: object) -> None:
    write_index(sharded, {"a": name})
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        open_checkpoint(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_a_damaged_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        open_checkpoint(sharded)


def test_an_index_that_names_a_tensor_twice_is_refused(sharded: Path) -> None:
    (sharded / INDEX_NAME).write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}", "b": "{SECOND}"}}}}')
    with pytest.raises(CheckpointError, match=rf"{INDEX_NAME} is not valid JSON \(a key appears twice\)"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("name", [FIRST, INDEX_NAME, "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused_before_it_is_read(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret"
    (sharded / "tokenizer.json").touch()
    (sharded / name).rename(elsewhere)
    (sharded / name).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=rf"{name} is a link out of its folder, to .*secret; put the file itself"):
        open_checkpoint(sharded).kept_files()


def test_links_inside_the_folder_and_those_of_the_hub_cache_are_followed(sharded: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--name" / "snapshots" / "0123"
    for folder in (cache / "blobs" / "ab", snapshot.parents[1] / "blobs", snapshot):
        folder.mkdir(parents=True)
    (sharded / FIRST).rename(cache / "blobs" / "ab" / "first")
    (snapshot.parents[1] / "blobs" / "etag").symlink_to("../../blobs/ab/first")
    (snapshot / FIRST).symlink_to("../../blobs/etag")
    (sharded / SECOND).rename(snapshot / "renamed")
    (snapshot / SECOND).symlink_to("renamed")
    write_index(snapshot, {"a": FIRST, "b": SECOND})
    assert set(open_checkpoint(snapshot).tensors) == {"a", "b", "extra"}


def test_a_link_that_names_itself_is_refused(sharded: Path) -> None:
    (sharded / FIRST).unlink()
    (sharded / FIRST).symlink_to(FIRST)
    with pytest.raises(CheckpointError, match=FIRST):
        open_checkpoint(sharded)


def test_a_pipe_in_place_of_a_small_file_is_not_waited_for(sharded: Path) -> None:
    os.mkfifo(sharded / "pipe.json")
    with pytest.raises(CheckpointError, match=r"pipe\.json cannot be read \(it is no file\)"):
        read_small(sharded / "pipe.json", 100)


def test_a_folder_without_safetensors_says_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        open_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "is_plain"),
    [("a b.json", True), (".x", True), ("", False), ("..", False), ("a/b", False), ("a\\b", False)],
)
def test_a_plain_name_stays_in_its_folder(name: str, is_plain: bool) -> None:
    assert is_plain_name(name) is is_plain
