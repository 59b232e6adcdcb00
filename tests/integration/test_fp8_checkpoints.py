"""FP8 in blocks: codes and scales are stored as they are, and the target is what transformers dequantises them to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engines import flip_schedule, open_tight, prompts
from families import make_tiny
from moespeq.decode.planning import StoreSizes
from moespeq.doctor.base_probe import probe_base
from moespeq.errors import CheckpointError, UnsupportedModelError
from moespeq.forecast import plan_model
from moespeq.forecast.sizes import CheckpointSizes
from moespeq.inspection import describe_model
from moespeq.model.checkpoint_map import map_checkpoint
from moespeq.model.supported import check_family
from moespeq.nested import Layout
from moespeq.prepare import export_checkpoint, prepare_store, verify_store
from moespeq.prepare.experts import decode_expert
from moespeq.store import Store, open_checkpoint
from moespeq.types import ExpertKey
from scaled_checkpoints import edit_config, to_fp8
from synthetic_store import files_of

NUM_SLOTS, NUM_TOKENS = 9, 16
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"block": (8, 8)},
    "qwen3_moe": {"block": (16, 16), "scales": torch.bfloat16},
}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny(request.param, tmp_path_factory.mktemp(request.param) / "m", shard_size="1GB")
    return to_fp8(folder, **KINDS[request.param])


@pytest.fixture(scope="module")
def store(checkpoint: Path) -> Path:
    return prepare_store(checkpoint, checkpoint.parent / "store")


def by_transformers(folder: Path) -> torch.nn.Module:
    """What transformers itself makes of the checkpoint where there is no GPU: bf16, dequantised as it loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager")
    assert {parameter.dtype for parameter in model.parameters()} <= {torch.bfloat16, torch.float32}
    return model


def texts(store: Path, k: int) -> list[tuple[int, ...]]:
    with open_tight(store, NUM_SLOTS, k=k) as engine:
        return [engine.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens for prompt in prompts(1)]


def test_it_comes_back_bit_for_bit(checkpoint: Path, store: Path, tmp_path: Path) -> None:
    report = verify_store(store, against=checkpoint)
    tensors = open_checkpoint(checkpoint).tensors.values()
    assert report.compared_bits == 8 * sum(place.entry.num_bytes for place in tensors)
    assert files_of(export_checkpoint(store, tmp_path / "exported")) == files_of(checkpoint)
    with Store.open(store) as opened:
        assert set(opened.manifest.layouts) == {Layout.FP8}


def test_every_weight_is_the_one_that_transformers_loads(checkpoint: Path, store: Path) -> None:
    reference = by_transformers(checkpoint)
    with Store.open(store) as opened:
        for layer, name in enumerate(opened.manifest.module_names):
            experts = reference.get_submodule(name)
            for expert in range(opened.manifest.num_experts):
                up, down = decode_expert(opened, ExpertKey(layer, expert))
                assert torch.equal(up, experts.gate_up_proj[expert])
                assert torch.equal(down, experts.down_proj[expert])
    with open_tight(store, NUM_SLOTS) as engine:
        ours = dict(engine._parts.runner.model.named_parameters())  # type: ignore[attr-defined]
    assert any("q_proj" in name or "q_a_proj" in name for name in ours)
    for name, weight in ours.items():
        assert torch.equal(weight, reference.get_parameter(name)), name


