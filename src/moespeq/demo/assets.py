"""What the package carries for the demo."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MODEL_FOLDER", "Question", "read_questions"]

MODEL_FOLDER = Path(__file__).parent / "model"
_QUESTIONS = Path(__file__).parent / "questions.jsonl"


@dataclass(frozen=True, slots=True)
class Question:
    """One GSM8K test problem and its true answer, a number."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """The form the demo model was trained on."""
        return f"Question: {self.question}\nAnswer:"


def read_questions(count: int) -> list[Question]:
    """The first `count` of the packaged test problems."""
    lines = _QUESTIONS.read_text(encoding="utf-8").splitlines()[:count]
    return [Question(**json.loads(line)) for line in lines]
