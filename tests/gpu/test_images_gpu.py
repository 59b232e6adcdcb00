"""Prompts with images on a GPU: the same text for every k, and a CPU's first logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import open_tight
from image_families import IMAGE_FAMILIES, make_reader, png
from moespeq.decode.engine import Engine
from moespeq.model.images import ImagePrompt
from moespeq.prepare import prepare_store

pytestmark = pytest.mark.gpu
BOTH_WAYS = {"gemma4": {"use_bidirectional_attention": "vision"}}


@pytest.fixture(scope="module", params=IMAGE_FAMILIES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    made = make_reader(request.param, folder / "checkpoint", **BOTH_WAYS.get(request.param, {}))
    return prepare_store(made, folder / "store")


def _open(store: Path, **options: Any) -> Engine:
    return open_tight(store, 9, ctx_size=320, prefill_rows=80, **options)


def _ask(engine: Engine) -> ImagePrompt:
    images = [{"type": "image", "image": engine.images.read(png(seed))} for seed in (1, 2)]
    between = {"type": "text", "text": "What is it?"}
    prompt = engine.encode_chat([{"role": "user", "content": [images[0], between, images[1], between]}])
    assert isinstance(prompt, ImagePrompt)
    return prompt


def test_every_k_gives_the_same_text(store: Path) -> None:
    texts = []
    for k in (0, 1, 4):
        with _open(store, device="cuda", k=k) as engine:
            texts.append(engine.generate(_ask(engine), max_new_tokens=24, ignore_eos=True).tokens)
    assert texts[0] == texts[1] == texts[2]


def test_logits_are_a_cpus_but_for_rounding(store: Path) -> None:
    with _open(store, device="cuda") as engine:
        on_gpu = engine.prompt_logits(_ask(engine)).float().cpu()
    with _open(store, device="cpu") as engine:
        on_cpu = engine.prompt_logits(_ask(engine)).float()
    assert torch.nn.functional.cosine_similarity(on_gpu, on_cpu).min() > 0.99
