"""The demo model on GSM8K: the text is the same for every k, greedy and coupled sampling, in bf16.

The default run checks a few prompts; `make exact` checks 100 prompts x 64 tokens, and
20 sampled ones, for k in 0, 1, 4, 8, 16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines import open_tight
from moespeq.demo.assets import MODEL_FOLDER, read_questions
from moespeq.prepare import prepare_store

DEPTHS = (0, 1, 4, 8, 16)
NUM_SLOTS = 40  # of 128 experts
SAMPLING = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.05}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_store(MODEL_FOLDER, tmp_path_factory.mktemp("demo") / "store")


def _check(
    store: Path, first: int, count: int, num_tokens: int, depths: tuple[int, ...], sampling: dict[str, Any]
) -> None:
    questions = read_questions(first + count)[first:]
    expected: list[tuple[int, ...]] = []
    for k in depths:
        with open_tight(store, NUM_SLOTS, k=k, ctx_size=512) as engine:
            results = [
                engine.generate(
                    question.prompt, max_new_tokens=num_tokens, ignore_eos=True, **sampling, **_seed(sampling, number)
                )
                for number, question in enumerate(questions, start=first)
            ]
        texts = [result.tokens for result in results]
        expected = expected or texts
        drafted, accepted = (sum(getattr(r.stats, name) for r in results) for name in ("drafted", "accepted"))
        print(
            f"prompts {first}-{first + count - 1} x {num_tokens} tokens, k={k:2}: accepted {accepted}/{drafted}, "
            f"{'identical to k=0' if texts == expected else 'DIFFERENT'}"
        )
        assert texts == expected


def _seed(sampling: dict[str, Any], number: int) -> dict[str, int]:
    return {"seed": number} if sampling else {}


@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "coupled"])
def test_text_does_not_depend_on_k(store: Path, sampling: dict[str, Any]) -> None:
    _check(store, first=0, count=3, num_tokens=32, depths=(0, 4, 16), sampling=sampling)


@pytest.mark.exact
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_greedy_text_of_100_prompts_does_not_depend_on_k(store: Path, first: int) -> None:
    _check(store, first=first, count=10, num_tokens=64, depths=DEPTHS, sampling={})


@pytest.mark.exact
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_coupled_text_of_20_prompts_does_not_depend_on_k(store: Path, first: int) -> None:
    _check(store, first=first, count=5, num_tokens=64, depths=DEPTHS, sampling=SAMPLING)
