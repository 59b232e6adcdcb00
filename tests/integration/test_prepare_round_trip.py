"""A checkpoint becomes a store and comes back byte for byte, whatever the family, files and values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import FAMILIES, make_tiny
from moespeq.errors import UsageError
from moespeq.nested import BaseFormat, Layout
from moespeq.prepare import export_checkpoint, not_kept, prepare_store, verify_store
from moespeq.prepare.experts import decode_expert
from moespeq.store import Store, open_checkpoint
from moespeq.types import ExpertKey
from synthetic_store import files_of

SINGLE_FILE = "1GB"


class Recorded:
    """A sink that keeps every update."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, int, str]] = []

    def update(self, done_bytes: int, total_bytes: int, what: str) -> None:
        self.updates.append((done_bytes, total_bytes, what))


def assert_comes_back(source: Path, tmp_path: Path, layout: Layout = Layout.FIXED) -> Path:
    """Prepare, compare every bit, export, compare every byte; returns the store."""
    store = prepare_store(source, tmp_path / "store", layout=layout)
    report = verify_store(store, against=source)
    checkpoint = open_checkpoint(source)
    assert report.compared_bits == 8 * sum(place.entry.num_bytes for place in checkpoint.tensors.values())
    assert report.summary().endswith(f"; {report.compared_bits:,} bits equal the checkpoint's")
    exported = export_checkpoint(store, tmp_path / "exported")
    assert files_of(exported) == files_of(source)
    return store


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_checkpoint_of_every_family_comes_back(family: str, tmp_path: Path) -> None:
    assert_comes_back(make_tiny(family, tmp_path / "source"), tmp_path)


@pytest.mark.parametrize(("family", "layout"), [("gpt_oss", Layout.CODE_WIDTH), ("mixtral", Layout.PLAIN)])
def test_every_layout_brings_it_back(family: str, layout: Layout, tmp_path: Path) -> None:
    store = assert_comes_back(make_tiny(family, tmp_path / "source"), tmp_path, layout)
    with Store.open(store) as opened:
        assert set(opened.manifest.layouts) == {layout}


def test_a_single_file_checkpoint_comes_back(tmp_path: Path) -> None:
    source = make_tiny("qwen2_moe", tmp_path / "source", shard_size=SINGLE_FILE)
    assert [path.name for path in source.glob("*.safetensors*")] == ["model.safetensors"]
    assert_comes_back(source, tmp_path)


def test_tensors_that_the_model_ignores_are_kept(tmp_path: Path) -> None:
    source = make_tiny("deepseek_v3", tmp_path / "source", shard_size=SINGLE_FILE)
    tensors = load_file(source / "model.safetensors")
    extra = {
        "model.layers.4.mlp.experts.0.gate_proj.weight": torch.randn(48, 64).bfloat16(),
        "model.layers.4.eh_proj.weight": torch.randn(3, 5, dtype=torch.float64),
        "nothing": torch.zeros(0, 4),
    }
    save_file({**tensors, **extra}, source / "model.safetensors", metadata={"format": "pt", "note": "ü"})
    store = assert_comes_back(source, tmp_path)
    dense = load_file(store / "dense" / "model.safetensors")
    assert all(torch.equal(dense[name], tensor) for name, tensor in extra.items())


def test_every_bit_pattern_survives_and_a_layer_of_noise_is_stored_plain(tmp_path: Path) -> None:
    source = make_tiny("qwen3_moe", tmp_path / "source", shard_size=SINGLE_FILE)
    tensors = load_file(source / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.startswith("model.layers.1.mlp.experts."):
            tensor.view(torch.int16).random_(-(2**15), 2**15, generator=noise)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40], dtype=torch.bfloat16)
    tensors["model.layers.0.mlp.experts.2.up_proj.weight"][5, :6] = special
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    store = assert_comes_back(source, tmp_path)
    with Store.open(store) as opened:
        assert opened.manifest.layouts == (Layout.FIXED, Layout.PLAIN, Layout.FIXED)
        assert opened.base_bytes(ExpertKey(1, 0)) == opened.base_bytes(ExpertKey(0, 0))
        up = decode_expert(opened, ExpertKey(0, 2))[0][48:]
        assert torch.equal(up[5, :6].view(torch.int16), special.view(torch.int16))


