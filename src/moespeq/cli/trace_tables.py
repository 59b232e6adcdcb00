"""The tables of `moespeq trace show`: at most a dozen lines each, neighbouring layers and steps taken together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table

from moespeq.replay.fidelity_study import StepAcceptance
from moespeq.replay.route_match import RouteMatch
from moespeq.replay.study import TraceStudy

__all__ = ["tables"]

_MOST_LINES = 12
_SHOWN_ROWS = (1, 2, 3, 5, 9, 17, 33)
_SHOWN_SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
T = TypeVar("T")


def tables(study: TraceStudy) -> Iterator[tuple[str, Table]]:
    """(name of its finding, table), in the order to show them."""
    yield "entropy", _entropy(study)
    yield "reuse", _reuse(study)
    yield "distinct", _distinct(study)
    yield "cache", _cache(study)
    yield "layers", _layers(study)
    yield "steps", _steps(study)
    yield "acceptance", _acceptance(study)


def _table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def _bands(values: Sequence[tuple[int, T]]) -> Iterator[tuple[str, list[T]]]:
    """('first-last', values) of neighbours, in at most _MOST_LINES bands."""
    size = -(-len(values) // _MOST_LINES)
    for start in range(0, len(values), size):
        band = values[start : start + size]
        first, last = band[0][0], band[-1][0]
        yield str(first) if first == last else f"{first}-{last}", [value for _, value in band]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _entropy(study: TraceStudy) -> Table:
    lines = [
        (
            layers,
            f"{fmean(bits):.2f}",
            _percent(fmean(bits) / study.entropy.max_bits if study.entropy.max_bits else 1.0),
            f"{fmean(2**each for each in bits):.1f}",
        )
        for layers, bits in _bands(list(enumerate(study.entropy.bits)))
    ]
    title = f"Activation entropy, at most {study.entropy.max_bits:.2f} bits: {study.num_experts} experts alike"
    return _table(title, ("layer", "bits", "% of most", "experts alike"), lines)


def _reuse(study: TraceStudy) -> Table:
    reuse = study.reuse
    lines = [
        (str(window), *map(_percent, (fmean(share), min(share), max(share), chance)))
        for window, share, chance in zip(reuse.windows_tok, reuse.share, reuse.chance, strict=True)
    ]
    title = "Reuse: % of a token's experts that the last tokens used"
    return _table(title, ("last", "mean", "least layer", "most layer", "chance"), lines)


def _distinct(study: TraceStudy) -> Table:
    distinct = study.distinct
    shown = [rows for rows in _SHOWN_ROWS if rows <= len(distinct.count)]
    lines = []
    for rows in shown:
        count = distinct.count[rows - 1]
        values = (fmean(count), min(count), max(count), distinct.uniform[rows - 1])
        lines.append((str(rows), *(f"{value:.1f}" for value in values)))
    title = f"Distinct experts a layer, of {study.num_experts}"
    return _table(title, ("rows", "mean", "least layer", "most layer", "chance"), lines)


def _cache(study: TraceStudy) -> Table:
    shares = study.cache[0].share
    shown = [index for index, share in enumerate(shares) if share in _SHOWN_SHARES]
    lines = [
        (str(cache.rows), policy, *(_percent(rates[index]) for index in shown))
        for cache in study.cache
        for policy, rates in cache.hit_rate.items()
    ]
    title = "Hit rate in %, by share of all experts that fit"
    table = _table(title, ("rows", "policy", *(f"{shares[index]:.0%}" for index in shown)), lines)
    for last in range(len(study.cache[0].hit_rate) - 1, len(lines) - 1, len(study.cache[0].hit_rate)):
        table.rows[last].end_section = True
    return table


def _layers(study: TraceStudy) -> Table:
    fidelity = study.fidelity
    pairs = list(zip(fidelity.draft_by_layer, fidelity.ahead_by_layer, strict=True))
    lines = []
    for layers, band in _bands(list(enumerate(pairs))):
        draft = RouteMatch.together([each for each, _ in band])
        lines.append((layers, *_match(draft), *_lookahead(RouteMatch.together([each for _, each in band]))))
    lines.append(("all", *_match(fidelity.draft), *_lookahead(fidelity.ahead)))
    columns = ("layer", "exact", "same\nset", "wrong", "over-\nlap", "ahead:\nset", "over-\nlap")
    return _table("Routes foretold: INT4 draft, and one layer ahead, in %", columns, lines)


def _match(match: RouteMatch) -> tuple[str, ...]:
    return tuple(map(_percent, (match.exact, match.same_set, match.wrong, match.overlap)))


def _lookahead(match: RouteMatch) -> tuple[str, str]:
    return (_percent(match.right), _percent(match.overlap)) if match.num_routes else ("-", "-")


def _steps(study: TraceStudy) -> Table:
    fidelity = study.fidelity
    pairs = [(step, (draft, fidelity.ahead_by_step[step])) for step, draft in fidelity.draft_by_step.items()]
    lines = []
    for steps, band in _bands(pairs):
        draft = RouteMatch.together([each for each, _ in band])
        ahead = RouteMatch.together([each for _, each in band])
        lines.append((steps, *_match(draft), *_lookahead(ahead), str(draft.num_routes // study.num_layers)))
    columns = ("step", "exact", "same\nset", "wrong", "over-\nlap", "ahead:\nset", "over-\nlap", "tokens")
    return _table("The same by draft step, and one layer ahead, in %", columns, lines)


def _acceptance(study: TraceStudy) -> Table:
    lines = []
    for steps, band in _bands(list(study.acceptance.by_step.items())):
        step = StepAcceptance.together(band)
        lines.append((steps, _percent(step.p), f"{step.confidence:.2f}", str(step.num_drafts)))
    return _table("Drafted tokens accepted, by draft step", ("step", "accepted %", "confidence", "tokens"), lines)