def test_the_target_is_that_of_transformers(checkpoint: Path, store: Path) -> None:
    """The same weights in float32, equal row counts."""
    reference = by_transformers(checkpoint).float()
    with open_tight(store, NUM_SLOTS, dtype=torch.float32) as engine:
        for prompt in prompts(2, length=20):
            with torch.inference_mode():
                expected = reference(input_ids=torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(engine.prompt_logits(prompt), expected, atol=1e-4, rtol=0)


def test_the_text_does_not_depend_on_k(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = texts(store, 0)
    assert texts(store, 4) == plain
    flip_schedule(monkeypatch, 4)
    assert texts(store, 4) == plain


def test_it_is_drafted_with_a_base_of_its_own_and_prefetched_for(store: Path) -> None:
    with open_tight(store, NUM_SLOTS, k=4) as engine:
        stats = engine.generate(prompts(1)[0], max_new_tokens=NUM_TOKENS, ignore_eos=True).stats
    assert stats.accepted > 0
    assert stats.bytes_by_cause["prefetch"] > 0


def test_on_demand_runs_without_a_base(store: Path) -> None:
    with open_tight(store, NUM_SLOTS, mode="on_demand") as engine:
        assert engine.plan.base_bytes == 0
        assert len(engine.generate(prompts(1)[0], max_new_tokens=4, ignore_eos=True).tokens) == 4


def test_dense_weights_are_planned_as_they_are_loaded(store: Path) -> None:
    with open_tight(store, NUM_SLOTS) as engine:
        loaded = sum(weight.nbytes for weight in engine._parts.runner.model.parameters())  # type: ignore[attr-defined]
        assert 0.95 * loaded <= engine.plan.dense_bytes <= 1.05 * loaded + 2**16


def test_doctor_finds_its_base_and_records_as_they_should_be(checkpoint: Path, store: Path) -> None:
    facts = probe_base(store, checkpoint, num_experts=4)
    assert (facts.damaged, facts.num_recoded, facts.num_unlike_checkpoint) == ((), 0, 0)
    assert 0.0 < facts.error_share < 0.2


def test_a_format_that_is_asked_for_is_for_bf16_experts(
    checkpoint: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = cli("prepare", checkpoint, "--out", tmp_path / "store", "--format", "code-width", "--device", "cpu")
    assert code == 0
    assert "--format is for bf16 experts; these are stored as they are: fp8" in out


def test_info_says_what_it_is(checkpoint: Path, store: Path) -> None:
    facts = describe_model(store)
    assert (facts["target"], facts["records"]) == ("fp8", "fp8")
    assert 8.0 < facts["bits_per_weight"] < 8.9  # tiny blocks have many scales
    assert facts["passes_on_cuda"].startswith("eager: no kernel reads fp8 records yet")
    assert describe_model(checkpoint)["experts"] == "F8_E4M3"


def test_plan_tells_of_the_checkpoint_what_the_store_is(checkpoint: Path, store: Path) -> None:
    for model in (checkpoint, store):
        report = plan_model(model, device="cpu", device_memory="64MiB")
        assert report.plan is not None
        assert report.plan.reasons["target"].startswith("fp8: records are the checkpoint's own numbers")
    with Store.open(store) as opened:
        exact = StoreSizes(opened).needs("store")
    reckoned = CheckpointSizes(checkpoint, "m", layout=Layout.FIXED).needs("store")
    assert (reckoned.base_bytes, reckoned.num_records) == (exact.base_bytes, exact.num_records)
    assert 0.85 < reckoned.slot_bytes / exact.slot_bytes <= 1.0  # tiny blocks have many scales
    assert 0.9 < reckoned.dense_bytes / exact.dense_bytes < 1.3


def test_ragged_blocks_and_exponents_as_scales(tmp_path: Path) -> None:
    """48 rows of gate and of up in blocks of 32: each begins its own; transformers takes no such grid."""
    source = make_tiny("qwen3_moe", tmp_path / "m", shard_size="1GB")
    to_fp8(source, block=(32, 32), scales=torch.float8_e8m0fnu)
    store = prepare_store(source, tmp_path / "store")
    verify_store(store, against=source)
    assert files_of(export_checkpoint(store, tmp_path / "exported")) == files_of(source)
    tensors = {}
    for path in source.glob("*.safetensors"):
        tensors.update(load_file(path))
    with Store.open(store) as opened:
        up, down = decode_expert(opened, ExpertKey(1, 3))
    for found, name in ((up[:48], "gate"), (up[48:], "up"), (down, "down")):
        weight = f"model.layers.1.mlp.experts.3.{name}_proj.weight"
        codes, grid = tensors[weight].float(), tensors[f"{weight}_scale_inv"].float()
        scales = grid.repeat_interleave(32, 0).repeat_interleave(32, 1)[: codes.shape[0], : codes.shape[1]]
        assert torch.equal(found, (codes * scales).bfloat16()), name


def test_a_layer_left_in_bf16_is_nested_beside_the_others(tmp_path: Path) -> None:
    source = make_tiny("qwen3_moe", tmp_path / "m", shard_size="1GB")
    before = load_file(source / "model.safetensors")
    to_fp8(source)
    for path in sorted(source.glob("*.safetensors")):
        tensors = load_file(path)
        for name in list(tensors):
            if name.startswith("model.layers.1.mlp.experts."):
                tensors.pop(name)
        if path.name.startswith("model-00001"):
            tensors.update({name: t for name, t in before.items() if name.startswith("model.layers.1.mlp.experts.")})
        save_file(tensors, path, metadata={"format": "pt"})
    (source / "model.safetensors.index.json").unlink()
    write_index(source)
    store = prepare_store(source, tmp_path / "store")
    verify_store(store, against=source)
    with Store.open(store) as opened:
        assert opened.manifest.layouts == (Layout.FP8, Layout.FIXED, Layout.FP8)
    assert texts(store, 4) == texts(store, 0)


def write_index(folder: Path) -> None:
    weight_map = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    "changes",
    [{"weight_block_size": None}, {"fmt": "e5m2"}, {"activation_scheme": "static"}, {"weight_block_size": [0, 1]}],
)
def test_other_kinds_of_fp8_are_refused(checkpoint: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    fields = {"quant_method": "fp8", "weight_block_size": [16, 16], "fmt": "e4m3", **changes}
    edit_config(tmp_path, quantization_config=fields)
    with pytest.raises(UnsupportedModelError, match="only e4m3 with a weight_block_size and dynamic activations"):
        check_family(tmp_path)


def test_scales_that_are_missing_misshapen_or_unexplained_are_refused(tmp_path: Path) -> None:
    source = to_fp8(make_tiny("qwen3_moe", tmp_path / "m", shard_size="1GB"))
    path = source / "model-00002-of-00002.safetensors"
    name = "model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv"
    whole = load_file(path)
    save_file({**whole, name: whole[name][:, :1].contiguous()}, path)
    with pytest.raises(CheckpointError, match=rf"{name}' is F32 \[3, 1\], which are no scales of blocks of 16 x 16"):
        map_checkpoint(open_checkpoint(source))
    save_file({key: tensor for key, tensor in whole.items() if key != name}, path)
    (source / "model.safetensors.index.json").unlink()
    write_index(source)
    with pytest.raises(CheckpointError, match=f"lacks '{name}'"):
        map_checkpoint(open_checkpoint(source))
    renamed = {key.replace(".weight_scale_inv", ".scale"): tensor for key, tensor in whole.items()}
    save_file(renamed, path)
    (source / "model.safetensors.index.json").unlink()
    write_index(source)
    with pytest.raises(UnsupportedModelError, match=r"are called '.*\.scale', and only '_scale_inv' is read"):
        map_checkpoint(open_checkpoint(source))
    edit_config(source, quantization_config=None)
    with pytest.raises(UnsupportedModelError, match=r"is FP8 and config\.json has no quantization_config"):
        map_checkpoint(open_checkpoint(source))
