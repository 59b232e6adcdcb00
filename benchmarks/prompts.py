"""Prompts as token ids, the same for every engine: GSM8K questions, and long ones of an exact length."""

from __future__ import annotations

import json
import re
from pathlib import Path

from moespeq.model.tokenizer import Tokenizer


def read_texts(path: Path) -> list[tuple[str, str]]:
    """(prompt, answer) of each problem of a GSM8K jsonl file; calculator notes `<<...>>` are stripped."""
    problems = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (
            f"Question: {problem['question'].strip()}\nAnswer:",
            re.sub(r"<<.*?>>", "", problem["answer"]).strip(),
        )
        for problem in problems
    ]


class Prompts:
    """Numbered prompts of one file in one tokenizer's ids."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._texts, self._tokenizer = read_texts(path), tokenizer

    def question(self, number: int) -> list[int]:
        """One question, answer left open."""
        prompt, _ = self._texts[number % len(self._texts)]
        return self._tokenizer.encode(prompt)

    def long(self, num_tok: int, number: int = 0) -> list[int]:
        """Solved problems from `number` on, cut to exactly `num_tok` tokens."""
        tokens: list[int] = []
        while len(tokens) < num_tok:
            prompt, answer = self._texts[number % len(self._texts)]
            tokens += self._tokenizer.encode(f"{prompt} {answer}\n\n")
            number += 1
        return tokens[:num_tok]
