"""Beyond 32,768 positions: equal to transformers' own, the same in chunks and rounds as in one pass.

Every kind of rotation in the default run, every family in the full one. What lies before is not computed but put into
the caches, random and equal in both, states with it: far positions are cheap so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache, PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from engines import flip_schedule, noisy_draft
from families import FAMILIES, auto_class, make_tiny
from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine
from moespeq.decode.engine import Engine
from moespeq.model.recurrent import StateLayer
from moespeq.prepare import prepare_store
from moespeq.residency import PassKind

BORDER = 32_768
CHUNK_ROWS = 16
BEGIN, END = BORDER - 32, BORDER + 24  # what is computed
CONTEXT = BORDER + 512
_FACTORS = {"short_factor": [1.0] * 4 + [1.2] * 4, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]}


_FEW = {"num_hidden_layers": 2, "initializer_range": 0.3}
_BOTH = {**_FEW, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Rotation:
    """A family, and how its configuration turns positions."""

    family: str
    parameters: dict[str, Any] | None
    shape: dict[str, Any] = field(default_factory=lambda: dict(_FEW))


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
    "yarn-tuned": Rotation(
        "mistral3",
        rotation(
            "yarn",
            factor=16.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
            llama_4_scaling_beta=0.1,
        ),
    ),
    "yarn-windowed": Rotation(
        "gpt_oss", rotation("yarn", factor=16.0, truncate=False, original_max_position_embeddings=4096), _BOTH
    ),
    "llama3": Rotation(
        "mixtral",
        rotation(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
    ),
    "llama3-complex": Rotation(
        "llama4_text",
        rotation(
            "llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=8192
        ),
        {**_FEW, "moe_layers": [1]},
    ),
    "proportional": Rotation("gemma4_text", None, _BOTH),
    "longrope": Rotation("qwen3_moe", rotation("longrope", original_max_position_embeddings=8192, **_FACTORS)),
    "alpha": Rotation("hunyuan_v1_moe", rotation("dynamic", factor=1.0, alpha=1000.0)),
}
# Jamba knows no positions, and a pass of several rows by transformers forgets what was before; the compressed keys of
# DeepSeek-V4 cannot be put into its own cache, which keeps no more than it needs.
EVERY_FAMILY = [name for name in FAMILIES if name not in ("jamba", "deepseek_v4")]
# Of a family's text: in some, a norm blows up a row's rounding a hundredfold, or one token is repeated for ever.
SEEDS = {**dict.fromkeys(EVERY_FAMILY, 1), "mistral3": 2}


def make_rotated(name: str, folder: Path) -> Path:
    """A checkpoint of a kind of rotation, with few layers, or of a family; and its store, which is returned."""
    case = ROTATIONS.get(name, Rotation(name, None, {}))
    given = {} if case.parameters is None else {"rope_parameters": case.parameters}
    checkpoint = make_tiny(
        case.family,
        folder / "checkpoint",
        shard_size="1GB",
        max_position_embeddings=2 * BORDER,
        **case.shape,
        **given,
    )
    return prepare_store(checkpoint, folder / "store")


@dataclass(frozen=True)
class Far:
    """An open engine in float32 whose cache is filled up to BEGIN, and a text of END tokens.

    states: of the layers that have one, at BEGIN.
    """

    engine: Engine
    checkpoint: Path
    text: list[int]
    states: list[list[torch.Tensor]]

    @property
    def runner(self) -> Any:
        return self.engine._parts.runner

    def pretend(self) -> None:
        """What lies before BEGIN has been prefilled."""
        live = self.engine._parts.loop._live
        live.cut(0)
        live.add_prefilled(self.text[:BEGIN])
        self.engine._parts.loop._rotation = self.runner.rotation_of(END)
        self.put_states()

    @torch.inference_mode()
    def put_states(self) -> None:
        """Layers with a state are at BEGIN."""
        states = self.runner._states
        place = BEGIN % states._num_kept
        for layer, tensors in zip(states._layers, self.states, strict=True):
            for running, tensor in zip(layer._running(), tensors, strict=True):
                running.copy_(tensor)
            layer.save(place)
        states._kept = {place: BEGIN}

    def logits(self, *, chunk_rows: int) -> torch.Tensor:
        """Of what is computed, in chunks."""
        parts = []
        self.put_states()
        for begin in range(BEGIN, END, chunk_rows):
            self.engine._parts.residency.begin_pass(PassKind.PREFILL)
            rows = self.text[begin : min(begin + chunk_rows, END)]
            parts.append(self.runner.prefill(rows, begin, num_logits=0, text_tok=END))
            self.engine._parts.residency.end_pass(1)
        return torch.cat(parts)

    def own_model(self) -> PreTrainedModel:
        auto = auto_class(AutoConfig.from_pretrained(self.checkpoint))
        model: PreTrainedModel = auto.from_pretrained(
            self.checkpoint, dtype=torch.float32, experts_implementation="eager"
        )
        return model

    @torch.inference_mode()
    def own_logits(self, model: PreTrainedModel, *, chunk_rows: int) -> torch.Tensor:
        """The same by transformers itself, behind the same keys and values."""
        cache, parts = self.own_cache(model), []
        for begin in range(BEGIN, END, chunk_rows):
            end = min(begin + chunk_rows, END)
            output = model(
                input_ids=torch.tensor([self.text[begin:end]]),
                past_key_values=cache,
                position_ids=torch.arange(begin, end)[None],
            )
            parts.append(output.logits[0])
        return torch.cat(parts)

    def own_cache(self, model: PreTrainedModel) -> DynamicCache:
        """transformers' cache of the same keys, values and states."""
        is_minimax = model.config.model_type == "minimax"
        cache = MiniMaxCache() if is_minimax else DynamicCache(config=model.config)
        states = iter(self.states)
        for index, layer in enumerate(self.runner._cache.layers):
            if isinstance(layer, StateLayer):
                tensors = iter([tensor.clone() for tensor in next(states)])
                if is_minimax:
                    cache.set_linear_cache(index, next(tensors))
                else:
                    give_states(cache.layers[index], layer, tensors)
            static = self.runner._cache._static[index]
            if static.is_initialized:
                keys, values, *indexer = (tensor[..., :BEGIN, :].clone() for tensor in static.storage)
                cache.update(keys, values, index)
                for tensor in indexer:
                    cache.update_indexer(tensor[0], index)
        return cache


