"""What a routing trace shows, as pictures: one file a question, each with its finding written below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moespeq.figures.canvas import sheet
from moespeq.replay.cache_study import CacheStudy
from moespeq.replay.route_match import RouteMatch
from moespeq.replay.study import TraceStudy

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    Drawn = Artist | tuple[Any, ...]  # bars and error bars are tuples of artists

__all__ = ["draw_study"]

_POLICY_COLOURS = {"LRU": "#d55e00", "LFU": "#009e73", "MIN": "#0072b2"}
_POLICY_NAMES = {"MIN": "Belady's MIN"}
_MEASURED, _CHANCE = "#0072b2", "#888888"
_EXACT, _SAME_SET, _WRONG, _LOOKAHEAD = "#0072b2", "#8cc5e8", "#e9a07a", "#333333"
_WINDOW_COLOURS = ("#9ecae1", "#5aa5d1", "#2171b5", "#08306b")
_MARKED_ROWS = (1, 5, 9, 17, 25, 33)
_DASHED, _DOTTED = (0, (4, 2)), (0, (1, 1.5))


def draw_study(study: TraceStudy, findings: Mapping[str, str], folder: Path, *, suffix: str = ".svg") -> list[Path]:
    """Write the figures into `folder`, which exists; returns their paths. Needs matplotlib."""
    return [
        _draw_entropy(study, findings["entropy"], folder / f"entropy{suffix}"),
        _draw_reuse(study, findings["reuse"], folder / f"reuse{suffix}"),
        _draw_distinct(study, findings["distinct"], folder / f"distinct-experts{suffix}"),
        _draw_cache(study, findings["cache"], folder / f"hit-rate{suffix}"),
        _draw_layers(study, findings["layers"], folder / f"fidelity-by-layer{suffix}"),
        _draw_steps(study, f"{findings['steps']} {findings['acceptance']}", folder / f"draft-steps{suffix}"),
    ]


def _draw_entropy(study: TraceStudy, caption: str, path: Path) -> Path:
    entropy = study.entropy
    with sheet(path, title=f"Activation entropy: {study.model}", caption=caption) as figure:
        panel = figure.subplots()
        measured = panel.bar(range(study.num_layers), entropy.bits, color=_MEASURED, label="measured")
        alike = f"all {study.num_experts} experts alike: {entropy.max_bits:.2f} bits"
        limit = panel.axhline(entropy.max_bits, color=_CHANCE, linestyle=_DASHED, label=alike)
        panel.set(ylabel="entropy of expert use (bits)", ylim=(0, 1.08 * entropy.max_bits))
        _number_places(panel, "MoE layer", study.num_layers)
        _legend_above(panel, measured, limit)
    return path


def _draw_reuse(study: TraceStudy, caption: str, path: Path) -> Path:
    reuse = study.reuse
    with sheet(path, title=f"Reuse from token to token: {study.model}", caption=caption) as figure:
        panel = figure.subplots()
        lines: list[Drawn] = []
        windows = zip(reuse.windows_tok, reuse.share, reuse.chance, strict=True)
        for (window, share, chance), colour in zip(windows, _WINDOW_COLOURS, strict=False):
            label = "token before" if window == 1 else f"last {window}"
            lines += panel.plot(_percents(share), "o-", markersize=3, color=colour, label=label)
            panel.axhline(100 * chance, color=colour, linestyle=_DASHED, linewidth=1)
        lines += panel.plot([], [], color=_CHANCE, linestyle=_DASHED, linewidth=1, label="chance, of each")
        panel.set(ylabel="a token's experts that\nthese used (%)", ylim=(0, 100))
        _number_places(panel, "MoE layer", study.num_layers)
        _legend_above(panel, *lines)
    return path


def _draw_distinct(study: TraceStudy, caption: str, path: Path) -> Path:
    distinct = study.distinct
    rows = range(1, len(distinct.count) + 1)
    with sheet(path, title=f"Distinct experts of a pass: {study.model}", caption=caption) as figure:
        panel = figure.subplots()
        least, most = [min(counts) for counts in distinct.count], [max(counts) for counts in distinct.count]
        alone = [study.top_k * count for count in rows]
        span = panel.fill_between(rows, least, most, color=_MEASURED, alpha=0.2, linewidth=0, label="least to most")
        handles = [
            *panel.plot(rows, distinct.mean, color=_MEASURED, label="mean of layers"),
            span,
            *panel.plot(rows, distinct.uniform, color=_CHANCE, linestyle=_DASHED, label="chance"),
            *panel.plot(rows, alone, color=_CHANCE, linestyle=_DOTTED, label="no sharing"),
        ]
        panel.axhline(study.num_experts, color=_LOOKAHEAD, linewidth=0.8)
        panel.set(xlabel="rows of the pass (tokens)", ylabel=f"distinct experts a layer, of {study.num_experts}")
        panel.set(xlim=(1, max(2, len(rows))), ylim=(0, 1.05 * study.num_experts))
        panel.set_xticks([count for count in _MARKED_ROWS if count <= len(rows)])
        _legend_above(panel, *handles)
    return path


def _draw_cache(study: TraceStudy, caption: str, path: Path) -> Path:
    title = f"Hit rate against cache size: {study.model}"
    with sheet(path, title=title, caption=caption, width_in=9.0, height_in=3.6) as figure:
        panels = figure.subplots(1, len(study.cache), sharey=True, squeeze=False)[0]
        for panel, cache in zip(panels, study.cache, strict=True):
            _draw_hit_rates(panel, cache)
            panel.axvline(100 * study.cache_share, color=_CHANCE, linestyle=_DASHED, label="slots of the recorded run")
        panels[0].set_ylabel("hit rate (% of requests)")
        panels[0].legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none")
    return path


def _draw_hit_rates(panel: Axes, cache: CacheStudy) -> None:
    """A line a policy; a cache starts empty, so none can pass the ceiling."""
    for policy, rates in cache.hit_rate.items():
        name, colour = _POLICY_NAMES.get(policy, policy), _POLICY_COLOURS[policy]
        shares = _percents(cache.share)
        panel.plot(shares, _percents(rates), "o-", markersize=3, color=colour, label=name, clip_on=False, zorder=3)
    panel.axhline(100 * cache.ceiling, color=_CHANCE, linestyle=_DOTTED, label="only first uses miss")
    panel.set_title("1 row: plain decoding" if cache.rows == 1 else f"{cache.rows} rows: a verify pass")
    panel.set(xlabel="experts resident (% of all)", xlim=(0, 100), ylim=(0, 100))


def _draw_layers(study: TraceStudy, caption: str, path: Path) -> Path:
    fidelity = study.fidelity
    with sheet(path, title=f"Routes foretold, by layer: {study.model}", caption=caption) as figure:
        panel = figure.subplots()
        bars = _stack(panel, range(study.num_layers), fidelity.draft_by_layer)
        line = _draw_lookahead(panel, dict(enumerate(fidelity.ahead_by_layer)))
        panel.set(ylabel="routes of the text (%)", ylim=(0, 100))
        _number_places(panel, "MoE layer", study.num_layers)
        _legend_above(panel, *bars, *line)
    return path


def _draw_steps(study: TraceStudy, caption: str, path: Path) -> Path:
    matches, accepted = study.fidelity.draft_by_step, study.acceptance.by_step
    title = f"How far ahead the draft is right: {study.model}"
    with sheet(path, title=title, caption=caption, width_in=9.0, height_in=3.8) as figure:
        routes, tokens = figure.subplots(1, 2)
        bars = _stack(routes, list(matches), list(matches.values()))
        bars += _draw_lookahead(routes, study.fidelity.ahead_by_step)
        routes.set(ylabel="routes, all layers (%)", ylim=(0, 100))
        p = [100 * step.p for step in accepted.values()]
        error = [100 * (step.p * (1 - step.p) / step.num_drafts) ** 0.5 for step in accepted.values()]
        steps, style = list(accepted), {"color": _MEASURED, "markersize": 3, "clip_on": False}
        kept = tokens.errorbar(steps, p, yerr=error, fmt="o-", label="accepted ± standard error", **style)
        confidence = _percents([step.confidence for step in accepted.values()])
        sure = tokens.plot(steps, confidence, color=_CHANCE, linestyle=_DASHED, label="draft's confidence")
        tokens.set(ylabel="drafted tokens (%)", ylim=(0, 100))
        for panel in (routes, tokens):
            _number_places(panel, "draft step", max(steps) + 1)
        _legend_above(routes, *bars, columns=2)
        _legend_above(tokens, kept, *sure, columns=2)
    return path


def _stack(panel: Axes, places: Sequence[int], matches: Sequence[RouteMatch]) -> list[Drawn]:
    """Exact, same set and wrong on top of each other, 100 % together; returns what stands in a legend."""
    floor = [0.0] * len(matches)
    bars: list[Drawn] = []
    for name, colour in (("exact", _EXACT), ("same_set", _SAME_SET), ("wrong", _WRONG)):
        shares = _percents([getattr(match, name) for match in matches])
        bars.append(panel.bar(places, shares, bottom=floor, color=colour, label=f"draft: {name.replace('_', ' ')}"))
        floor = [below + share for below, share in zip(floor, shares, strict=True)]
    return bars


def _draw_lookahead(panel: Axes, matches: Mapping[int, RouteMatch]) -> list[Drawn]:
    told = {place: 100 * match.right for place, match in matches.items() if match.num_routes}
    label = "one layer ahead: right set"
    return [*panel.plot(list(told), list(told.values()), "o-", markersize=3, color=_LOOKAHEAD, label=label)]


def _number_places(panel: Axes, label: str, count: int) -> None:
    """Whole numbers only, from the first place to the last."""
    from matplotlib.ticker import MaxNLocator

    panel.set(xlabel=label, xlim=(-0.7, count - 0.3))
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(visible=False, axis="x")


def _legend_above(panel: Axes, *handles: Drawn, columns: int = 5) -> None:
    """What is drawn, in this order, outside of the picture."""
    panel.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, handlelength=1.6)


def _percents(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]
