"""Where checkpoints come from and where their stores go: folders, hub ids, the current folder, the cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from families import make_tiny, tiny_config
from moespeq.errors import CheckpointError, UnsupportedModelError
from moespeq.nested import Layout
from moespeq.prepare import (
    cache_folder_for,
    default_layout,
    default_output,
    is_store,
    prepare_cached,
    prepare_store,
    resolve_source,
)
from moespeq.store import Store
from moespeq.store.manifest import SCHEMA
from synthetic_store import files_of

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("mixtral", tmp_path_factory.mktemp("sources") / "Tiny-Mixtral")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline hub cache that holds what the test puts into the returned snapshot folder of org/tiny."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    return repository / "snapshots" / REVISION


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_an_output_the_store_is_named_after_the_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare_store(source) == Path("Tiny-Mixtral.moespeq")
    assert is_store(tmp_path / "Tiny-Mixtral.moespeq")
    assert default_output("org/name") == Path("name.moespeq")


def test_the_first_use_prepares_into_the_cache_and_later_ones_find_it(source: Path, cache: Path) -> None:
    first = prepare_cached(source)
    assert first.parent == cache
    assert first.name.startswith("Tiny-Mixtral-")
    before = files_of(first)
    assert prepare_cached(str(source)) == first
    assert prepare_cached(first) == first
    assert files_of(first) == before


def test_where_a_gpu_encodes_the_smaller_layout_is_the_default_unless_the_other_is_there(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_layout("auto") is default_layout("cpu") is Layout.FIXED
    there = prepare_cached(source)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_layout("auto") is default_layout("cuda") is Layout.CODE_WIDTH
    assert default_layout("cpu") is Layout.FIXED
    assert prepare_cached(source) == there


def test_a_layout_that_is_asked_for_is_made_whatever_is_there(source: Path, tmp_path: Path) -> None:
    default = prepare_cached(source)
    assert prepare_cached(source, layout=Layout.CODE_WIDTH) != default
    assert prepare_cached(source) == default
    for layout in (None, Layout.CODE_WIDTH):
        with Store.open(prepare_store(source, tmp_path / f"{layout}", layout=layout)) as store:
            assert set(store.manifest.layouts) == {layout or Layout.FIXED}


def test_a_changed_checkpoint_or_option_has_a_store_of_its_own(source: Path, tmp_path: Path) -> None:
    folders = {
        cache_folder_for(source),
        cache_folder_for(source, layout=Layout.PLAIN),
        cache_folder_for(make_tiny("mixtral", tmp_path / "Tiny-Mixtral", num_local_experts=9)),
    }
    assert len(folders) == 3


def test_a_changed_generation_config_has_a_store_of_its_own(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / source.name)
    before = cache_folder_for(copy)
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    assert cache_folder_for(copy) != before


def test_the_cache_folder_follows_the_environment(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOESPEQ_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder_for(source).parent == tmp_path / "xdg" / "moespeq"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder_for(source, "org/name").parent == tmp_path / ".cache" / "moespeq"


def test_a_hub_id_is_prepared_from_the_hub_cache_while_offline(hub: Path) -> None:
    make_tiny("mixtral", hub)
    store = prepare_cached("org/tiny")
    assert store.name.startswith("tiny-")
    with Store.open(store) as opened:
        assert opened.manifest.name == "org/tiny"


def test_a_hub_id_is_refused_by_its_config_before_weights_are_fetched(hub: Path) -> None:
    hub.mkdir(parents=True)
    (hub / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedModelError, match="'llama' is dense"):
        resolve_source("org/tiny")


def test_a_hub_id_of_pickles_is_refused_before_weights_are_fetched(hub: Path) -> None:
    tiny_config("mixtral").save_pretrained(hub)
    (hub / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"pickles \(pytorch_model\.bin\.index\.json\), which run code"):
        resolve_source("org/tiny")


@pytest.mark.parametrize("name", ["org/absent", "org/not a name!"])
def test_a_hub_id_that_cannot_be_downloaded_is_one_sentence(hub: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is no local folder and was not downloaded") as caught:
        resolve_source(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["./absent", "absent", "a/b/c", "/absent/model", Path("org/name")])
def test_what_is_neither_folder_nor_hub_id_is_refused(source: str | Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_source(source)


def test_a_version_with_another_schema_gets_a_cache_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny("mixtral", tmp_path / "source")
    before = cache_folder_for(source)
    monkeypatch.setattr("moespeq.prepare.source.SCHEMA", SCHEMA + 1)
    assert cache_folder_for(source) != before
