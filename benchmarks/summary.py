"""Figures from runs: medians, spreads, floors and ratios. Pure functions of the JSON, no torch.

TPOT    = decode_s / (new_tok - 1)
floor   = link bytes a token / link bandwidth: what the bytes alone would take; ratio = TPOT / floor
speedup = TPOT of the baseline / TPOT of the row, prompt by prompt, then the median
TTFT floor = bytes of the records that the prefill used and had to fetch / link bandwidth
link utilisation while waiting = link time inside stalls / stall time
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moespeq.config import parse_bytes
from rows import AS_IS, BASELINE, IDENTICAL_ROWS, ROUND_ROWS, ROWS

Run = Mapping[str, Any]


def summarize_result(result: dict[str, Any]) -> None:
    """Add to `result` everything that follows from its runs; recomputed after each phase."""
    if "link" not in result:
        return
    runs = result.get("runs", [])
    bandwidths = _bandwidths(result["link"]["bytes_per_s"], [AS_IS, *(run["link"] for run in runs)])
    result["summary"] = summarize_runs(runs, bandwidths)
    result["floor"] = {
        "link_bytes_per_s": bandwidths,
        "tpot_s": {f"{each['row']} {each['link']}": each["floor_tpot_s"] for each in result["summary"] if each["runs"]},
    }
    succeeded = {run["row"] for run in runs if run["error"] is None}
    in_bucket = [name for name, row in ROWS.items() if row.load.get("rows") == ROUND_ROWS and name in succeeded]
    result["same_tokens"] = identical(runs, in_bucket)
    if "identity" in result:
        result["identity_check"] = identical(result["identity"], IDENTICAL_ROWS)
    if "ttft" in result:
        result["ttft_summary"] = summarize_ttft(result["ttft"], bandwidths[AS_IS])
    result["ratios"] = _ratios(result)


def _ratios(result: Mapping[str, Any]) -> dict[str, float]:
    """Comparisons of two rows on the unpaced link, where both ran."""
    entries = {each["row"]: each for each in result["summary"] if each["link"] == AS_IS and each["runs"]}
    found = {}
    if {"nested", "plain_equal_slots"} <= entries.keys():
        moved = [entries[row]["bytes_per_tok"]["median"] for row in ("nested", "plain_equal_slots")]
        found["bytes a token, nested / plain at equal slots"] = moved[0] / moved[1]
    if {"nested_k0", "nested_one_row"} <= entries.keys():
        times = [entries[row]["tpot_s"]["median"] for row in ("nested_k0", "nested_one_row")]
        found["TPOT, no draft in the row bucket / one row"] = times[0] / times[1]
    offload_s = result.get("accelerate", {}).get("tpot_s")
    if offload_s is not None and "nested" in entries:
        found["TPOT, accelerate's offload / nested"] = offload_s / entries["nested"]["tpot_s"]["median"]
    return found


def _bandwidths(measured: float, links: Sequence[str]) -> dict[str, float]:
    """Bytes a second of each link by name: as measured, or as paced where that is slower."""
    return {name: measured if name == AS_IS else min(measured, parse_bytes(name)) for name in links}


def summarize_runs(runs: Sequence[Run], link_bytes_per_s: Mapping[str, float]) -> list[dict[str, Any]]:
    """One entry for each (row, link), in the order of their first run. link_bytes_per_s: the bandwidth of each link."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run["row"], run["link"]].append(run)
    return [
        _summarize(row, link, group, groups.get((BASELINE, link), []), link_bytes_per_s[link])
        for (row, link), group in groups.items()
    ]


def tpot_s(run: Run) -> float:
    return run["decode_s"] / max(1, run["new_tok"] - 1)


