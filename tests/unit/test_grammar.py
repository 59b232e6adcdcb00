"""A grammar's answer is a function of the text, whatever it was asked about before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moespeq.demo.assets import MODEL_FOLDER
from moespeq.errors import UsageError
from moespeq.model.tokenizer import Tokenizer
from moespeq.server.grammar import Grammar, GrammarCompiler
from moespeq.server.protocol import ResponseFormat

VOCAB_SIZE = 4096


@pytest.fixture(scope="module", name="json")
def _json() -> Grammar:
    definition = (MODEL_FOLDER / "tokenizer.json").read_text(encoding="utf-8")
    return GrammarCompiler(definition, VOCAB_SIZE, (0,)).compile(ResponseFormat(type="json_object"))


def scores_behind(processor: object, tokens: list[int]) -> Tensor:
    return processor(torch.tensor([tokens], dtype=torch.int64), torch.zeros(1, VOCAB_SIZE))


def test_a_text_that_cannot_be_is_forgotten_when_another_is_asked_about(json: Grammar) -> None:
    """Drafted tokens may lead where no token may follow; they are then rejected, and the text goes on elsewhere."""
    tokenizer = Tokenizer.load(MODEL_FOLDER)
    assert tokenizer is not None
    begun, impossible = (tokenizer.encode(text) for text in ('{"a', "}}"))
    processor = json.processor(0)
    with pytest.raises(UsageError):
        scores_behind(processor, [*begun[:1], *impossible])
    assert torch.equal(scores_behind(processor, begun), scores_behind(json.processor(0), begun))
