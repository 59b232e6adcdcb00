"""Checkpoints in fp16 and fp32: stored exactly, or rounded where that is asked for and said."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import moespeq
from engines import open_tight, prompts
from families import make_tiny
from moespeq.config import LoadOptions
from moespeq.decode.planning import StoreSizes, record_choices
from moespeq.errors import UnsupportedModelError, UsageError
from moespeq.forecast import plan_model
from moespeq.forecast.sizes import CheckpointSizes
from moespeq.inspection import describe_model
from moespeq.nested import Layout
from moespeq.prepare import export_checkpoint, prepare_store, verify_store
from moespeq.prepare.conversion import with_bf16_experts
from moespeq.prepare.experts import decode_expert
from moespeq.store import Store, open_checkpoint
from moespeq.types import ExpertKey
from synthetic_store import files_of

NUM_SLOTS, NUM_TOKENS = 9, 24


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp16 with zeros of both signs, subnormal numbers and the least normal one in an expert."""
    folder = make_tiny("qwen3_moe", tmp_path_factory.mktemp("fp16") / "m", dtype=torch.float16, shard_size="1GB")
    tensors = load_file(folder / "model.safetensors")
    special = torch.tensor([0.0, -0.0, 6e-8, -6e-8, 3e-6, 6.1e-5], dtype=torch.float16)
    tensors["model.layers.2.mlp.experts.5.up_proj.weight"][3, :6] = special
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def half_store(halves: Path) -> Path:
    return prepare_store(halves, halves.parent / "store")


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("mixtral", tmp_path_factory.mktemp("fp32") / "m", dtype=torch.float32)


@pytest.fixture(scope="module")
def rounded_store(floats: Path) -> Path:
    return prepare_store(floats, floats.parent / "store", convert_to="bf16")


def texts(store: Path, k: int) -> list[tuple[int, ...]]:
    with open_tight(store, NUM_SLOTS, k=k) as engine:
        return [engine.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens for prompt in prompts(3)]


def assert_logits_are_those_of(reference: torch.nn.Module, store: Path) -> None:
    """float32, equal row counts, as for every family."""
    with open_tight(store, NUM_SLOTS, dtype=torch.float32) as engine:
        for prompt in prompts(2, length=20):
            with torch.inference_mode():
                expected = reference(input_ids=torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(engine.prompt_logits(prompt), expected, atol=1e-4, rtol=0)


def test_an_fp16_checkpoint_comes_back_bit_for_bit(halves: Path, half_store: Path, tmp_path: Path) -> None:
    report = verify_store(half_store, against=halves)
    assert report.compared_bits == 8 * sum(place.entry.num_bytes for place in open_checkpoint(halves).tensors.values())
    assert files_of(export_checkpoint(half_store, tmp_path / "exported")) == files_of(halves)
    with Store.open(half_store) as store:
        assert set(store.manifest.layouts) == {Layout.FP16}
        up = decode_expert(store, ExpertKey(2, 5))[0][48:]
    source = load_file(halves / "model.safetensors")["model.layers.2.mlp.experts.5.up_proj.weight"]
    assert torch.equal(up.view(torch.int16), source.view(torch.int16))


def test_any_fp16_bit_pattern_survives(tmp_path: Path) -> None:
    source = make_tiny("mixtral", tmp_path / "source", dtype=torch.float16, shard_size="1GB")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.view(torch.int16).random_(-(2**15), 2**15, generator=torch.Generator().manual_seed(1))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    store = prepare_store(source, tmp_path / "store")
    verify_store(store, against=source)
    assert files_of(export_checkpoint(store, tmp_path / "exported")) == files_of(source)


def test_an_fp16_target_is_that_of_transformers(halves: Path, half_store: Path) -> None:
    kwargs = {"experts_implementation": "eager"}
    assert_logits_are_those_of(AutoModelForCausalLM.from_pretrained(halves, dtype=torch.float32, **kwargs), half_store)
    reference = AutoModelForCausalLM.from_pretrained(halves, dtype="auto", **kwargs)
    assert reference.dtype is torch.float16
    with open_tight(half_store, NUM_SLOTS) as engine:
        logits = engine.prompt_logits(prompts(1)[0])
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor(prompts(1)[:1])).logits[0]
    gaps = (logits.float() - expected.float()).abs().amax(1)
    assert gaps.median() < 0.012, gaps  # bf16 is off by 0.03 and more; at a near-tie of routes any dtype is by much


@pytest.mark.parametrize("k", [1, 4, 8])
def test_an_fp16_text_does_not_depend_on_k(half_store: Path, k: int) -> None:
    assert texts(half_store, k) == texts(half_store, 0)


def test_an_fp16_draft_is_accepted_and_prefetched_for(half_store: Path) -> None:
    with open_tight(half_store, NUM_SLOTS, k=4) as engine:
        stats = engine.generate(prompts(1)[0], max_new_tokens=NUM_TOKENS, ignore_eos=True).stats
    assert stats.accepted > 0
    assert stats.bytes_by_cause["prefetch"] > 0


