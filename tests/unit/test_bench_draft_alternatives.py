"""What of the comparison with other draft kernels needs no GPU: the packing, the table, the sentence."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("triton")

from draft_alternatives import EXPERTS, SHAPES, measure_all, table
from humming_experts import import_humming, pack_zeros
from moespeq.errors import UsageError


def test_zero_points_become_words_of_eight_rows_lowest_first() -> None:
    zeros = torch.arange(2 * 16 * 3, dtype=torch.uint8).view(2, 16, 3) % 16
    words = pack_zeros(zeros)
    assert words.shape == (2, 2, 3)
    shifts = 4 * torch.arange(8).view(1, 1, 8, 1)
    assert torch.equal((words.unsqueeze(2) >> shifts & 15).reshape(2, 16, 3), zeros.to(torch.int64))


def test_the_table_has_a_line_for_what_was_measured_and_for_what_was_refused() -> None:
    times = {"error": 0.0041, "up_us": 7.5, "down_us": 5.25, "layer_us": 14.0, "gb_per_s": 1357.2}
    rows = [
        {"shape": "mixtral-8x7b", "weights": "symmetric", "kernels": "humming", "reason": "AssertionError: no"},
        {"shape": "qwen1.5-moe", "weights": "zero point", "kernels": "ours", **times},
    ]
    head, measured, refused = table(rows).splitlines()
    assert head.split()[-5:] == ["up_us", "down_us", "layer_us", "gb_per_s", "error"]
    assert measured.split() == ["qwen1.5-moe", "zero", "point", "ours", "7.50", "5.25", "14.00", "1357", "0.0041"]
    assert refused.endswith("AssertionError: no")


def test_without_humming_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    with pytest.raises(UsageError, match="pip install humming-kernels"):
        import_humming()


def test_past_its_time_every_row_says_so() -> None:
    rows = list(measure_all(["qwen3-30b"], deadline_s=0.0))
    assert len(rows) == 4
    assert all("--max-seconds" in row["reason"] for row in rows)
    assert set(EXPERTS) == set(SHAPES)