def bytes_per_tok(run: Run) -> float:
    return run["decode_link_bytes"] / max(1, run["new_tok"] - 1)


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Median and quartiles; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    if len(ordered) == 1:
        return {"median": ordered[0], "q1": ordered[0], "q3": ordered[0]}
    q1, median, q3 = statistics.quantiles(ordered, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def identical(runs: Sequence[Run], rows: Sequence[str]) -> dict[str, Any]:
    """Whether these rows gave the same tokens for each prompt that all of them ran, on whatever link."""
    hashes: dict[int, set[str]] = defaultdict(set)
    seen: dict[int, set[str]] = defaultdict(set)
    for run in runs:
        if run["row"] in rows and run["error"] is None:
            hashes[run["prompt"]].add(run["tokens_sha256"])
            seen[run["prompt"]].add(run["row"])
    compared = [prompt for prompt in sorted(seen) if seen[prompt] == set(rows)]
    different = [prompt for prompt in compared if len(hashes[prompt]) > 1]
    return {"rows": list(rows), "prompts": len(compared), "different_prompts": different}


def summarize_ttft(runs: Sequence[Run], bandwidth: float) -> list[dict[str, Any]]:
    """One entry for each (row, prompt length)."""
    groups: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in runs:
        if run["error"] is None:
            groups[run["row"], run["prompt_tok"]].append(run)
    entries = []
    for (row, prompt_tok), group in groups.items():
        ttft = spread(run["ttft_s"] for run in group)
        floor_s = statistics.median(run["prefill_used_bytes"] / bandwidth for run in group)
        entries.append(
            {
                "row": row,
                "prompt_tok": prompt_tok,
                "ttft_s": ttft,
                "floor_s": floor_s,
                "ratio": _divided(ttft["median"], floor_s),
            }
        )
    return entries


def _summarize(row: str, link: str, group: Sequence[Run], base: Sequence[Run], bandwidth: float) -> dict[str, Any]:
    good = [run for run in group if run["error"] is None]
    entry: dict[str, Any] = {
        "row": row,
        "link": link,
        "runs": len(good),
        "errors": sorted({run["error"] for run in group if run["error"] is not None}),
    }
    if not good:
        return entry
    tpot, moved = spread(map(tpot_s, good)), spread(map(bytes_per_tok, good))
    rounds = [run["rounds"] for run in good]
    floor_s = moved["median"] / bandwidth
    return {
        **entry,
        "tpot_s": tpot,
        "tok_per_s": 1 / tpot["median"],
        "ttft_s": spread(run["ttft_s"] for run in good),
        "bytes_per_tok": moved,
        "floor_tpot_s": floor_s,
        "ratio": _divided(tpot["median"], floor_s),
        "speedup": _paired_speedup(good, base),
        "committed_per_round": _total(rounds, "committed") / max(1, sum(len(each["committed"]) for each in rounds)),
        "acceptance": _divided(_total(rounds, "accepted"), _total(rounds, "k")),
        "hits": _total(rounds, "hits"),
        "late": _total(rounds, "late"),
        "misses": _total(rounds, "misses"),
        "wasted_share": _divided(sum(run["wasted_bytes"] for run in good), _all_bytes(good)),
        "draft_s_per_tok": _divided(_total(rounds, "draft_s"), _drafted_steps(rounds)),
        "verify_s": _divided(_total(rounds, "verify_s"), sum(len(each["verify_s"]) for each in rounds)),
        "stall_share": _divided(_total(rounds, "stall_s"), sum(run["decode_s"] for run in good)),
        "link_utilisation": _divided(_total(rounds, "link_busy_s"), sum(run["decode_s"] for run in good)),
        "stall_link_utilisation": _divided(_total(rounds, "stall_busy_s"), _total(rounds, "stall_s")),
    }


def _paired_speedup(group: Sequence[Run], base: Sequence[Run]) -> float | None:
    """Median over prompts of (baseline's TPOT / the row's)."""
    base_tpot_s = _by_prompt(run for run in base if run["error"] is None)
    shared = [(base_tpot_s[prompt], own) for prompt, own in _by_prompt(group).items() if prompt in base_tpot_s]
    return statistics.median(theirs / own for theirs, own in shared) if shared else None


def _by_prompt(runs: Iterable[Run]) -> dict[int, float]:
    values: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        values[run["prompt"]].append(tpot_s(run))
    return {prompt: statistics.median(found) for prompt, found in values.items()}


def _total(rounds: Sequence[Mapping[str, Sequence[float]]], name: str) -> float:
    return sum(sum(each[name]) for each in rounds)


def _drafted_steps(rounds: Sequence[Mapping[str, Sequence[float]]]) -> float:
    """Draft steps: k + 1 in a round that drafts."""
    return sum(k + 1 for each in rounds for k in each["k"] if k)


def _all_bytes(runs: Sequence[Run]) -> int:
    return sum(run["decode_link_bytes"] + run["prefill_link_bytes"] for run in runs)


def _divided(value: float, by: float) -> float | None:
    return value / by if by else None
