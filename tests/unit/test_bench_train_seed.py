"""A seed can be trained from nothing but a jsonl file, and widened afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from shapes import SHAPES, Factors
from train_seed import SEEDS, Schedule, new_model, train_seed
from widen import WideModel

SCHEDULE = Schedule(steps=80, minutes=5, batch=8, block_tok=32, lr=1e-2)
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, first in (("train.jsonl", 0), ("test.jsonl", 50)):
        problems = [
            {"question": f"What is {n} plus 1?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}."}
            for n in range(first, first + 50)
        ]
        (tmp_path / name).write_text("\n".join(map(json.dumps, problems)))
    return tmp_path


def test_a_seed_learns_and_is_written_as_a_checkpoint(data: Path, tmp_path: Path) -> None:
    overrides = {**TINY, "vocab_size": 300, "num_local_experts": 4, "intermediate_size": 16}
    untrained = new_model("mixtral-8x7b", **overrides)
    loss = train_seed("mixtral-8x7b", data, tmp_path / "seed", SCHEDULE, seed=0, device="cpu", **overrides)
    assert loss < 4.5, "a uniform guess over 300 tokens costs 5.7"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "seed")
    assert model.num_parameters() == untrained.num_parameters()
    assert AutoTokenizer.from_pretrained(tmp_path / "seed").eos_token_id == model.config.eos_token_id == 0
    facts = json.loads((tmp_path / "seed" / "training.json").read_text())
    assert facts["validation_loss"] == pytest.approx(loss, abs=1e-3)
    assert WideModel(tmp_path / "seed", Factors(2, 2, 1)).config["hidden_size"] == 64


def test_every_published_shape_has_a_seed_of_its_layers() -> None:
    assert set(SEEDS) == set(SHAPES) - {"smoke"}
    for shape, (_, config) in SEEDS.items():
        assert config["num_hidden_layers"] == SHAPES[shape].num_layers


def test_the_learning_rate_warms_up_and_falls() -> None:
    schedule = Schedule(steps=1000, minutes=1e9, batch=1, block_tok=1, lr=1.0)
    rates = [schedule.lr_at(step, schedule.progress(step, 0.0)) for step in (1, 60, 500, 1000)]
    assert rates[0] < rates[1] > rates[2] > rates[3] == pytest.approx(0.05)
