"""MXFP4 as GPT-OSS has it: blocks and scales are the target; the draft's base is of 3 or 2 bits, or there is none."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engines import flip_schedule, open_tight, prompts
from families import make_tiny
from moespeq.decode.planning import StoreSizes
from moespeq.errors import CheckpointError, UsageError
from moespeq.forecast import plan_model
from moespeq.forecast.sizes import CheckpointSizes
from moespeq.inspection import describe_model
from moespeq.model.checkpoint_map import map_checkpoint
from moespeq.nested import BaseFormat, Layout
from moespeq.prepare import cache_folder_for, export_checkpoint, prepare_cached, prepare_store, verify_store
from moespeq.prepare.experts import decode_expert
from moespeq.store import Store, open_checkpoint
from moespeq.types import ExpertKey
from scaled_checkpoints import to_mxfp4
from synthetic_store import files_of

NUM_SLOTS, NUM_TOKENS = 6, 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4") / "m"
    return to_mxfp4(make_tiny("gpt_oss", folder, shard_size="1GB", intermediate_size=96))


@pytest.fixture(scope="module")
def store(checkpoint: Path) -> Path:
    return prepare_store(checkpoint, checkpoint.parent / "store")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> torch.nn.Module:
    """What transformers itself makes of the checkpoint where there is no GPU: bf16, dequantised as it loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.quantizers.quantizer_mxfp4.is_accelerate_available", lambda: True)
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, experts_implementation="eager")


def texts(store: Path, k: int) -> list[tuple[int, ...]]:
    with open_tight(store, NUM_SLOTS, k=k) as engine:
        return [engine.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens for prompt in prompts(1)]


def test_it_comes_back_bit_for_bit(checkpoint: Path, store: Path, tmp_path: Path) -> None:
    report = verify_store(store, against=checkpoint)
    tensors = open_checkpoint(checkpoint).tensors.values()
    assert report.compared_bits == 8 * sum(place.entry.num_bytes for place in tensors)
    assert files_of(export_checkpoint(store, tmp_path / "exported")) == files_of(checkpoint)
    with Store.open(store) as opened:
        assert set(opened.manifest.layouts) == {Layout.MXFP4}
        assert opened.manifest.base_format.bits == 3


def test_every_weight_is_the_one_that_transformers_loads(store: Path, reference: torch.nn.Module) -> None:
    with Store.open(store) as opened:
        for layer, name in enumerate(opened.manifest.module_names):
            experts = reference.get_submodule(name)
            for expert in range(opened.manifest.num_experts):
                up, down = decode_expert(opened, ExpertKey(layer, expert))
                assert torch.equal(up, experts.gate_up_proj[expert].T)
                assert torch.equal(down, experts.down_proj[expert].T)
                assert up.count_nonzero() > 0


def test_the_target_is_that_of_transformers(store: Path, reference: torch.nn.Module) -> None:
    """The same weights in float32, equal row counts."""
    wide = copy.deepcopy(reference).float()
    with open_tight(store, NUM_SLOTS, dtype=torch.float32) as engine:
        for prompt in prompts(2, length=20):
            with torch.inference_mode():
                expected = wide(input_ids=torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(engine.prompt_logits(prompt), expected, atol=1e-4, rtol=0)


def test_the_text_does_not_depend_on_k(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = texts(store, 0)
    assert texts(store, 4) == plain
    flip_schedule(monkeypatch, 4)
    assert texts(store, 4) == plain


def test_a_base_of_3_bits_drafts_and_is_prefetched_for(store: Path) -> None:
    with open_tight(store, NUM_SLOTS, k=4) as engine:
        stats = engine.generate(prompts(1)[0], max_new_tokens=NUM_TOKENS, ignore_eos=True).stats
    assert stats.accepted > 0
    assert stats.bytes_by_cause["prefetch"] > 0


def test_without_a_draft_no_base_is_resident(store: Path) -> None:
    with open_tight(store, NUM_SLOTS, records="whole", k=0) as engine:
        assert (engine.plan.base_bytes, engine.plan.num_bases) == (0, 0)
        found = engine.generate(prompts(1)[0], max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens
    assert [found] == texts(store, 0)


def test_a_base_as_large_as_the_target_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"MXFP4, 4 bits .*a base of 4 bits would be as large .*--bits 3 or --bits 2"):
        prepare_store(checkpoint, tmp_path / "store", fmt=BaseFormat(4, 64, zero_point=True))
    assert list(tmp_path.iterdir()) == []


def test_plan_says_why_a_draft_of_4_bits_cannot_be_smaller(checkpoint: Path, store: Path) -> None:
    for model in (checkpoint, store):
        report = plan_model(model, device="cpu", device_memory="64MiB")
        assert report.plan is not None
        assert report.plan.reasons["target"].startswith("mxfp4: records are the checkpoint's own numbers")
        assert "one of 4 bits could not be smaller than the target" in report.plan.reasons["target"]
        assert report.sharing is not None
        assert report.sharing.slots_bytes == 0  # nothing larger would lie in slots
    with Store.open(store) as opened:
        exact = StoreSizes(opened).needs("store")
    reckoned = CheckpointSizes(checkpoint, "m", layout=Layout.FIXED).needs("store")
    assert (reckoned.base_bytes, reckoned.num_records) == (exact.base_bytes, exact.num_records)
    assert 0.95 < reckoned.slot_bytes / exact.slot_bytes <= 1.01
    assert 0.9 < reckoned.dense_bytes / exact.dense_bytes < 1.1


def test_info_says_what_it_is(checkpoint: Path, store: Path) -> None:
    facts = describe_model(store)
    assert (facts["target"], facts["records"], facts["base_bits"]) == ("mxfp4", "mxfp4", 3)
    assert 4.25 <= facts["bits_per_weight"] < 4.3
    assert describe_model(checkpoint)["experts"] == "MXFP4"


def test_the_cache_knows_it_by_its_own_base(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path))
    made = prepare_cached(checkpoint, device="cpu")
    assert made == cache_folder_for(checkpoint, fmt=BaseFormat(3, 64, zero_point=True))
    assert prepare_cached(checkpoint, device="cpu") == made


def test_blocks_without_scales_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors.index.json").unlink()
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors = {key: tensor for path in tmp_path.glob("*.safetensors") for key, tensor in load_file(path).items()}
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_blocks' and its scales are no MXFP4 weights"):
        map_checkpoint(open_checkpoint(tmp_path))
