"""Widening changes a checkpoint's shape and not what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from families import make_tiny
from moespeq.demo.assets import MODEL_FOLDER, read_questions
from moespeq.nested import DEFAULT_FORMAT, dequantize_base, encode_base
from shapes import SHAPES, Factors
from widen import WideModel, layer_of, rule_of, write_checkpoint

FACTORS = Factors(hidden=4, inner=3, heads=2)
FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral")


@pytest.fixture(scope="module", params=FAMILIES)
def seed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("seed"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def random_tokens() -> torch.Tensor:
    return torch.randint(3, 320, (4, 48), generator=torch.Generator().manual_seed(1))


def question_tokens() -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    return torch.tensor([tokenizer(question.prompt).input_ids[:40] for question in read_questions(6)])


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens).logits.float()


def round_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every routed matrix by its INT4 base."""
    for module in model.modules():
        for name in ("gate_up_proj", "down_proj"):
            stacked = getattr(module, name, None)
            if isinstance(stacked, torch.nn.Parameter):
                for matrix in stacked.data:
                    base = encode_base(matrix.bfloat16(), DEFAULT_FORMAT)
                    matrix.copy_(dequantize_base(base, tuple(matrix.shape), DEFAULT_FORMAT, matrix.dtype))
    return model


def agreement(folder: Path) -> float:
    """How often the model and its INT4 draft pick the same next token of questions."""
    tokens = question_tokens()
    picks = [logits_of(model, tokens).argmax(-1) for model in (load(folder), round_experts(load(folder)))]
    return (picks[0] == picks[1]).float().mean().item()


def test_wide_logits_equal_the_seeds(seed: Path, tmp_path: Path) -> None:
    write_checkpoint(WideModel(seed, FACTORS, dtype=torch.float32), tmp_path / "wide")
    narrow, wide = (logits_of(load(folder), random_tokens()) for folder in (seed, tmp_path / "wide"))
    assert (wide - narrow).abs().max() <= 1e-5 * narrow.abs().max()


def test_the_draft_of_a_trained_model_agrees_about_as_often_when_it_is_wide(tmp_path: Path) -> None:
    write_checkpoint(WideModel(MODEL_FOLDER, Factors(hidden=4, inner=4, heads=1)), tmp_path / "wide")
    assert agreement(tmp_path / "wide") == pytest.approx(agreement(MODEL_FOLDER), abs=0.08)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    write_checkpoint(WideModel(MODEL_FOLDER, FACTORS, dtype=torch.float32), tmp_path / "wide")
    narrow, wide = (logits_of(load(folder), random_tokens()) for folder in (MODEL_FOLDER, tmp_path / "wide"))
    assert (wide - narrow).abs().max() <= 1e-5 * narrow.abs().max()


def test_noise_gives_routed_weights_the_spread_of_their_fan_in(seed: Path) -> None:
    model = WideModel(seed, Factors(hidden=16, inner=8, heads=2), dtype=torch.float32)
    noisy = [name for name in model.names if rule_of(name).is_noisy]
    narrow = WideModel(seed, Factors(1, 1, 1), dtype=torch.float32)
    for name in noisy[:6]:
        times = 16 if rule_of(name).axes[1] == "hidden" else 8
        wide = model.tensor(name)
        groups = wide.unflatten(1, (-1, times))
        assert groups.std(-1).min() > 0
        assert wide.std().item() == pytest.approx(narrow.tensor(name).std().item() / times**0.5, rel=0.05)


def test_a_tensor_does_not_depend_on_what_was_made_before(seed: Path) -> None:
    one, other = WideModel(seed, FACTORS), WideModel(seed, FACTORS)
    tensors = {name: one.tensor(name) for name in one.names}
    for name in reversed(other.names):
        again = other.tensor(name)
        assert torch.equal(again, tensors[name])
        assert (tuple(again.shape), again.nbytes) == (other.shape(name), other.num_bytes(name))


def test_fewer_layers_and_a_longer_context_are_a_model_of_their_own(seed: Path, tmp_path: Path) -> None:
    model = WideModel(seed, FACTORS, num_layers=2, context_tok=8192)
    write_checkpoint(model, tmp_path / "wide")
    assert {layer_of(name) for name in model.names} == {-1, 0, 1}
    config = load(tmp_path / "wide", torch.bfloat16).config
    assert (config.num_hidden_layers, config.max_position_embeddings) == (2, 8192)


def test_a_tensor_that_no_rule_knows_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"No rule widens model\.layers.0\.mlp\.unknown"):
        rule_of("model.layers.0.mlp.unknown")


def test_a_shape_cut_to_fewer_layers_says_so_and_keeps_its_share_of_slots() -> None:
    shape = SHAPES["phi-3.5-moe"]
    half = shape.cut_to(16)
    assert (half.name, half.budget_bytes) == ("phi-3.5-moe-16-layers", shape.budget_bytes // 2)
    assert shape.cut_to(None) is shape
