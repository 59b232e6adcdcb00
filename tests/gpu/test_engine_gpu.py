"""The whole engine on a GPU: the same text for every k, with slots forced tight, on every family.

The draft of a tiny random model hardly ever agrees with it, so flipped tokens and a noisy base visit every acceptance
length on the CPU (golden/test_families.py); here the claim is that graphs, streams and kernels change nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines import open_tight, prompts
from families import ON_A_GPU, make_tiny
from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine
from moespeq.demo.assets import MODEL_FOLDER
from moespeq.nested import BF16_LAYOUTS, Layout
from moespeq.prepare import prepare_store
from moespeq.store import Store
from moespeq.transfer import PlainSource
from moespeq.types import Cause

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=ON_A_GPU)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return prepare_store(make_tiny(request.param, folder / "checkpoint"), folder / "store")


def texts(store: Path, num_slots: int, *, tokens: int = 24, **options: object) -> list[tuple[int, ...]]:
    with open_tight(store, num_slots, device="cuda", **options) as engine:
        return [engine.generate(prompt, max_new_tokens=tokens, ignore_eos=True).tokens for prompt in prompts(3)]


def test_every_k_gives_the_same_text(store: Path) -> None:
    plain = texts(store, 9, k=0)
    assert all(texts(store, 9, k=k) == plain for k in (1, 4, 16))


def test_slots_and_prefetch_change_no_token(store: Path) -> None:
    assert texts(store, 1, k=4) == texts(store, 24, k=4) == texts(store, 9, k=4, prefetch=False)


def test_sampling_gives_the_same_text_for_every_k(store: Path) -> None:
    def sampled(k: int) -> list[tuple[int, ...]]:
        with open_tight(store, 9, device="cuda", k=k) as engine:
            params = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "max_new_tokens": 24, "ignore_eos": True}
            return [engine.generate(prompt, **params).tokens for prompt in prompts(2)]

    assert sampled(0) == sampled(4)


def test_a_prompt_is_foreseen_and_little_of_it_is_wasted(store: Path) -> None:
    with open_tight(store, 24, device="cuda", k=4) as engine:
        prefill = engine.generate(prompts(1)[0], max_new_tokens=2, ignore_eos=True).stats.prefill
        if "CUDA" not in engine.facts["draft"]:
            pytest.skip("passes of this family run eagerly")
    assert prefill.bytes_by_cause[Cause.STAGE] > 0
    assert prefill.used_bytes > 0.8 * prefill.link_bytes


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 300])
def test_a_short_prompt_through_graphs_is_the_eager_one(num_tokens: int, store: Path) -> None:
    with open_tight(store, 24, device="cuda", k=4, ctx_size=512) as engine:
        if "CUDA" not in engine.facts.get("prefill", "eager"):
            pytest.skip("passes of this family run eagerly")
        tokens = [5 + place * 7 % 90 for place in range(num_tokens)]
        eager = engine.prompt_logits(tokens)[-1]
        graphs = []
        for other in (3, 9):
            engine.prompt_logits([other] * 300)  # what lies behind the prompt is another's
            graphs += [logits[0].clone() for logits in engine._parts.loop._prefill(tokens, num_logits=1)]
    assert torch.equal(graphs[0], graphs[1])
    torch.testing.assert_close(graphs[0], eager, atol=0.05, rtol=0.05)


@pytest.fixture(scope="module")
def demo_folder() -> Path:
    return MODEL_FOLDER


@pytest.mark.parametrize("layout", BF16_LAYOUTS)
def test_every_layout_gives_the_same_text(layout: Layout, demo_folder: Path, tmp_path: Path) -> None:
    store = prepare_store(demo_folder, tmp_path / "store", layout=layout)
    with open_engine(store, LoadOptions(device="cuda", k=8)) as engine:
        text = engine.generate("Question: Tom has 3 apples and buys 4. Answer:", max_new_tokens=48).tokens
    reference = prepare_store(demo_folder, tmp_path / "plain", layout=Layout.PLAIN)
    with open_engine(reference, LoadOptions(device="cuda", k=0)) as engine:
        assert engine.generate("Question: Tom has 3 apples and buys 4. Answer:", max_new_tokens=48).tokens == text


def test_memory_comes_back_when_an_engine_is_closed(demo_folder: Path, tmp_path: Path) -> None:
    store = prepare_store(demo_folder, tmp_path / "store")
    used = []
    for _ in range(3):
        with open_engine(store, LoadOptions(device="cuda", k=4)) as engine:
            engine.generate([5, 6, 7], max_new_tokens=8)
        del engine
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_allocated())
    assert used[2] <= used[1]


def test_records_decoded_on_the_gpu_are_those_decoded_on_the_cpu(demo_folder: Path, tmp_path: Path) -> None:
    path = prepare_store(demo_folder, tmp_path / "store")
    with Store.open(path) as store:
        shapes, fmt = store.manifest.shapes, store.manifest.base_format
        sources = [PlainSource(store, shapes, fmt, device=device) for device in ("cpu", "cuda")]
        for key in list(store.keys()):
            found = [bytearray(source.num_bytes(key)) for source in sources]
            for source, buffer in zip(sources, found, strict=True):
                source.read_into(key, memoryview(buffer))
            assert found[0] == found[1], key


@pytest.mark.parametrize("records", ["plain", "whole"])
def test_what_crosses_the_link_changes_no_token(records: str, store: Path) -> None:
    with open_engine(store, LoadOptions(device="cuda", k=0, records="store")) as engine:
        expected = [engine.generate(prompt, max_new_tokens=24, ignore_eos=True).tokens for prompt in prompts(3)]
    with open_engine(store, LoadOptions(device="cuda", k=0, records=records)) as engine:
        found = [engine.generate(prompt, max_new_tokens=24, ignore_eos=True).tokens for prompt in prompts(3)]
    assert found == expected
