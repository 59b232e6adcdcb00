"""Where the time of a round, a plain step or a long prompt goes, on a GPU: on the host by call, on the device by gap.

    python benchmarks/round_profile.py --shape qwen1.5-moe --seed SEED_DIR --data test.jsonl --work WORK_DIR

Makes the store unless it is there, then for each of `--what`: times without any tool first (medians over rounds), then
a run in which calls of the engine's thread are timed (own time: without what a timed call calls), then one under the
profiler, whose trace says how long kernels and copies ran in each pass and where the link rested. The tools slow the
host down: compare their tables with each other, not with the first line. Needs a GPU. Kind: micro; writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

import moespeq
from activity import Interval, covered_s, interval_of
from moespeq.config import parse_bytes
from moespeq.decode.engine import Engine
from moespeq.decode.statistics import GenerationStats
from moespeq.kernels.verify_table import RoutedPairs, VerifyTable
from moespeq.model.graphs.runner import GraphRunner
from moespeq.model.graphs.wave_products import WaveProducts
from moespeq.nested import Layout
from moespeq.residency import Residency
from moespeq.residency.fetches import Fetches
from moespeq.residency.waves import LayerWaves
from moespeq.transfer import CudaMover
from prompts import Prompts
from shapes import SHAPES
from wide_store import build_store
from widen import WideModel

TIMED: Mapping[type, Sequence[str]] = {
    GraphRunner: ("draft", "verify", "prefill", "foresee"),
    WaveProducts: ("approach", "compute"),
    Residency: ("begin_pass", "predict", "pump", "end_pass"),
    LayerWaves: ("_ask", "_wave", "_wait", "_begin_ahead"),
    Fetches: ("speculate", "demand", "take_back"),
    RoutedPairs: ("__init__",),
    VerifyTable: ("fill",),
    CudaMover: ("submit", "wait", "fence", "_advance"),
    torch.cuda.CUDAGraph: ("replay",),
    torch.cuda.Event: ("synchronize", "record"),
}
_LEAST_COPY_BYTES = 1_000_000  # a record; tables are smaller
_LEAST_GAP_S = 5e-5
_PASS_GAP_S = 15e-3  # no product of experts for so long: a draft lies between
LONG_TOK = 3840


class Spans:
    """Calls of one thread by name: how many, how long, and how long without the timed calls inside them."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = defaultdict(int)
        self.total_s: dict[str, float] = defaultdict(float)
        self.own_s: dict[str, float] = defaultdict(float)
        self._inner_s: list[float] = []
        self._thread: int | None = None

    def watch(self, owner: type, name: str) -> None:
        """Time this method from now on, while `measure` runs, on its thread."""
        function, label = getattr(owner, name), f"{owner.__name__}.{name}"

        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            begin_s = time.perf_counter()
            self._inner_s.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                self._note(label, time.perf_counter() - begin_s)

        setattr(owner, name, timed)

    def measure(self, call: Callable[[], Any]) -> Any:
        """What `call` gives, its calls timed."""
        for figures in (self.calls, self.total_s, self.own_s):
            figures.clear()
        self._thread = threading.get_ident()
        try:
            return call()
        finally:
            self._thread = None

    def rows(self, num_rounds: int) -> list[dict[str, Any]]:
        """A row a name, the longest own time first, each figure for one round."""
        return [
            {
                "call": label,
                "calls": self.calls[label] / num_rounds,
                "total_ms": 1e3 * self.total_s[label] / num_rounds,
                "own_ms": 1e3 * own_s / num_rounds,
            }
            for label, own_s in sorted(self.own_s.items(), key=lambda item: -item[1])
        ]

    def _note(self, label: str, seconds: float) -> None:
        inner_s = self._inner_s.pop()
        self.calls[label] += 1
        self.total_s[label] += seconds
        self.own_s[label] += seconds - inner_s
        if self._inner_s:
            self._inner_s[-1] += seconds


def passes_of(events: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Of a Chrome trace, each run of expert products: its length, kernels and records in it, and the link's rests."""
    kernels: list[Interval] = []
    products: list[Interval] = []
    copies: list[Interval] = []
    for event in events:
        if event.get("cat") == "kernel":
            kernels.append(interval_of(event))
            if event["name"].startswith(("_grouped_product", "_multiply_groups")):
                products.append(kernels[-1])
        elif _is_record(event):
            copies.append(interval_of(event))
    return [_pass(begin, end, kernels, sorted(copies)) for begin, end in _runs(sorted(products))]


def _is_record(event: Mapping[str, Any]) -> bool:
    is_copy = event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]
    return is_copy and int(event["args"]["bytes"]) >= _LEAST_COPY_BYTES