def test_info_says_what_an_fp16_store_holds_and_how_a_gpu_runs_it(half_store: Path, halves: Path) -> None:
    facts = describe_model(half_store)
    assert (facts["target"], facts["records"], facts["bits_per_weight"]) == ("fp16", "fp16", 16.0)
    assert facts["passes_on_cuda"].startswith("eager: no kernel reads fp16 records yet")
    assert describe_model(halves)["experts"] == "F16"


def test_plain_records_are_refused_where_experts_are_not_bf16(half_store: Path) -> None:
    with Store.open(half_store) as store, pytest.raises(UsageError, match="are not bf16, which plain records are"):
        record_choices(StoreSizes(store), LoadOptions(records="plain", device="cuda"))


def test_fp32_is_refused_unless_it_is_asked_for(floats: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"are fp32, .*--convert-to bf16 \(convert_to='bf16'\)"):
        prepare_store(floats, tmp_path / "store")
    assert list(tmp_path.iterdir()) == []
    assert describe_model(floats)["next"].endswith("--convert-to bf16")


def test_plan_counts_fp16_experts_as_they_are_and_refuses_fp32_likewise(
    halves: Path, half_store: Path, floats: Path
) -> None:
    report = plan_model(halves, device="cpu", device_memory="64MiB")
    assert report.plan is not None
    assert report.plan.reasons["target"].startswith("fp16: records are the checkpoint's own numbers")
    with Store.open(half_store) as store:
        exact = StoreSizes(store).needs("store")
    assert CheckpointSizes(halves, "m", layout=Layout.FIXED).needs("store") == replace(exact, model="m")
    with pytest.raises(UnsupportedModelError, match="are fp32"):
        plan_model(floats, device="cpu", device_memory="64MiB")
    rounded = plan_model(floats, device="cpu", device_memory="64MiB", convert_to="bf16")
    assert rounded.plan is not None
    assert "target" not in rounded.plan.reasons


def test_fp32_that_is_asked_for_is_rounded_with_a_warning(
    floats: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="moespeq"):
        store = prepare_store(floats, tmp_path / "store", convert_to="bf16")
    assert "are F32 and are rounded to bf16, as asked for" in caplog.text
    assert describe_model(store)["target"] == "bf16, rounded from F32 as asked for"
    report = verify_store(store, against=floats)
    assert report.summary().endswith("bits equal the checkpoint's, its F32 experts rounded to bf16")


def test_what_is_exported_of_rounded_experts_is_the_rounded_checkpoint(
    floats: Path, rounded_store: Path, tmp_path: Path
) -> None:
    exported = export_checkpoint(rounded_store, tmp_path / "exported")
    for path in floats.glob("*.safetensors"):
        ours = load_file(exported / path.name)
        for name, tensor in load_file(path).items():
            assert torch.equal(ours[name], tensor.bfloat16() if ".experts." in name else tensor), name


def test_the_rounded_model_is_what_transformers_makes_of_it_in_bf16(floats: Path, rounded_store: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.bfloat16, experts_implementation="eager")
    with open_tight(rounded_store, NUM_SLOTS) as engine:
        model = engine._parts.runner.model  # type: ignore[attr-defined]
        ours = dict(model.named_parameters())
    assert ours
    for name, weight in ours.items():
        assert torch.equal(weight, reference.get_parameter(name)), name
    with Store.open(rounded_store) as store:
        for expert in range(8):
            up, down = decode_expert(store, ExpertKey(1, expert))
            experts = reference.get_submodule(store.manifest.module_names[1])
            assert torch.equal(up, experts.gate_up_proj[expert])
            assert torch.equal(down, experts.down_proj[expert])


def test_any_range_of_a_rounded_file_is_that_of_the_file_it_would_be(
    floats: Path, rounded_store: Path, tmp_path: Path
) -> None:
    exported = export_checkpoint(rounded_store, tmp_path / "exported")
    draw = torch.Generator().manual_seed(5)
    for file in with_bf16_experts(open_checkpoint(floats)).files[:4]:
        whole = (exported / file.path.name).read_bytes()
        assert file.size_bytes == len(whole)
        for _ in range(40):
            start, stop = sorted(torch.randint(0, len(whole) + 1, (2,), generator=draw).tolist())
            assert file.read(start, stop - start).tobytes() == whole[start:stop], (start, stop)


def test_fp32_is_loaded_where_that_is_asked_for(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="are fp32"):
        moespeq.load(floats, device="cpu")
    with moespeq.load(floats, device="cpu", convert_to="bf16", ctx_size=64) as engine:
        assert len(engine.generate(prompts(1)[0], max_new_tokens=3, ignore_eos=True).tokens) == 3


def test_asking_for_bf16_of_a_bf16_checkpoint_changes_nothing(tmp_path: Path) -> None:
    source = make_tiny("mixtral", tmp_path / "m")
    checkpoint = open_checkpoint(source)
    assert with_bf16_experts(checkpoint) is checkpoint


def test_no_other_dtype_can_be_asked_for() -> None:
    with pytest.raises(UsageError, match="convert_to must be 'bf16' or left out, got 'fp8'"):
        moespeq.load("anything", convert_to="fp8")
