"""A recorded trace holds what the run did, and what a draft would have said, whatever k the run used."""

from __future__ import annotations

import gc
import itertools
import signal
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import open_tight, prompts
from families import make_tiny
from moespeq.decode.engine import Engine
from moespeq.decode.loop import SpeculativeLoop
from moespeq.decode.recording import Recording, record
from moespeq.demo.assets import MODEL_FOLDER
from moespeq.errors import UsageError
from moespeq.prepare import prepare_store
from moespeq.replay import RoutingTrace
from moespeq.types import StepReport

NUM_SLOTS, ROWS, NUM_TOK = 12, 17, 24
(PROMPT,) = prompts(1)
SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "repetition_penalty": 1.3, "min_new_tokens": 6, "seed": 6},
}


@pytest.fixture(scope="module", params=["demo", "qwen2_moe", "deepseek_v3"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained demo model, and two families with shared experts, one of them with dense layers and groups."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = MODEL_FOLDER if request.param == "demo" else make_tiny(request.param, folder / "checkpoint")
    return prepare_store(checkpoint, folder / "store")


@pytest.fixture(scope="module")
def engine(store: Path) -> Iterator[Engine]:
    with open_tight(store, NUM_SLOTS, device="cpu", k=4) as opened:
        yield opened


@pytest.fixture
def tiny_engine(tiny_store: Path) -> Iterator[Engine]:
    with open_tight(tiny_store, NUM_SLOTS, device="cpu", k=4) as opened:
        yield opened


def recorded(engine: Engine, prompt: Sequence[int] = PROMPT, num_tok: int = NUM_TOK, **sampling: Any) -> Recording:
    return record(engine, prompt, max_new_tokens=num_tok, ignore_eos=True, **sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_all_but_the_rounds_is_the_same_for_every_k(engine: Engine, sampling: str) -> None:
    traces = {}
    for k in (0, 4, ROWS - 1):
        engine.retune(k=k)
        traces[k] = recorded(engine, **SAMPLINGS[sampling]).trace
    engine.retune(k=4)
    for k, trace in traces.items():
        assert trace.positions == traces[0].positions, f"k={k}"
        assert sum(round_.committed for round_ in trace.rounds) == len(trace.positions) - 1
    assert {round_.k for round_ in traces[0].rounds} == {0}
    assert max(round_.k for round_ in traces[4].rounds) == 4


def test_true_routes_are_those_of_an_engine_that_computes_a_row_at_a_time(engine: Engine) -> None:
    """Heard of the runner itself, from rounds that draft nothing."""
    heard: dict[int, list[Any]] = {}
    verify = engine._parts.runner.verify

    def hearing(tokens: Sequence[int], position: int, on_layer: Any) -> torch.Tensor:
        return verify(tokens, position, lambda layer, rows: heard.setdefault(position, []).append(rows[0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._parts.runner, "verify", hearing)
        engine.retune(k=0)
        text = engine.generate(PROMPT, max_new_tokens=NUM_TOK, ignore_eos=True)
    engine.retune(k=4)
    trace = recorded(engine).trace
    assert [position.token for position in trace.positions] == list(text.tokens)
    assert [position.true for position in trace.positions[:-1]] == [heard[place] for place in sorted(heard)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_draft_of_the_first_round_is_the_recorded_one(engine: Engine, sampling: str) -> None:
    drafted: list[Any] = []
    on_step = SpeculativeLoop._on_draft_step

    def hearing(loop: SpeculativeLoop, step: int, routes: Any) -> None:
        drafted.append(routes)
        on_step(loop, step, routes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeLoop, "_on_draft_step", hearing)
        text = engine.generate(PROMPT, max_new_tokens=NUM_TOK, ignore_eos=True, **SAMPLINGS[sampling])
    trace = recorded(engine, **SAMPLINGS[sampling]).trace
    first: StepReport = text.stats.reports[0]
    in_common = trace.positions[: first.accepted + 1]  # rows whose tokens the round knew
    assert [position.draft for position in in_common] == drafted[: len(in_common)]
    assert [position.step for position in in_common] == list(range(len(in_common)))
    assert all(position.accepted for position in in_common[: first.accepted])
    assert first.accepted == first.k or not in_common[-1].accepted


def test_each_window_of_the_draft_begins_behind_the_targets_own_keys_and_values(engine: Engine) -> None:
    positions = recorded(engine).trace.positions
    assert [position.step for position in positions] == [*range(ROWS), *range(NUM_TOK - ROWS)]
    engine.retune(k=0)
    tokens = engine.generate(PROMPT, max_new_tokens=ROWS + 1, ignore_eos=True).tokens
    engine.retune(k=4)
    given, routes = [torch.tensor([position.token]) for position in positions[ROWS + 1 :]], []
    engine._parts.runner.draft(
        tokens[-1],
        len(PROMPT) + ROWS,
        NUM_TOK - ROWS,
        lambda logits, step: given[step],
        lambda step, layers: routes.append(layers),
    )
    assert [position.draft for position in positions[ROWS:]] == routes


def test_acceptance_of_a_row_is_whether_its_proposal_is_the_next_token(engine: Engine) -> None:
    positions = recorded(engine).trace.positions
    for row, following in itertools.pairwise(positions):
        assert row.accepted == (row.drafted == following.token)
        assert 0 < row.confidence <= 1
    longer = recorded(engine, num_tok=NUM_TOK + 1).trace.positions
    assert positions[-1].accepted == (positions[-1].drafted == longer[-1].token)


def test_a_trained_router_is_foretold_one_layer_ahead_more_often_than_by_chance(tmp_path: Path) -> None:
    with open_tight(prepare_store(MODEL_FOLDER, tmp_path / "store"), 64, device="cpu", k=4) as engine:
        trace = record(engine, "Question: Tom has 5 apples and buys 7 more.\nAnswer:", max_new_tokens=NUM_TOK).trace
    guesses = [pair for row in trace.positions for pair in zip(row.true[1:], row.ahead[1:], strict=True)]
    found = sum(len({*true} & {*ahead}) for true, ahead in guesses) / sum(len(true) for true, _ in guesses)
    assert found > 0.5  # by chance 2 of 16
    assert all(row.ahead[0] == [] for row in trace.positions)


def test_two_recordings_differ_in_nothing_but_time(engine: Engine, tmp_path: Path) -> None:
    traces = []
    for _ in range(2):
        engine.retune()  # slots start empty
        traces.append(recorded(engine).trace)
    first, second = traces
    assert first.positions == second.positions
    timed = {"link_bytes_per_s": 0, "draft_step_s": 0, "resident": []}  # what stays of a prompt: when its copies came
    assert replace(first.header, **timed) == replace(second.header, **timed)
    untimed = [[(each.k, each.accepted, each.committed) for each in trace.rounds] for trace in traces]
    assert untimed[0] == untimed[1]
    first.write(tmp_path / "t")
    assert RoutingTrace.read(tmp_path / "t") == first


def test_the_header_says_what_crossed_the_link_and_what_was_in_effect(engine: Engine) -> None:
    engine.retune(prefetch=False, eviction="lru", link_bytes_per_s="1GB")
    recording = recorded(engine)
    header, stats, manifest = recording.trace.header, recording.result.stats, engine.manifest
    engine.retune(prefetch=True, eviction="auto", link_bytes_per_s=None)
    assert (header.num_layers, header.num_experts, header.top_k) == (
        manifest.num_layers,
        manifest.num_experts,
        manifest.top_k,
    )
    assert len(header.record_bytes) == header.num_layers
    assert all(0.4 < num_bytes / header.plain_record_bytes < 0.6 for num_bytes in header.record_bytes)
    assert (header.layout, header.num_slots, header.device, header.prompt_tok) == ("nested", NUM_SLOTS, "cpu", 12)
    assert header.link_bytes_per_s == pytest.approx(stats.link_bytes / stats.link_busy_s)
    in_effect = {
        "k": 4,
        "rows": ROWS,
        "prefetch": False,
        "eviction": "lru",
        "records": "store",
        "link_bytes_per_s": 1e9,
    }
    assert in_effect.items() <= header.options.items()
    assert header.options["sampling"]["temperature"] == 0
    assert [round_.link_bytes for round_ in recording.trace.rounds] == [r.link_bytes for r in stats.reports]


def test_a_text_over_the_edge_of_a_length_bucket_and_to_the_end_of_the_context_is_whole(tiny_store: Path) -> None:
    (prompt,) = prompts(1, length=240)
    with open_tight(tiny_store, NUM_SLOTS, device="cpu", k=4, ctx_size=270, prefill_rows=20) as engine:
        trace = recorded(engine, prompt, 1000).trace
        assert len(trace.positions) == 30
        assert [position.step for position in trace.positions] == [*range(16), *range(14)]  # cut at 256
        engine.retune(k=0)
        assert recorded(engine, prompt, 1000).trace.positions == trace.positions


def test_a_text_of_one_token_is_refused_for_it_has_no_round(tiny_engine: Engine) -> None:
    with pytest.raises(UsageError, match="ended with its first token, before any round; ask for more tokens"):
        recorded(tiny_engine, num_tok=1)


def test_a_text_that_ends_early_is_recorded_up_to_its_end(tiny_engine: Engine) -> None:
    tokens = tiny_engine.generate(PROMPT, max_new_tokens=NUM_TOK, ignore_eos=True).tokens
    recording = record(tiny_engine, PROMPT, max_new_tokens=NUM_TOK, eos_token_ids=tokens[9])
    assert len(recording.trace.positions) == tokens.index(tokens[9]) + 1
    assert sum(round_.committed for round_ in recording.trace.rounds) == tokens.index(tokens[9])


def test_a_recorded_engine_answers_as_before(tiny_engine: Engine) -> None:
    before = tiny_engine.generate(PROMPT, max_new_tokens=NUM_TOK)
    recording = record(tiny_engine, PROMPT, max_new_tokens=NUM_TOK)
    after = tiny_engine.generate(PROMPT, max_new_tokens=NUM_TOK)
    assert before.tokens == recording.result.tokens == after.tokens
    assert before.stats.routes == recording.result.stats.routes == after.stats.routes
    tiny_engine._parts.residency.check()


def test_a_recorded_engine_is_gone_when_dropped(tiny_store: Path) -> None:
    engine = open_tight(tiny_store, 5, device="cpu", k=4)
    recorded(engine, num_tok=8)
    parts = engine._parts
    left = [weakref.ref(part) for part in (parts.residency, parts.runner, parts.runner.model, parts.loop)]
    gc.collect()
    gc.disable()
    try:
        engine.close()
        del engine, parts
        assert [part() for part in left] == [None] * 4
    finally:
        gc.enable()


def test_progress_counts_each_part_to_its_end(tiny_engine: Engine) -> None:
    told: dict[str, list[int]] = {}
    recorded(tiny_engine, progress=lambda done, total, what: told.setdefault(what, []).append(done) or total == NUM_TOK)
    assert list(told) == ["generating", "drafting along the text", "looking one layer ahead"]
    for done in told.values():
        assert done == sorted(done)
        assert done[-1] == NUM_TOK


@pytest.mark.parametrize("part", ["generating", "drafting along the text", "looking one layer ahead"])
def test_an_interrupt_leaves_the_engine_free(tiny_engine: Engine, part: str) -> None:
    before = tiny_engine.generate(PROMPT, max_new_tokens=12).tokens

    def interrupt(done: int, total: int, what: str) -> None:
        if what == part:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        recorded(tiny_engine, progress=interrupt)
    assert tiny_engine.generate(PROMPT, max_new_tokens=12).tokens == before


@pytest.mark.parametrize("part", ["generating", "drafting along the text"])
def test_a_recording_whose_engine_is_closed_is_no_trace(tiny_engine: Engine, part: str) -> None:
    with pytest.raises(
        UsageError, match=r"closed before this generation ended|cancelled before its trace was complete"
    ):
        recorded(tiny_engine, progress=lambda done, total, what: tiny_engine.close() if what == part else None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 1}, "an engine of 1 row never drafts; load with rows of 17, 33 or 65"),
        ({"records": "whole"}, "no base is resident to draft with; give more --device-memory"),
        ({"mode": "on_demand"}, "on demand nothing is drafted; leave the mode out"),
    ],
)
def test_an_engine_that_never_drafts_is_refused(tiny_store: Path, options: dict[str, Any], message: str) -> None:
    records = {"records": "whole"} if "mode" in options else {}
    with (
        open_tight(tiny_store, NUM_SLOTS, device="cpu", **{**records, **options}) as engine,
        pytest.raises(UsageError, match=message),
    ):
        recorded(engine)


@pytest.mark.parametrize(("family", "why"), [("qwen3_next", "layers with a state"), ("gemma4_text", "its routers")])
def test_a_family_that_cannot_be_traced_is_refused(family: str, why: str, tmp_path: Path) -> None:
    store = prepare_store(make_tiny(family, tmp_path / "checkpoint"), tmp_path / "store")
    with (
        open_tight(store, NUM_SLOTS, device="cpu") as engine,
        pytest.raises(UsageError, match=f"{family} model: {why}"),
    ):
        recorded(engine)


def test_rejection_sampling_is_refused(tiny_engine: Engine) -> None:
    with pytest.raises(UsageError, match="record with acceptance='coupled'"):
        recorded(tiny_engine, acceptance="rejection", temperature=1.0)


def test_experts_without_a_base_in_the_bank_are_recorded_too(tiny_store: Path) -> None:
    with open_tight(tiny_store, NUM_SLOTS, device="cpu", k=4, base_memory=100_000) as engine:
        assert engine.options.records == "mixed"
        trace = recorded(engine).trace
        assert len(trace.positions) == NUM_TOK
        assert max(trace.header.record_bytes) > min(engine.record_bytes)
