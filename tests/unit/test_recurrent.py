"""Layers with a state: whatever was drafted, accepted and rejected, a row sees the committed tokens before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moespeq.model import families
from moespeq.model.recurrent import RecurrentStates, StateLayer, wrap_mixers

ROWS = 5


class Summing(nn.Module):
    """A mixer whose output is the sum of all tokens so far, its own with it; one row or many."""

    layer_idx = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows_per_call: list[int] = []

    def forward(self, hidden_states: torch.Tensor, *, cache: StateLayer) -> torch.Tensor:
        self.rows_per_call.append(hidden_states.shape[1])
        if cache.recurrent_states[0] is None:
            cache.lazy_initialization(recurrent_states=hidden_states[:, 0])
        state = cache.recurrent_states[0]
        sums = state[:, None] + hidden_states.cumsum(dim=1)
        cache.update_recurrent_state(sums[:, -1])
        return sums


class Mixed:
    """A model of one summing layer; passes as a runner makes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mixer: nn.Module | None = None, **options: bool) -> None:
        self.states = RecurrentStates(ROWS, **options)
        mixer = mixer or Summing()
        self.model = nn.ModuleDict({"mixer": mixer})
        self.model.config = _Config()  # type: ignore[assignment]
        family = families.Family(mixer=type(mixer).__name__)
        monkeypatch.setattr("moespeq.model.recurrent.FAMILIES", {"summing": family})
        self.layer = wrap_mixers(self.model, self.states)[0]  # type: ignore[arg-type]

    def prefill(self, tokens: Sequence[int], start: int) -> list[int]:
        self.states.begin_target(start, len(tokens), by_row=False)
        return self._mix(tokens)

    def verify(self, tokens: Sequence[int], start: int) -> list[int]:
        self.states.begin_target(start, len(tokens), by_row=True)
        padded = [*tokens, *[tokens[-1]] * (ROWS - len(tokens))]
        return self._mix(padded)[: len(tokens)]

    def draft(self, token: int, position: int) -> int:
        self.states.begin_draft(position)
        return self._mix([token])[0]

    def _mix(self, tokens: Sequence[int]) -> list[int]:
        hidden = torch.tensor(tokens, dtype=torch.float64)[None, :, None]
        with torch.inference_mode():
            mixed: torch.Tensor = self.model["mixer"](hidden, cache=self.layer)
        return [int(value) for value in mixed[0, :, 0]]


class Paired(Summing):
    """Answers with several tensors, one of which it never tells."""

    def forward(self, hidden_states: torch.Tensor, *, cache: StateLayer) -> Any:
        return super().forward(hidden_states, cache=cache), None


class _Config:
    model_type = "summing"

    def get_text_config(self) -> Any:
        return self


@pytest.fixture(name="mixed")
def _mixed() -> Iterator[Mixed]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Mixed(monkeypatch)


@pytest.mark.parametrize(("continues", "calls"), [(True, [3, 2]), (False, [3, 1, 1])])
def test_a_later_chunk_is_given_at_once_where_the_mixer_can_go_on_from_it(
    monkeypatch: pytest.MonkeyPatch, continues: bool, calls: list[int]
) -> None:
    mixer = Summing()
    mixed = Mixed(monkeypatch, mixer, continues=continues)
    mixed.prefill([1, 2, 3], 0)
    assert mixed.prefill([4, 5], 3) == [10, 15]
    assert mixer.rows_per_call == calls
    assert mixed.states.has(5)


def test_rows_of_an_answer_of_several_tensors_are_joined_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = Mixed(monkeypatch, Paired())
    mixed.states.begin_target(0, 2, by_row=True)
    hidden = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)[None, :, None]
    with torch.inference_mode():
        sums, untold = mixed.model["mixer"](hidden, cache=mixed.layer)
    assert sums[0, :, 0].tolist() == [1, 3, 3]
    assert untold is None


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    rounds=st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)), max_size=8),
)
def test_every_row_sees_the_committed_tokens_before_it(prompt: list[int], rounds: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        mixed, text = Mixed(monkeypatch), [*prompt, 3]
        assert mixed.prefill(prompt, 0)[-1] == sum(prompt)
        for k, accepted in rounds:
            position, drafted = len(text) - 1, [100 + step for step in range(k)]
            before = sum(text[:position])
            for step, token in enumerate([text[-1], *drafted]):
                assert mixed.draft(token, position + step) == before + sum([text[-1], *drafted][: step + 1])
            rows = mixed.verify([text[-1], *drafted], position)
            assert rows == [before + text[-1] + sum(drafted[:row]) for row in range(k + 1)]
            text += [*drafted[: min(accepted, k)], 7]
        assert mixed.states.has(len(text) - 1)


def test_a_pass_begins_only_where_a_state_was_kept(mixed: Mixed) -> None:
    mixed.prefill([1, 2, 3], 0)
    assert [mixed.states.has(position) for position in range(5)] == [True, False, False, True, False]
    mixed.verify([4, 5], 3)
    assert [mixed.states.has(position) for position in range(2, 7)] == [False, True, True, True, False]
    assert mixed.prefill([6], 5) == [1 + 2 + 3 + 4 + 5 + 6]


def test_a_prefill_from_the_start_remembers_nothing(mixed: Mixed) -> None:
    mixed.prefill([1, 2, 3], 0)
    assert mixed.prefill([5], 0) == [5]


def test_cleared_states_are_those_of_no_text(mixed: Mixed) -> None:
    mixed.prefill([1, 2, 3], 0)
    mixed.states.clear()
    assert not mixed.states.has(3)
    assert mixed.prefill([4], 0) == [4]


def test_the_ring_holds_a_state_for_every_row_and_the_one_before(mixed: Mixed) -> None:
    mixed.prefill([1], 0)
    assert mixed.states.bytes_of_one == 8
    assert mixed.states.num_bytes == (ROWS + 2) * 8


def test_a_model_without_such_layers_begins_anywhere() -> None:
    states = RecurrentStates(ROWS)
    assert not states
    assert states.has(17)
    assert states.num_bytes == 0
