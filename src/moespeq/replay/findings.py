"""What a study means for its model, a sentence each: every figure, and every judgement, is computed from the trace."""

from __future__ import annotations

from statistics import fmean

from moespeq.replay.cache_study import CacheStudy
from moespeq.replay.fidelity_study import ROUND_K, StepAcceptance
from moespeq.replay.route_match import RouteMatch
from moespeq.replay.study import TraceStudy

__all__ = ["findings"]

_EVEN_SHARE = 0.8  # of the experts equally popular: use is spread evenly
_HOT_SHARE = 0.4
_TELLING = 0.2  # a difference of confidence that separates accepted from rejected tokens
_SCARCE = 0.25  # the share of experts to speak of where the recorded run had room for all
_FEW_TOK = 20  # of which a share says little
_FEW_PASSES = 4
_STEADY = 0.02  # a change smaller than this is none


def findings(study: TraceStudy) -> dict[str, str]:
    """One sentence for each table: entropy, reuse, distinct, cache, layers, steps, acceptance."""
    return {
        "entropy": _entropy(study),
        "reuse": _reuse(study),
        "distinct": _distinct(study),
        "cache": _cache(study),
        "layers": _layers(study),
        "steps": _steps(study),
        "acceptance": _acceptance(study),
    }


def _entropy(study: TraceStudy) -> str:
    alike = fmean(2**bits for bits in study.entropy.bits)
    share = alike / study.num_experts
    if share >= _EVEN_SHARE:
        judgement = "popularity hardly tells what to keep resident"
    elif share >= _HOT_SHARE:
        judgement = "popularity tells part of what to keep resident"
    else:
        judgement = "a few hot experts do most of the work, and keeping them resident pays"
    return f"A layer uses its experts as if {alike:.0f} of {study.num_experts} were equally popular: {judgement}."


def _reuse(study: TraceStudy) -> str:
    mean, windows = study.reuse.mean, study.reuse.windows_tok
    said = (
        f"The token before used {mean[0]:.0%} of a token's experts, {mean[0] / study.reuse.chance[0]:.1f} times chance"
    )
    if len(windows) > 1:
        said += f", the last {windows[-1]} together {mean[-1]:.0%} (chance {study.reuse.chance[-1]:.0%})"
    if mean[-1] > 1 - _STEADY:
        return f"{said}: what a token needs, the ones before it have brought."
    return f"{said}: the other {1 - mean[-1]:.0%} must be kept from earlier, predicted or waited for."


def _distinct(study: TraceStudy) -> str:
    mean = study.distinct.mean
    rows, needed = len(mean), mean[-1]
    fewer = rows * mean[0] / needed
    chance = study.distinct.uniform[-1]
    against = "as by chance" if abs(chance - needed) < _STEADY * chance else f"{needed / chance:.2f} times chance"
    return (
        f"{rows} rows need {needed:.1f} of {study.num_experts} experts a layer, {against}: "
        f"a row of them moves {fewer:.1f} times fewer records than a row alone."
    )


def _cache(study: TraceStudy) -> str:
    one, many = study.cache[0], study.cache[-1]
    size_asked = study.cache_share if study.cache_share < 1 else _SCARCE
    size = min(range(len(one.share)), key=lambda index: abs(one.share[index] - size_asked))
    lru, best = ([cache.hit_rate[policy][size] for cache in (one, many)] for policy in ("LRU", "MIN"))
    told = _half(many)
    if study.num_positions < _FEW_PASSES * many.rows:
        told = f"but {study.num_positions} tokens say little of {many.rows} rows: most uses are first ones"
    return (
        f"With {one.share[size]:.0%} of all experts resident (the recorded run: {study.cache_share:.0%}) LRU hits "
        f"{lru[0]:.0%} at {one.rows} row and {lru[1]:.0%} at {many.rows} rows, and Belady's MIN, which knows the "
        f"future, {best[0]:.0%} and {best[1]:.0%}; {told}."
    )


def _half(cache: CacheStudy) -> str:
    """From which size on LRU gets half of its requests."""
    sizes = zip(cache.share, cache.hit_rate["LRU"], strict=True)
    enough = next((share for share, hit_rate in sizes if hit_rate >= 0.5), None)
    if enough is None:
        return f"at {cache.rows} rows LRU misses most requests at every size"
    where = "only where all are resident" if enough == 1 else f"from {enough:.0%} resident on"
    return f"at {cache.rows} rows LRU hits half of the requests {where}"


def _layers(study: TraceStudy) -> str:
    fidelity = study.fidelity
    hardest = min(range(study.num_layers), key=lambda layer: fidelity.draft_by_layer[layer].right)
    draft = f"The draft names all {study.top_k} experts of a layer {fidelity.draft.right:.1%} of the time"
    where = f"least in layer {hardest}, {fidelity.draft_by_layer[hardest].right:.1%}"
    if not fidelity.ahead.num_routes:
        return f"{draft}, {where}."
    return (
        f"{draft}, one-layer lookahead {fidelity.ahead.right:.1%}; of the experts fetched on their word "
        f"{1 - fidelity.draft.overlap:.1%} and {1 - fidelity.ahead.overlap:.1%} are the wrong ones; the draft is right "
        f"{where}."
    )


def _steps(study: TraceStudy) -> str:
    steps = list(study.fidelity.draft_by_step.items())
    half, ahead = (len(steps) + 1) // 2, study.fidelity.ahead
    near = RouteMatch.together([match for _, match in steps[:half]])
    if len(steps) == 1:
        return f"Only step {steps[0][0]} was recorded: its routes are right {near.right:.1%} of the time."
    far = RouteMatch.together([match for _, match in steps[half:]])
    if min(near.num_routes, far.num_routes) < _FEW_TOK * study.num_layers:
        return f"{near.right:.1%} of routes are right near a verify; too few tokens lie far from one to compare."
    spans = f"{near.right:.1%} of routes are right up to step {steps[half - 1][0]} and {far.right:.1%} beyond"
    if ahead.num_routes:
        spans += f" (one layer ahead: {ahead.right:.1%})"
    if near.right - far.right < _STEADY:
        return f"{spans}: drafting further does not make a prefetch worse."
    return f"{spans}: far ahead a prefetch goes wrong {(1 - far.right) / max(1e-9, 1 - near.right):.1f} times as often."


def _acceptance(study: TraceStudy) -> str:
    acceptance = study.acceptance
    overall = StepAcceptance.together(list(acceptance.by_step.values()))
    said = (
        f"{overall.p:.1%} of drafted tokens are accepted; drafting {ROUND_K} commits {acceptance.committed:.1f} a round"
    )
    sure, unsure = acceptance.accepted_confidence, acceptance.rejected_confidence
    if sure is None or unsure is None:
        return f"{said}."
    telling = "tells them apart" if sure - unsure >= _TELLING else "hardly tells them apart"
    return f"{said}; confidence {telling}: {sure:.2f} where accepted, {unsure:.2f} where rejected."
