"""docs/benchmarks.md and its figures, from the JSON in benchmarks/results/ and from nothing else.

    python benchmarks/report.py [--check]

`--check` writes nothing and exits with 1 where the document is not what the results give.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moespeq.config import format_bytes
from moespeq.errors import UsageError
from moespeq.nested import Layout
from result_file import RESULTS, read_result
from rows import BASELINE
from shapes import SHAPES
from tables import figure, label_of, percent, ratio_lines, runs_table, table, title_of, ttft_table

ROOT = Path(__file__).parent.parent
DOCUMENT, FIGURES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "figures"
Result = Mapping[str, Any]

_ABLATION = (BASELINE, "draft_only", "plain", "nested")
_INTRODUCTION = """# Benchmarks

Made by `benchmarks/report.py` from `benchmarks/results/*.json`; edit neither by hand. How to repeat them, and where the
models come from: [benchmarks/README.md](../benchmarks/README.md). Batch 1, greedy, end of sequence ignored, GSM8K test
questions; every row has the same checkpoint, device memory and machine, and prompt n of one row is compared with
prompt n of another, where both ran it: the table says how many prompts a row had. A time says nothing without the
device's name beside it.

| figure | formula |
|---|---|
| TPOT | (time of the last token - time of the first) / (tokens - 1); median over prompts (quartile distance) |
| floor | bytes over the link per token / link bandwidth: what the bytes alone would take |
| x floor | TPOT / floor |
| speedup | TPOT of on demand (plain, LRU) / TPOT of the row, prompt by prompt, then the median |
| committed, accepted | tokens a round commits; share of drafted tokens that the target kept |
| draft ms, verify ms | draft time / (k + 1) steps; time of one verify pass, waiting included |
| stalled | time in which a pass waits for the link with nothing to compute / decode time |
| link util. in stalls | time the link moved bytes inside stalls / stall time |
| link utilisation | time at least one copy to the device ran / wall time, under a profiler |
| device busy share | time at least one kernel ran / wall time, under a profiler |
| TTFT floor | bytes of the records that the prefill used and had to fetch / link bandwidth |
| peak device memory | the most the driver reports for the process, its context included |

Pacing ("25GB") spreads the same copies over time as a slower card's link would; the machine is otherwise the same.
"""


def document(results: Sequence[Result]) -> str:
    """The whole of docs/benchmarks.md."""
    parts = [_INTRODUCTION]
    if not results:
        parts.append("No results are recorded yet.\n")
    else:
        parts += [_overview(results), *map(_section, results)]
    return "\n".join(parts)


def read_results(folder: Path) -> list[Result]:
    """Every result, published shapes first and in their order. Raises UsageError for one of another schema."""
    known = list(SHAPES)
    found = [read_result(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda result: (*_order(known, result["shape"]), -result["budget_bytes"]))


def _order(known: Sequence[str], shape: str) -> tuple[int, str]:
    places = [place for place, name in enumerate(known) if shape.startswith(name)]
    return (min(places, default=len(known)), shape)


def _overview(results: Sequence[Result]) -> str:
    """Ablation over all shapes: speedup over on demand, per link."""
    header = ("shape", "link", *map(label_of, _ABLATION))
    rows = []
    for result in results:
        entries = {(entry["row"], entry["link"]): entry for entry in result["summary"]}
        for link in result["floor"]["link_bytes_per_s"]:
            cells = [figure(entries.get((row, link), {}).get("speedup"), 2, "x") for row in _ABLATION]
            rows.append((f"[{title_of(result)}](#{_anchor(title_of(result))})", link, *cells))
    return "\n".join(["## Speedup over on-demand offloading", "", *table(header, rows), ""])


def _section(result: Result) -> str:
    lines = [f"## {title_of(result)}", "", *_facts(result), ""]
    lines += [_figure(result, "tpot", "Time per token and its floor"), ""]
    lines += runs_table(result)
    lines += [*ratio_lines(result), ""]
    lines += _paper_table(result)
    if "ttft_summary" in result:
        lines += ["### Time to first token", "", _figure(result, "ttft", "Time to first token and its floor"), ""]
        lines += [*ttft_table(result), *_changed(result, "ttft")]
    lines += _accelerate(result) + _checks(result) + _link(result) + _memory(result)
    return "\n".join(lines)


def _changed(result: Result, phase: str) -> list[str]:
    """Load options in which a phase's engines differed from those of the rows."""
    options = result.get("changed_options", {}).get(phase, {})
    said = ", ".join(f"`{name}={value}`" for name, value in options.items())
    return [f"Engines were loaded with {said}.", ""] if said else []


def _facts(result: Result) -> list[str]:
    device, machine, store = result["device"], result["machine"], result["store"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if value)
    layout = Layout(result.get("layout", Layout.FIXED.value))
    return [
        f"{device['name']}; {machine['cpu']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}; "
        f"{format_bytes(result['budget_bytes'])} of device memory; commit `{result['commit']}`; {versions}.",
        "",
        f"{store['moe_layers']} MoE layers of {store['experts_per_layer']} experts; a record has "
        f"{format_bytes(store['record_bytes'])} ({store['bits_per_weight']:.2f} bits a weight, layout "
        f"{layout.value}), as plain bf16 {format_bytes(store['plain_record_bytes'])}.",
    ]


def _paper_table(result: Result) -> list[str]:
    """Latency, link utilisation, device busy share and TTFT side by side, accelerate's offload among them."""
    activity = result.get("activity", {})
    rows = [_paper_row(entry, activity.get(entry["row"], {})) for entry in result["summary"] if _is_unpaced(entry)]
    accelerate = result.get("accelerate", {})
    if "tpot_s" in accelerate:
        token = accelerate.get("one_token") or {}
        label = "transformers + accelerate offload"
        rows.insert(0, _paper_cells(label, accelerate["tpot_s"], accelerate["ttft_s"], token))
    header = ("engine", "ms a token", "tok/s", "TTFT ms", "link utilisation", "device busy share")
    return ["### Latency, link and device", "", *table(header, rows), ""]