def _runs(products: Sequence[Interval]) -> list[Interval]:
    runs: list[Interval] = []
    for begin, end in products:
        if runs and begin - runs[-1][1] < _PASS_GAP_S:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((begin, end))
    return runs


def _pass(begin: float, end: float, kernels: Sequence[Interval], copies: Sequence[Interval]) -> dict[str, float]:
    inside = [(max(a, begin), min(b, end)) for a, b in copies if b > begin and a < end]
    rests = [later[0] - sooner[1] for sooner, later in pairwise(inside)]
    long_rests = [rest for rest in rests if rest > _LEAST_GAP_S]
    return {
        "length_ms": 1e3 * (end - begin),
        "kernels_ms": 1e3 * covered_s([(max(a, begin), min(b, end)) for a, b in kernels if b > begin and a < end]),
        "link_ms": 1e3 * covered_s(inside),
        "records": len(inside),
        "rests": len(long_rests),
        "rests_ms": 1e3 * sum(long_rests),
    }


def trace(call: Callable[[], Any]) -> list[dict[str, float]]:
    """`passes_of` one call under the profiler."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return passes_of(json.loads(path.read_text())["traceEvents"])


def profile(engine: Engine, tokens: Sequence[int], new_tok: int, spans: Spans) -> dict[str, Any]:
    """One kind of work: untouched, timed, traced."""

    def run() -> GenerationStats:
        return engine.generate(list(tokens), max_new_tokens=new_tok, temperature=0.0, ignore_eos=True).stats

    run()
    stats = run()
    timed = spans.measure(run)
    found = {"ttft_ms": 1e3 * stats.ttft_s, "slots": engine.plan.num_slots}
    if stats.reports:
        found["tok_per_s"] = (new_tok - 1) / stats.decode_s
        for name in ("draft_s", "verify_s", "stall_s", "link_busy_s"):
            found[name.replace("_s", "_ms")] = 1e3 * statistics.median(
                getattr(report, name) for report in stats.reports
            )
    return {**found, "host": spans.rows(max(1, len(timed.reports))), "passes": trace(run)}


def works(new_tok: int) -> dict[str, tuple[dict[str, Any], int]]:
    """Load options and tokens to generate, by name; a prompt gives one token."""
    return {
        "round": ({"rows": 33, "k": 32}, new_tok),
        "resident": ({"rows": 33, "k": 32, "device_memory": "44GiB"}, new_tok),
        "plain": ({"rows": 33, "k": 0}, new_tok),
        "on_demand": ({"mode": "on_demand", "records": "plain"}, new_tok),
        "prompt": ({"rows": 33, "k": 32, "ctx_size": LONG_TOK + 1}, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--seed", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--what", nargs="+", choices=list(works(0)), default=["round", "resident", "on_demand", "prompt"]
    )
    parser.add_argument("--budget", type=parse_bytes, help="device memory; by default the shape's")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=97)
    parser.add_argument("--out", type=Path, default=Path("round_profile.json"))
    args = parser.parse_args()
    store = _store(args.shape, args.seed, args.work)
    spans, results = Spans(), {}
    for owner, names in TIMED.items():
        for name in names:
            spans.watch(owner, name)
    for what in args.what:
        options, new_tok = works(args.new_tokens)[what]
        common = {"device": "cuda", "device_memory": args.budget or SHAPES[args.shape].budget_bytes}
        with moespeq.load(store, **{**common, "ctx_size": args.context, **options}) as engine:
            prompts = Prompts(args.data, engine.tokenizer)
            tokens = prompts.long(LONG_TOK) if what == "prompt" else prompts.question(3)
            results[what] = profile(engine, tokens, new_tok, spans)
        _print(what, results[what])
        args.out.write_text(json.dumps(results, indent=1))


def _store(name: str, seed: Path, work: Path) -> Path:
    path, shape = work / f"{name}.code-width.moespeq", SHAPES[name]
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        model = WideModel(seed, shape.factors, device="cuda", num_layers=shape.num_layers, context_tok=4 * LONG_TOK)
        build_store(model, path, layout=Layout.CODE_WIDTH, device="cuda")
    return path


def _print(what: str, result: Mapping[str, Any]) -> None:
    figures = {name: value for name, value in result.items() if name not in ("host", "passes")}
    print(f"{what}: " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items()), flush=True)
    for row in result["host"][:16]:
        print(f"  {row['call']:28s} {row['calls']:8.1f} calls {row['total_ms']:8.2f} ms {row['own_ms']:8.2f} own")
    for row in result["passes"][-3:]:
        print("  pass: " + ", ".join(f"{name} {value:.1f}" for name, value in row.items()))


if __name__ == "__main__":
    main()
