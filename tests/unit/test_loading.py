"""What a model folder says about generation, and what is said when it says nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest

from families import tiny_config
from moespeq.errors import CheckpointError
from moespeq.model.loading import load_generation_config, one_line


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"max_new_tokens": "many"}', "\udcff"])
def test_a_damaged_generation_config_is_a_checkpoint_error_of_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read") as caught:
        load_generation_config(tmp_path, tiny_config("qwen3_moe"))
    assert "\n" not in str(caught.value)


def test_a_folder_without_generation_config_generates_as_its_model_config_implies(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path, tiny_config("qwen3_moe")).eos_token_id == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Wrong.\nLong advice.", "Wrong"),
        ("Error for 'x':\n    TypeError: not an int\n\nmore", "Error for 'x': TypeError: not an int"),
        ("", "ValueError"),
    ],
)
def test_an_error_is_told_in_the_line_that_says_what_is_wrong(text: str, line: str) -> None:
    assert one_line(ValueError(text)) == line