def _is_unpaced(entry: Mapping[str, Any]) -> bool:
    return bool(entry["runs"]) and entry["link"] == "as-is"


def _paper_row(entry: Mapping[str, Any], activity: Mapping[str, Any]) -> tuple[str, ...]:
    return _paper_cells(label_of(entry["row"]), entry["tpot_s"]["median"], entry["ttft_s"]["median"], activity)


def _paper_cells(label: str, tpot_s: float, ttft_s: float, activity: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        label,
        figure(1e3 * tpot_s),
        figure(1 / tpot_s if tpot_s else None),
        figure(1e3 * ttft_s, 0),
        percent(activity.get("link_utilisation")),
        percent(activity.get("device_busy_share")),
    )


def _accelerate(result: Result) -> list[str]:
    measured = result.get("accelerate")
    if measured is None:
        return []
    lines = ["### Where accelerate's time goes", ""]
    token = measured.get("one_token")
    if "error" in measured or token is None:
        return [*lines, measured.get("error", "Not profiled: no GPU."), ""]
    shares = [
        ("copies to the device", token["copy_s"] - token["both_s"]),
        ("kernels", token["kernel_s"] - token["both_s"]),
        ("both at once", token["both_s"]),
        ("neither: Python and waiting", token["idle_s"]),
    ]
    cells = [(name, figure(1e3 * spent_s, 1), percent(spent_s / token["wall_s"])) for name, spent_s in shares]
    copied_gb = token["copied_bytes"] / 1e9
    rate = f" at {copied_gb / token['copy_s']:.1f} GB/s while copying" if token["copy_s"] else ""
    sentence = f"One token under the profiler: {1e3 * token['wall_s']:.0f} ms, {copied_gb:.2f} GB to the device{rate}."
    return [*lines, sentence, "", *table(("part", "ms", "share"), cells), ""]


def _checks(result: Result) -> list[str]:
    """What was compared token for token."""
    lines = ["### Same tokens", ""]
    for name in ("identity_check", "same_tokens"):
        check = result.get(name)
        if check and check["prompts"]:
            differ, groups = check["different_prompts"], _equal_groups(result, check)
            lines += [f"- {' = '.join(map(label_of, group))}" for group in groups]
            verdict = f"the groups differ on {len(differ)}: {differ}" if differ else "identical"
            lines.append(f"- {check['prompts']} prompts were compared: {verdict}")
            lines += _changed(result, "identity") if name == "identity_check" else []
    return [*lines, ""] if len(lines) > 2 else []


def _equal_groups(result: Result, check: Mapping[str, Any]) -> list[list[str]]:
    """The compared rows, those of equal tokens on every prompt together."""
    runs = result["identity" if check is result.get("identity_check") else "runs"]
    hashes: dict[str, dict[int, str]] = {row: {} for row in check["rows"]}
    for run in runs:
        if run["row"] in hashes and run["error"] is None:
            hashes[run["row"]][run["prompt"]] = run["tokens_sha256"]
    compared = set.intersection(*(set(of_row) for of_row in hashes.values()))
    groups: dict[tuple[str, ...], list[str]] = {}
    for row, of_row in hashes.items():
        groups.setdefault(tuple(of_row[prompt] for prompt in sorted(compared)), []).append(row)
    return list(groups.values())


def _link(result: Result) -> list[str]:
    by_block = result["link"]["by_block"]
    blocks = list(next(iter(by_block.values())))
    cells = [
        (format_bytes(int(block)), *(figure(rates[block] / 1e9, 1) for rates in by_block.values())) for block in blocks
    ]
    header = ("block", *(f"{name} GB/s" for name in by_block))
    return ["### Link", "", *table(header, cells), ""]


def _memory(result: Result) -> list[str]:
    """Where each engine's memory went, and why."""
    engines = result.get("engines", {})
    if not engines:
        return []
    header = ("engine", "slots", "planned", "peak on the device", "host memory", "loaded in s")
    rows = []
    for name, engine in engines.items():
        plan, peak_bytes = engine["plan"], engine.get("peak_device_bytes")
        rows.append(
            (
                label_of(name),
                str(plan["num_slots"]),
                format_bytes(plan["total_bytes"]),
                "-" if peak_bytes is None else format_bytes(peak_bytes),
                format_bytes(engine["rss_bytes"]),
                figure(engine["load_s"], 1),
            )
        )
    name = "nested" if "nested" in engines else next(iter(engines))
    facts = {**engines[name]["plan"]["reasons"], **engines[name]["facts"]}
    said = [f"- {key}: {reason}" for key, reason in facts.items()]
    return ["### Memory", "", *table(header, rows), "", f"{label_of(name)}:", "", *said, ""]


def _figure(result: Result, kind: str, caption: str) -> str:
    return f"![{caption}](figures/{title_of(result)}-{kind}.svg)"


def _anchor(heading: str) -> str:
    return heading.replace(".", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the document is up to date")
    args = parser.parse_args()
    try:
        results = read_results(RESULTS)
    except UsageError as error:
        sys.exit(f"report.py: {error}")
    text = document(results)
    if args.check:
        sys.exit(0 if DOCUMENT.is_file() and DOCUMENT.read_text() == text else f"{DOCUMENT} is not up to date.")
    from plots import draw

    for result in results:
        draw(result, FIGURES)
    DOCUMENT.write_text(text)
    print(f"{DOCUMENT}: {len(results)} results")


if __name__ == "__main__":
    main()
