"""Projections of a mixer that takes its rows one by one: read once a pass, and no row sees another through them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from moespeq.model.row_projections import RowProjections

ROWS, HIDDEN = 5, 12


class Mixer(nn.Module):
    """A running sum between projections: one of the rows, one of that, a gate of what was summed, and the last."""

    def __init__(self, *, scaled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.low, self.high = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 3), nn.Linear(3, 8)
        self.gate, self.leave = nn.Linear(8, 8), nn.Linear(8, HIDDEN)
        self.scaled = scaled
        self.sum = torch.zeros(1, 1, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        self.sum = self.sum + self.enter(hidden) * self.high(self.low(hidden)).sigmoid()
        mixed = self.leave(self.sum * self.gate(self.sum).sigmoid())
        return mixed * 2.0 if self.scaled else mixed


def counted(mixer: Mixer) -> Counter[tuple[str, int]]:
    """Calls of each projection, and the rows of one."""
    calls: Counter[tuple[str, int]] = Counter()
    for name, module in mixer.named_children():
        plain = module.forward

        def forward(rows: Tensor, name: str = name, plain: nn.Module = plain) -> Tensor:
            calls[name, rows.shape[1]] += 1
            return plain(rows)

        module.forward = forward
    return calls


def mix(mixer: Mixer, hidden: Tensor, live: int) -> Tensor:
    return RowProjections(mixer).mix_rows(hidden, live, lambda _, row: mixer(row))


@pytest.fixture(name="hidden")
def _hidden() -> Tensor:
    return torch.randn(1, ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scaled", [False, True], ids=["ends in a projection", "ends in something else"])
def test_rows_are_mixed_as_one_by_one(scaled: bool, hidden: Tensor) -> None:
    plain = Mixer(scaled=scaled)
    expected = torch.cat([plain(hidden[:, row : row + 1]) for row in range(ROWS)], dim=1)
    torch.testing.assert_close(mix(Mixer(scaled=scaled), hidden, ROWS), expected)


def test_what_does_not_mix_rows_is_one_product_of_all_of_them(hidden: Tensor) -> None:
    mixer = Mixer()
    calls = counted(mixer)
    mix(mixer, hidden, 4)
    of_all = {("enter", ROWS): 1, ("low", ROWS): 1, ("high", ROWS): 1, ("leave", ROWS): 1}
    assert calls == {**of_all, ("gate", 1): 4, ("leave", 1): 1}  # the first row shows which is the last


def test_rows_behind_the_live_ones_repeat_the_last_and_change_no_bit(hidden: Tensor) -> None:
    whole = mix(Mixer(), hidden, ROWS)
    hidden[:, 3:] = hidden[:, 2:3]
    part = mix(Mixer(), hidden, 3)
    assert torch.equal(part[:, :3], whole[:, :3])
    assert torch.equal(part[:, 3:], part[:, 2:3].expand(1, 2, HIDDEN))


def test_what_a_mixer_tells_beside_its_output_is_joined_where_it_is_told(hidden: Tensor) -> None:
    mixer = Mixer()
    mixed = RowProjections(mixer).mix_rows(hidden, 4, lambda row, part: (mixer(part), None, part if row else None))
    assert torch.equal(mixed[0], mix(Mixer(), hidden, 4))
    assert mixed[1] is None
    assert torch.equal(mixed[2][:, :3], hidden[:, 1:4])


def test_every_pass_projects_its_own_rows(hidden: Tensor) -> None:
    mixer, fresh = Mixer(), Mixer()
    projections = RowProjections(mixer)
    projections.mix_rows(hidden, ROWS, lambda _, row: mixer(row))
    mixer.sum = torch.zeros(1, 1, 8)
    again = projections.mix_rows(hidden + 1.0, ROWS, lambda _, row: mixer(row))
    assert torch.equal(again, mix(fresh, hidden + 1.0, ROWS))


def test_outside_of_a_pass_and_after_one_that_failed_projections_are_as_they_were(hidden: Tensor) -> None:
    mixer, plain = Mixer(), Mixer()
    projections = RowProjections(mixer)

    def fails(row: int, part: Tensor) -> Tensor:
        mixer(part)
        raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"):
        projections.mix_rows(hidden, ROWS, fails)
    mixer.sum = torch.zeros(1, 1, 8)
    assert torch.equal(mixer(hidden), plain(hidden))
