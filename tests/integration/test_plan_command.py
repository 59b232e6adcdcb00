"""`moespeq plan`: sizes without weights, the plan that loading then follows, and what would help or fit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moespeq.api import load
from moespeq.decode.planning import StoreSizes
from moespeq.demo.assets import MODEL_FOLDER
from moespeq.errors import CheckpointError, UnsupportedModelError, UsageError
from moespeq.forecast import plan_model
from moespeq.forecast.sizes import CheckpointSizes, FewerBits
from moespeq.nested import BaseFormat, Layout
from moespeq.plan.profile import DiskRate, MachineProfile, ModelTimes
from moespeq.prepare import prepare_store
from moespeq.store import Store, open_checkpoint

Cli = Callable[..., tuple[int, str, str]]
SMALL: dict[str, Any] = {"device": "cpu", "ctx_size": 256, "device_memory": "1200KiB", "link_bytes_per_s": "2MB"}


@pytest.fixture
def described(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """Its config and an index, no weights."""
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    checkpoint = open_checkpoint(tiny_checkpoint)
    total = sum(place.entry.num_bytes for place in checkpoint.tensors.values())
    weight_map = dict.fromkeys(checkpoint.tensors, "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize("records", ["store", "whole"])
def test_sizes_of_a_checkpoint_are_those_of_the_store_it_becomes(
    tiny_checkpoint: Path, tiny_store: Path, records: Any
) -> None:
    expected = CheckpointSizes(tiny_checkpoint, "tiny", layout=Layout.FIXED).needs(records)
    with Store.open(tiny_store) as store:
        found = StoreSizes(store).needs(records)
    assert (expected.shape, expected.num_records) == (found.shape, found.num_records)
    assert (expected.dense_bytes, expected.base_bytes) == (found.dense_bytes, found.base_bytes)
    assert expected.slot_bytes == pytest.approx(found.slot_bytes, rel=0.12)
    assert expected.records_bytes == pytest.approx(found.records_bytes, rel=0.12)


def test_config_and_index_are_enough(described: Path, tiny_checkpoint: Path) -> None:
    with_weights = CheckpointSizes(tiny_checkpoint, "tiny", layout=Layout.FIXED)
    assert CheckpointSizes(described, "tiny", layout=Layout.FIXED).needs("store") == with_weights.needs("store")
    (described / "model.safetensors.index.json").unlink()
    by_config = CheckpointSizes(described, "tiny", layout=Layout.FIXED).needs("store")
    assert by_config.dense_bytes == with_weights.needs("store").dense_bytes


def test_fewer_bits_are_reckoned_close_to_a_store_that_has_them(tiny_checkpoint: Path, tiny_store: Path) -> None:
    fmt = BaseFormat(bits=3, group=64, zero_point=True)
    out = tiny_checkpoint.parent / "three"
    prepare_store(tiny_checkpoint, out, fmt=fmt)
    with Store.open(tiny_store) as four, Store.open(out) as three:
        reckoned, found = FewerBits(StoreSizes(four)).needs("store"), StoreSizes(three).needs("store")
    assert reckoned.base_bytes == pytest.approx(found.base_bytes, rel=0.05)
    assert reckoned.records_bytes == pytest.approx(found.records_bytes, rel=0.08)


def test_an_engine_is_loaded_as_it_was_planned(tiny_store: Path) -> None:
    report = plan_model(tiny_store, **SMALL)
    with load(tiny_store, **SMALL) as engine:
        assert engine.plan == report.plan
        assert engine.options == report.options


def test_more_memory_and_a_faster_link_help_where_the_link_is_waited_for(tiny_store: Path) -> None:
    report = plan_model(tiny_store, **SMALL)
    assert report.speed is not None
    changes = {one.change.split(" ")[-1]: one.gain for one in report.helps}
    assert changes["fast"] == pytest.approx(2.0)
    gains = [one.gain for one in report.helps]
    assert gains == sorted(gains, reverse=True)
    assert all(gain > 1 for gain in gains)


def test_what_gains_next_to_nothing_is_no_help(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moespeq.forecast.advice._MORE_MEMORY", 1.0001)
    monkeypatch.setattr("moespeq.forecast.advice._FASTER_LINK", 1.005)
    assert not [one for one in plan_model(tiny_store, **SMALL).helps if one.gain < 1.01]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_reasons_of_the_workspace_are_words_and_not_shapes(described: Path, device: str) -> None:
    plan = plan_model(described, device=device, device_memory="2GiB").plan
    assert plan is not None
    assert not [figure.reason for figure in plan.workspace if "[" in figure.reason or "tensor" in figure.reason]


def test_what_does_not_fit_is_told_what_is_missing_and_every_way_that_fits_does(tiny_store: Path) -> None:
    small = {"device": "cpu", "device_memory": "890KiB"}
    report = plan_model(tiny_store, **small)
    assert report.plan is None
    assert report.refusal is not None
    assert "too small" in report.refusal
    assert report.ways
    for way in report.ways:
        again = plan_model(tiny_store, **small | asked_by(way.options))
        assert (again.plan is not None) == way.is_enough


def asked_by(options: str) -> dict[str, Any]:
    """`--ctx-size 256` as keywords."""
    words = options.split()
    named = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    return {name: int(value) if value.isdigit() else value for name, value in named.items()}


@pytest.mark.parametrize(
    "asked",
    [
        {"device": "cpu", "device_memory": "890KiB"},
        {"device": "cpu", "device_memory": "100KiB"},
        {"device": "cpu", "host_memory": "4TiB"},
        {"device": "cpu", "device_memory": "1100KiB", "k": 4, "base_memory": "700KiB"},
        {"device": "cuda", "device_memory": "1060MiB", "k": 32},
        {"device": "cuda", "device_memory": "100MiB"},
    ],
)
def test_every_way_to_fit_is_true_when_it_is_tried(described: Path, asked: dict[str, Any]) -> None:
    report = plan_model(described, **asked)
    assert report.plan is None
    assert report.ways
    assert len({way.is_enough for way in report.ways}) == 1
    for way in report.ways:
        again = plan_model(described, **asked | asked_by(way.options))
        assert (again.plan is not None) == way.is_enough, way
        if again.plan is not None:
            assert way.has_draft == (again.plan.num_bases > 0 and again.options.k != 0), way


@pytest.mark.parametrize("device_memory", ["8MiB", "6MiB"])
def test_no_two_ways_to_fit_are_the_same_engine_and_the_least_is_that_engines(device_memory: str) -> None:
    small = {"device": "cpu", "device_memory": device_memory}
    ways = plan_model(MODEL_FOLDER, **small).ways
    assert len({(way.least_bytes, way.has_draft) for way in ways}) == len(ways)
    assert any(way.has_draft for way in ways), "a context that leaves room for a draft is found"
    for way in ways:
        asked = asked_by(way.options)
        assert plan_model(MODEL_FOLDER, **small | asked | {"device_memory": way.least_bytes}).plan is not None
        below = plan_model(MODEL_FOLDER, **small | asked | {"device_memory": way.least_bytes - 1}).plan
        assert below is None or (way.has_draft and below.num_bases == 0)


def test_where_no_way_leaves_a_draft_what_it_takes_is_told_and_is_enough(described: Path, cli: Cli) -> None:
    report = plan_model(described, device="cpu", device_memory="100KiB")
    assert [need.context_tok for need in report.draft_needs] == [512, 256]
    for need in report.draft_needs:
        asked = {"device": "cpu", "ctx_size": need.context_tok}
        plan = plan_model(described, **asked, device_memory=need.least_bytes).plan
        assert plan is not None
        assert plan.num_bases == num_experts(described)
        less = plan_model(described, **asked, device_memory=need.least_bytes - 1).plan
        assert less is None or less.num_bases == 0
    assert not plan_model(described, device="cpu", device_memory="100KiB", k=0).draft_needs
    asked = ("plan", described, "--device", "cpu", "--device-memory", "100KiB")
    assert "a whole draft takes device memory of at least" in cli(*asked)[1]
    assert [need["context_tok"] for need in json.loads(cli(*asked, "--json")[1])["draft_needs"]] == [512, 256]


def num_experts(folder: Path) -> int:
    return CheckpointSizes(folder, "tiny", layout=Layout.FIXED).num_records


def test_more_than_is_free_is_answered_with_what_is_free(tiny_store: Path) -> None:
    host = plan_model(tiny_store, device="cpu", host_memory="4TiB").ways
    assert "--host-memory 0" in [way.options for way in host]


def test_a_gpu_that_is_not_here_needs_its_memory(described: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moespeq.decode.planning.require_gpu", no_gpu)
    with pytest.raises(
        UsageError, match=r"^No GPU here; or give --device-memory to plan for a GPU that is not here\.$"
    ):
        plan_model(described, device="cuda")


def no_gpu() -> None:
    raise UsageError("No GPU here.")


def test_a_gpu_that_is_not_here_can_be_planned_for(
    described: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, tmp_path: Path
) -> None:
    monkeypatch.setattr("moespeq.decode.planning.require_gpu", no_gpu)
    save_profile(tmp_path / "cache", ())
    report = plan_model(described, device="cuda", device_memory="2GiB")
    assert report.plan is not None
    assert report.plan.device == "cuda"
    assert {figure.name for figure in report.plan.workspace} > {"context", "graphs"}
    _, out, _ = cli("plan", described, "--device", "cuda", "--device-memory", "2GiB", "--link-bandwidth", "55GB")
    assert re.search(r"profile\.json was measured on cpu, not on the GPU planned for, which is not here: not used", out)
    assert re.search(r"link_depth .*guessed \(`moespeq profile` on the machine with that GPU measures\)", out)


def test_where_every_expert_is_resident_no_link_is_asked_for(cli: Cli, described: Path) -> None:
    asked = ("plan", described, "--device", "cuda", "--device-memory", "2GiB", "--link-bandwidth", "55GB")
    _, out, _ = cli(*asked)
    unknown = next(line for line in out.splitlines() if line.startswith("tokens/s"))
    assert "no expert crosses the link, so only computing bounds it" in unknown
    assert "--link-bandwidth" not in unknown
    told = json.loads(cli(*asked, "--json")[1])
    assert told["speed"] is None
    assert told["speed_unknown"] in unknown


def test_a_shorter_context_is_advised_only_where_it_is_enough(described: Path) -> None:
    for device_memory, advice in (("100KiB", "KiB with --ctx-size 256."), ("1000KiB", ", or a shorter --ctx-size.")):
        refusal = plan_model(described, device="cpu", device_memory=device_memory).refusal
        assert refusal is not None
        assert refusal.endswith(advice)


def test_what_is_no_such_model_is_refused(tmp_path: Path, described: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        plan_model(tmp_path / "nothing")
    (described / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModelError, match="dense"):
        plan_model(described)


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("total_size", [-5, 1000, float("inf"), float("nan"), 10**400, True])
def test_an_index_that_cannot_be_of_the_config_is_refused(described: Path, total_size: float) -> None:
    change(described / "model.safetensors.index.json", metadata={"total_size": total_size})
    with pytest.raises(CheckpointError, match=r"belong together|total_size that no checkpoint has; download it again"):
        plan_model(described)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_position_embeddings": 0}, "context of 0 tokens; max_position_embeddings must be at least 1"),
        ({"max_position_embeddings": -5}, "context of -5 tokens"),
        ({"hidden_size": 0}, "x 0 weights"),
        ({"moe_intermediate_size": 0}, "a matrix of 0 x"),
        ({"num_local_experts": 10**8}, "experts, and moespeq takes 1000000 at most"),
        ({"attention_dropout": 1.5}, "describes no model that can run: dropout probability"),
        ({"num_key_value_heads": 3}, "describes no model that can run"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(described: Path, fields: dict[str, int], words: str) -> None:
    change(described / "config.json", **fields)
    with pytest.raises(CheckpointError, match=words):
        plan_model(described)


@pytest.mark.parametrize("num_layers", [200, 10**4, 10**9])
def test_more_layers_than_tensors_are_refused_before_any_is_built(described: Path, num_layers: int) -> None:
    change(described / "config.json", num_hidden_layers=num_layers)
    with pytest.raises(CheckpointError, match=f"counts {num_layers} layers and the checkpoint holds [0-9]+ tensors"):
        plan_model(described)


@pytest.mark.parametrize("where", [{}, {"text_config": {"num_hidden_layers": 10**9}}])
def test_more_layers_than_any_model_has_are_refused_without_an_index(described: Path, where: dict[str, Any]) -> None:
    (described / "model.safetensors.index.json").unlink()
    change(described / "config.json", **(where or {"num_hidden_layers": 10**9}))
    with pytest.raises(CheckpointError, match="counts 1000000000 layers, and moespeq takes 1000 at most"):
        plan_model(described)


COMMAND = ("--device", "cpu", "--ctx-size", "256", "--device-memory", "1200KiB", "--link-bandwidth", "2MB")


def test_the_command_shows_every_size_with_its_reason(cli: Cli, described: Path) -> None:
    code, out, _ = cli("plan", described, *COMMAND)
    assert code == 0
    for name in ("dense weights", "INT4 base", "KV cache", "logits", "expert slots", "host memory", "disk"):
        assert any(line.strip().startswith(name) for line in out.splitlines()), name
    for words in ("what auto became", "sharing saves", "what would help most", "at most, what the link", "hits"):
        assert words in out


def save_profile(cache: Path, times: tuple[ModelTimes, ...]) -> None:
    """Of this CPU, where the fixture `cli` looks for it."""
    cache.mkdir()
    profile = MachineProfile("cpu", {}, {1 << 20: 1e9}, (DiskRate(1, 1e9, True),), times)
    profile.save(cache / "profile.json")


def test_a_speed_by_the_profile_says_what_it_rests_on(cli: Cli, described: Path, tmp_path: Path) -> None:
    times = ModelTimes(described.name, 1e-3, {17: 0.01}, 1e9)
    save_profile(tmp_path / "cache", (times,))
    _, auto, _ = cli("plan", described, *COMMAND)
    assert "by the profile" in auto
    assert "slower where the machine is busier" in auto
    assert "auto goes by the rounds it measures" in auto
    plain = re.search(r"if rounds commit that many, ([\d.]+) by plain decoding, which auto goes back to", auto)
    assert plain is not None
    assert plain[1] == re.search(r"^tokens/s +(\S+)", cli("plan", described, *COMMAND, "--k", "0")[1], re.MULTILINE)[1]
    fixed = cli("plan", described, *COMMAND, "--k", "4")[1]
    assert "auto goes" not in fixed
    assert f"{plain[1]} by plain decoding; by the profile" in fixed


def test_json_has_the_same_in_bytes(cli: Cli, tiny_store: Path) -> None:
    code, out, _ = cli("plan", tiny_store, *COMMAND, "--json")
    found = json.loads(out)
    parts = ("dense_bytes", "base_bytes", "kv_bytes", "slots_bytes")
    total = sum(found[name] for name in parts) + sum(found["workspace_bytes"].values())
    assert (code, found["fits"], found["total_bytes"]) == (0, True, total)
    assert found["speed"]["is_link_alone"]
    assert 0 < found["sharing"]["saved_share"] < 1


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_what_does_not_fit_ends_with_2_and_ways_on_stdout(cli: Cli, tiny_store: Path, extra: tuple[str, ...]) -> None:
    code, out, _ = cli("plan", tiny_store, "--device", "cpu", "--device-memory", "1000KiB", *extra)
    assert code == 2
    if extra:
        assert json.loads(out)["ways"][0]["least_bytes"] > 600 << 10
    else:
        assert "what fits" in out
