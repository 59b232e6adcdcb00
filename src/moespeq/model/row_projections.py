"""The projections of a mixer that is given its rows one by one, taken for all rows at once.

A projection does not mix rows, so there is no need to read its weights once a row: what is projected from the rows
given, or from such a projection, is one product of all rows, of which each row gets its own; what makes a row's output
waits until all rows are there. The products have as many rows as the pass, live or not, so that a row's bits are the
same whatever the others are. Which projection is which shows while the first row is mixed: by the very tensors that
come and go. All others are taken row by row, as the mixer asks.

Shapes: T rows of the pass, L of them live, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RowProjections"]


class RowProjections:
    """Answers for the linear layers of `mixer` from here on; outside of `mix_rows` as they are."""

    def __init__(self, mixer: nn.Module) -> None:
        self._pass: _RowPass | None = None
        for linear in mixer.modules():
            if isinstance(linear, nn.Linear):
                linear.forward = partial(self._project, linear.forward)  # type: ignore[method-assign]

    def mix_rows(self, hidden: Tensor, live: int, mix_row: Callable[[int, Tensor], Any]) -> Any:
        """hidden [1, T, H] -> [1, T, H]: `mix_row` for each of the first `live` rows, in order; [1, 1, H] to the same,
        or to a tuple that begins with it. What else it holds is joined where it is told.

        Rows behind the live ones repeat the last.
        """
        if hidden.shape[1] == 1:
            return mix_row(0, hidden)
        self._pass = passing = _RowPass(hidden)
        try:
            rows = [passing.mix(row, mix_row) for row in range(live)]
        finally:
            self._pass = None
        return passing.finish(rows)

    def _project(self, linear: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        return linear(rows) if self._pass is None else self._pass.project(linear, rows)


class _RowPass:
    """Rows of one call; tensors are known by identity, and held so that no other takes it over."""

    def __init__(self, hidden: Tensor) -> None:
        self._hidden, self._num_rows, self._row = hidden, hidden.shape[1], 0
        self._wholes: dict[int, tuple[Tensor, Tensor]] = {}  # by identity of a row's part: that part, all rows
        self._products: dict[int, tuple[Tensor, Tensor]] = {}  # by projection: what of, what came
        self._tried: list[tuple[Callable[[Tensor], Tensor], Tensor, Tensor]] = []  # of the first row, one by one
        self._last: Callable[[Tensor], Tensor] | None = None  # makes a row's output
        self._waiting: list[Tensor] = []  # its inputs

    def mix(self, row: int, mix_row: Callable[[int, Tensor], Any]) -> Any:
        """One row's output; what the last projection would make of it is left out."""
        self._row, self._wholes = row, {}
        mixed = mix_row(row, self._part(self._hidden))
        if row == 0:
            for linear, given, made in self._tried:
                if made is _output(mixed):
                    self._last, self._waiting = linear, [given]
        assert self._last is None or len(self._waiting) == row + 1, "the rows of a mixer took different ways"
        return mixed

    def finish(self, rows: list[Any]) -> Any:
        """All rows' output."""
        if self._last is None:
            output = self._joined([_output(row) for row in rows])
        else:
            output = self._last(self._padded(self._waiting))
        if not isinstance(rows[0], tuple):
            return output
        return output, *(self._joined(list(parts)) for parts in list(zip(*rows, strict=True))[1:])

    def project(self, linear: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        """What the projection makes of a row's tensor."""
        known = self._wholes.get(id(given))
        if known is not None:
            return self._part(self._product(linear, known[1]))
        if linear is self._last:
            self._waiting.append(given)
            return self._hidden[:, self._row : self._row + 1]  # of the right shape; nobody looks at it
        made = linear(given)
        if self._row == 0:
            self._tried.append((linear, given, made))
        return made

    def _product(self, linear: Callable[[Tensor], Tensor], whole: Tensor) -> Tensor:
        of, product = self._products.get(id(linear), (None, None))
        if of is not whole or product is None:
            product = linear(whole)
            self._products[id(linear)] = whole, product
        return product

    def _part(self, whole: Tensor) -> Tensor:
        part = whole[:, self._row : self._row + 1]
        self._wholes[id(part)] = part, whole
        return part

    def _joined(self, rows: list[Tensor | None]) -> Tensor | None:
        told = [row for row in rows if row is not None]
        return self._padded(told) if told else None

    def _padded(self, rows: list[Tensor]) -> Tensor:
        return torch.cat([*rows, *rows[-1:] * (self._num_rows - len(rows))], dim=1)


def _output(mixed: Any) -> Any:
    """What a mixer gives on, where it may tell more."""
    return mixed[0] if isinstance(mixed, tuple) else mixed