def give_states(own: Any, ours: StateLayer, tensors: Iterator[torch.Tensor]) -> None:
    """Make `tensors`, in the order of our running ones, the states of a cache layer of transformers."""
    for kind in ("conv_states", "recurrent_states"):
        for index, running in getattr(ours, kind).items():
            if running is not None:
                own.lazy_initialization(**{kind: running}, state_idx=index)
                getattr(own, kind)[index].copy_(next(tensors))
                own.has_previous_state[index] = True


def random_like(tensor: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=chance)


@pytest.fixture(
    scope="module", params=[*ROTATIONS, *(pytest.param(name, marks=pytest.mark.exact) for name in EVERY_FAMILY)]
)
def far(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    folder = tmp_path_factory.mktemp(request.param)
    store = make_rotated(request.param, folder)
    chance = torch.Generator().manual_seed(SEEDS.get(request.param, 0))
    text = torch.randint(3, 320, (END,), generator=chance).tolist()
    options = LoadOptions(device="cpu", ctx_size=CONTEXT, k=4, prefill_rows=CHUNK_ROWS)
    with pytest.MonkeyPatch.context() as patch, open_engine(store, options, dtype=torch.float32) as engine:
        noisy_draft(patch, store, 0.0)
        engine.prompt_logits([5])
        with torch.inference_mode():
            for layer in engine._parts.runner.kv_rows(0, BEGIN):
                for tensor in layer:
                    tensor.copy_(random_like(tensor, chance))
        layers = engine._parts.runner._states._layers
        states = [[0.1 * random_like(tensor, chance) for tensor in layer._running()] for layer in layers]
        yield Far(engine, folder / "checkpoint", text, states)


def test_logits_are_those_of_transformers_whatever_the_chunks(far: Far) -> None:
    """In one pass; where there are states, whose kernels round by the chunk, in the same chunks."""
    model, one_pass = far.own_model(), END - BEGIN
    for chunk_rows in (CHUNK_ROWS, 24, one_pass):
        own = far.own_logits(model, chunk_rows=chunk_rows if far.states else one_pass)
        assert own.std() > 0.05
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