def test_the_store_says_what_it_holds(tmp_path: Path) -> None:
    source = make_tiny("gpt_oss", tmp_path / "source")
    fmt = BaseFormat(bits=3, group=32, zero_point=True)
    store = prepare_store(source, tmp_path / "store", fmt=fmt)
    with Store.open(store) as opened:
        manifest = opened.manifest
        assert (manifest.name, manifest.model_type) == ("source", "gpt_oss")
        assert (manifest.num_layers, manifest.num_experts, manifest.top_k) == (4, 8, 2)
        assert manifest.matrices == (("gate_up", 96, 64), ("down", 64, 48))
        assert manifest.base_format == fmt
        assert manifest.module_names[3] == "model.layers.3.mlp.experts"
        assert json.loads((opened.model_folder / "config.json").read_text())["model_type"] == "gpt_oss"
        dense = {entry.name for entry, _ in opened.dense_tensors()}
    assert "model.layers.0.mlp.experts.gate_up_proj_bias" in dense
    assert "model.layers.0.mlp.experts.gate_up_proj" not in dense


def test_progress_rises_to_its_total(tmp_path: Path) -> None:
    source = make_tiny("mixtral", tmp_path / "source")
    jobs = [Recorded(), Recorded(), Recorded()]
    store = prepare_store(source, tmp_path / "store", progress=jobs[0])
    verify_store(store, source, jobs[1])
    export_checkpoint(store, tmp_path / "exported", jobs[2])
    for job in jobs:
        done = [done_bytes for done_bytes, _, _ in job.updates]
        assert done == sorted(done)
        assert done[-1] == job.updates[-1][1]
    assert "layer 3 of 3" in {what for _, _, what in jobs[0].updates}


def test_every_file_of_the_top_level_comes_back_and_the_rest_is_named(tmp_path: Path) -> None:
    source = make_tiny("mixtral", tmp_path / "source")
    for name in ("training_args.bin", "stray.safetensors", "notes", "merges.TXT"):
        (source / name).write_bytes(b"\0kept")
    store = assert_comes_back(source, tmp_path)
    assert sorted(path.name for path in (store / "other").iterdir()) == ["stray.safetensors", "training_args.bin"]
    assert not_kept(source) == ()
    (source / "original").mkdir()
    assert not_kept(source) == ("original/",)


def test_two_exports_do_not_share_a_folder(tmp_path: Path) -> None:
    store = prepare_store(make_tiny("mixtral", tmp_path / "source"), tmp_path / "store")
    refused = []

    class Sink:
        def update(self, done_bytes: int, total_bytes: int, what: str) -> None:
            with pytest.raises(UsageError, match="Another process is exporting to"):
                export_checkpoint(store, tmp_path / "exported")
            refused.append(what)

    export_checkpoint(store, tmp_path / "exported", Sink())
    assert refused
    assert files_of(tmp_path / "exported") == files_of(tmp_path / "source")


@pytest.mark.parametrize("name", ["a" * 300, "source/config.json", "source/config.json/below", "link"])
def test_a_folder_that_cannot_be_exported_to_is_one_sentence(tmp_path: Path, name: str) -> None:
    store = prepare_store(make_tiny("mixtral", tmp_path / "source"), tmp_path / "store")
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(UsageError, match=r"cannot be written \(|is a link to nothing"):
        export_checkpoint(store, tmp_path / name)


def test_an_interrupted_export_only_writes_what_is_missing(tmp_path: Path) -> None:
    source = make_tiny("olmoe", tmp_path / "source")
    store = prepare_store(source, tmp_path / "store")
    out = export_checkpoint(store, tmp_path / "exported")
    kept, lost = sorted(out.glob("*.safetensors"))[:2]
    written_ns = kept.stat().st_mtime_ns
    lost.unlink()
    export_checkpoint(store, out)
    assert kept.stat().st_mtime_ns == written_ns
    assert files_of(out) == files_of(source)


def test_export_never_overwrites_another_file(tmp_path: Path) -> None:
    store = prepare_store(make_tiny("olmoe", tmp_path / "source"), tmp_path / "store")
    out = tmp_path / "exported"
    out.mkdir()
    (out / "config.json").write_text("mine")
    with pytest.raises(UsageError, match=r"config\.json exists and differs"):
        export_checkpoint(store, out)
    assert (out / "config.json").read_text() == "mine"
    assert [path.name for path in out.iterdir()] == ["config.json"]


def test_export_refuses_a_folder_of_other_files(tmp_path: Path) -> None:
    source = make_tiny("mixtral", tmp_path / "source")
    store = prepare_store(source, tmp_path / "store")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "guide.md").write_text("mine")
    with pytest.raises(UsageError, match=r"docs holds guide\.md, which is no file of this checkpoint"):
        export_checkpoint(store, tmp_path / "docs")
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["guide.md"]
