"""Rotations beyond 32,768 positions: equal to transformers' own, the same in chunks and rounds as in one pass.

What lies before is not computed but put into the caches, random and equal in both: far positions are cheap so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from engines import flip_schedule, noisy_draft
from families import make_tiny
from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine
from moespeq.decode.engine import Engine
from moespeq.prepare import prepare_store
from moespeq.residency import PassKind

BORDER = 32_768
CHUNK_ROWS = 16
BEGIN, END = BORDER - 32, BORDER + 24  # what is computed
CONTEXT = BORDER + 512
_FACTORS = {"short_factor": [1.0] * 4 + [1.2] * 4, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]}


@dataclass(frozen=True)
class Rotation:
    """A family, and how its configuration turns positions."""

    family: str
    parameters: dict[str, Any] | None
    max_position_embeddings: int = 2 * BORDER


def rotation(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


ROTATIONS = {
    "default": Rotation("qwen3_moe", rotation("default")),
    "linear": Rotation("qwen3_moe", rotation("linear", factor=4.0)),
    "dynamic": Rotation("qwen3_moe", rotation("dynamic", factor=2.0)),
    "yarn": Rotation("qwen3_moe", rotation("yarn", factor=8.0, original_max_position_embeddings=8192)),
    "yarn-latent": Rotation(
        "deepseek_v3",
        rotation("yarn", factor=16.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096),
    ),
    "yarn-windowed": Rotation(
        "gpt_oss",
        rotation("yarn", factor=16.0, truncate=False, original_max_position_embeddings=4096),
    ),
    "llama3": Rotation(
        "mixtral",
        rotation(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
    ),
    "proportional": Rotation("gemma4_text", None),
    "longrope": Rotation("qwen3_moe", rotation("longrope", original_max_position_embeddings=8192, **_FACTORS)),
    "alpha": Rotation("hunyuan_v1_moe", rotation("dynamic", factor=1.0, alpha=1000.0)),
}


def make_rotated(name: str, folder: Path) -> Path:
    """A checkpoint of few layers, and its store; returns the store."""
    case = ROTATIONS[name]
    given = {} if case.parameters is None else {"rope_parameters": case.parameters}
    layers = {"num_hidden_layers": 2, "initializer_range": 0.3}
    if case.family in ("gpt_oss", "gemma4_text"):
        layers["layer_types"] = ["sliding_attention", "full_attention"]
    checkpoint = make_tiny(
        case.family,
        folder / "checkpoint",
        shard_size="1GB",
        max_position_embeddings=case.max_position_embeddings,
        **layers,
        **given,
    )
    return prepare_store(checkpoint, folder / "store")


@dataclass(frozen=True)
class Far:
    """An open engine in float32 whose cache is filled up to BEGIN, and a text of END tokens."""

    engine: Engine
    checkpoint: Path
    text: list[int]

    @property
    def runner(self) -> Any:
        return self.engine._parts.runner

    def pretend(self) -> None:
        """What lies before BEGIN has been prefilled."""
        live = self.engine._parts.loop._live
        live.cut(0)
        live.add_prefilled(self.text[:BEGIN])
        self.engine._parts.loop._rotation = self.runner.rotation_of(END)

    def logits(self, *, chunk_rows: int) -> torch.Tensor:
        """Of what is computed, in chunks."""
        parts = []
        for begin in range(BEGIN, END, chunk_rows):
            self.engine._parts.residency.begin_pass(PassKind.PREFILL)
            rows = self.text[begin : min(begin + chunk_rows, END)]
            parts.append(self.runner.prefill(rows, begin, num_logits=0, text_tok=END))
            self.engine._parts.residency.end_pass(1)
        return torch.cat(parts)

    def own_logits(self) -> torch.Tensor:
        """The same by transformers itself, in one pass behind the same keys and values."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.checkpoint, dtype=torch.float32, experts_implementation="eager"
        )
        cache = DynamicCache(config=model.config)
        for layer, (keys, values, *_) in zip(cache.layers, self.runner.kv_rows(0, BEGIN), strict=True):
            layer.update(keys.clone(), values.clone())
        with torch.inference_mode():
            output = model(
                torch.tensor([self.text[BEGIN:]]),
                past_key_values=cache,
                position_ids=torch.arange(BEGIN, END)[None],
            )
        logits: torch.Tensor = output.logits[0]
        return logits


@pytest.fixture(scope="module", params=ROTATIONS)
def far(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    folder = tmp_path_factory.mktemp(request.param)
    store = make_rotated(request.param, folder)
    chance = torch.Generator().manual_seed(0)
    text = torch.randint(3, 320, (END,), generator=chance).tolist()
    options = LoadOptions(device="cpu", ctx_size=CONTEXT, k=4, prefill_rows=CHUNK_ROWS)
    with pytest.MonkeyPatch.context() as patch, open_engine(store, options, dtype=torch.float32) as engine:
        noisy_draft(patch, store, 0.0)
        engine.prompt_logits([5])
        with torch.inference_mode():
            for layer in engine._parts.runner.kv_rows(0, BEGIN):
                for tensor in layer:
                    tensor.copy_(torch.randn(tensor.shape, generator=chance))
        yield Far(engine, folder / "checkpoint", text)


def test_logits_are_those_of_transformers_whatever_the_chunks(far: Far) -> None:
    own = far.own_logits()
    assert own.std() > 0.1
    for chunk_rows in (CHUNK_ROWS, 24, END - BEGIN):
        torch.testing.assert_close(far.logits(chunk_rows=chunk_rows), own, atol=1e-4, rtol=0)


def texts_of(far: Far, prompt_tok: int, depths: Sequence[int]) -> set[tuple[int, ...]]:
    """Greedy texts behind the first `prompt_tok` tokens, the drafts of each round wrong at another place."""
    texts = set()
    for k in depths:
        far.engine.retune(k=k)
        far.pretend()
        with pytest.MonkeyPatch.context() as patch:
            flip_schedule(patch, k)
            stream = far.engine.stream(far.text[:prompt_tok], max_new_tokens=8, ignore_eos=True, reuse="prompt")
            for _ in stream:
                pass
        assert stream.reused_tok == BEGIN
        assert bool(k) == (sum(stream.result.stats.accepted_per_round) > 0)
        texts.add(stream.result.tokens)
    return texts


def test_rounds_across_the_border_give_the_text_of_plain_decoding(far: Far) -> None:
    (text,) = texts_of(far, BORDER - 3, (0, 4))
    assert len(set(text)) > 2


@pytest.mark.exact
@pytest.mark.parametrize("prompt_tok", [BORDER - 3, BORDER, END])
def test_rounds_of_every_depth_around_the_border_give_one_text(far: Far, prompt_tok: int) -> None:
    assert len(texts_of(far, prompt_tok, (0, 1, 4, 8))) == 1
