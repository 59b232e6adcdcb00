"""`moespeq trace replay` as people and programs meet it: how far the replay is off comes first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from measured_trace import measured_trace
from moespeq.replay import RoutingTrace
from synthetic_trace import synthetic_trace

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replay(cli: Cli) -> Cli:
    return partial(cli, "trace", "replay")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    made = synthetic_trace(num_positions=40, stickiness=0.5, acceptance=0.8, skew=1.0, seed=2)
    measured_trace(made, bytes_per_s=12e9).write(tmp_path / "t")
    return tmp_path / "t"


def names(text: str) -> list[str]:
    """What the rows of all tables are called."""
    return [match[1] for match in re.finditer(r"^(\S.*?)\s{2,}[\d.]+ +[\d.]+ ", text, re.MULTILINE)]


def unwrapped(text: str) -> str:
    """Lines that go on below their first one are one line."""
    return re.sub(r"\n {21}(?=\S)", " ", text)


def test_the_recorded_run_alone_is_compared_with_its_replay(replay: Cli, trace: Path) -> None:
    code, out, err = replay(trace)
    assert (code, err) == (0, "")
    first = out.splitlines()[0]
    assert re.fullmatch(r"recorded [\d.]+ tok/s, replayed [\d.]+ \([+-]\d %\)", first)
    assert names(out) == ["recorded", "replayed"]


def test_what_if_stands_below_with_what_it_is(replay: Cli, trace: Path) -> None:
    code, out, _ = replay(trace, "--k", 2, "--link", "pcie5", "--slots", 20, "--no-prefetch", "--policy", "lru")
    assert code == 0
    assert names(out) == ["recorded", "replayed", "what if"]
    what_if = r"^what if +k=2, 20 slots of 8.58 MiB, 55 GB/s, lru without prefetch$"
    assert re.search(what_if, unwrapped(out), re.MULTILINE)


def test_neighbours_and_policies_stand_beside_it(replay: Cli, trace: Path) -> None:
    _, out, _ = replay(trace, "--compare", "--policies")
    assert names(out)[:6] == ["recorded", "replayed", "pcie3", "pcie4", "pcie5", "twice the slots"]
    assert names(out)[6:] == ["ours", "lru", "lfu", "chunk", "ours without prefetch", "lru without prefetch"]
    assert re.search(r"^saved: 1.00 is Belady's rule.*at \d+\S* MB a token", out, re.MULTILINE)


def test_figures_below_each_other_have_the_same_decimals(replay: Cli, trace: Path) -> None:
    _, out, _ = replay(trace, "--slots", 48, "--policies")  # these move a tenth of what the recorded run did
    for table in out.split("MB/tok")[1:]:
        megabytes = re.findall(r"^\S.*?\s{2,}[\d.]+ +[\d.]+ +([\d.]+) ", table.partition("\n\n")[0], re.MULTILINE)
        assert len(megabytes) >= 3
        assert len({len(figure.partition(".")[2]) for figure in megabytes}) == 1


def test_every_line_fits_a_terminal_of_80_columns(replay: Cli, trace: Path) -> None:
    other = ("--k", 64, "--link", "pcie5", "--no-prefetch", "--policy", "lru")
    _, out, _ = replay(trace, *other, "--compare", "--policies")
    assert max(map(len, out.splitlines())) <= 80


def test_what_was_not_measured_is_said(replay: Cli, trace: Path) -> None:
    _, out, _ = replay(trace, "--k", 40)
    told = unwrapped(out)
    assert "extrapolated         Behind draft step 8 a token counts as accepted" in told
    assert "A pass of 41 rows takes as long as one of the recorded 33 rows" in told
    _, out, _ = replay(trace, "--k", 8, "--slots", 20, "--link", "pcie4")
    assert "extrapolated" not in out
    _, out, _ = replay(trace, "--records", "plain", "--json")
    assert json.loads(out)["extrapolated"] == [
        "An expert of these records takes as long to compute as one of the recorded form."
    ]


def test_a_replay_that_is_far_off_says_so_first(replay: Cli, trace: Path) -> None:
    made = RoutingTrace.read(trace)
    rounds = [replace(one, verify_s=one.verify_s + 1.0, stall_s=one.stall_s + 1.0) for one in made.rounds]
    replace(made, rounds=rounds).write(trace)
    _, out, _ = replay(trace, "--k", 2)
    assert re.search(r"\(\+\d+ %\)$", out.splitlines()[0])
    assert out.splitlines()[1] == "That is more than 15 % apart: the rest is not to be trusted."
    _, out, _ = replay(trace, "--k", 2, "--json")
    assert json.loads(out)["is_trusted"] is False


def test_json_is_one_line_with_every_outcome_and_setting(replay: Cli, trace: Path) -> None:
    code, out, err = replay(trace, "--json", "--k", 2, "--policies")
    assert (code, err, out.count("\n")) == (0, "", 1)
    told = json.loads(out)
    assert told["is_trusted"] is True
    assert abs(told["error_share"]) < 0.15
    assert list(told["outcomes"]) == ["recorded", "replayed", "what if"]
    assert told["outcomes"]["recorded"]["wasted_share"] is None
    assert told["settings"]["what if"] == told["settings"]["replayed"] | {"k": 2}
    assert told["policies"]["outcomes"][0]["name"] == "ours"
    _, out, _ = replay(trace, "--json")
    assert json.loads(out)["policies"] is None


def test_a_link_that_nothing_crossed_has_no_rate(replay: Cli, trace: Path) -> None:
    made = RoutingTrace.read(trace)
    replace(made, header=replace(made.header, link_bytes_per_s=0.0)).write(trace)
    _, out, _ = replay(trace)
    assert "a link that nothing crossed" in unwrapped(out)
    _, out, _ = replay(trace, "--json")
    assert json.loads(out)["settings"]["replayed"]["link_bytes_per_s"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--link", "fast"),
            r": link 'fast' is unknown; use pcie3, pcie4, pcie5, or its bytes a second, such as 25GB\.$",
        ),
        (("--link", "pcie6"), "Did you mean 'pcie5'|Did you mean 'pcie4'|Did you mean 'pcie3'"),
        (("--k", "100"), "from 0 to 64, got 100"),
        (("--device-memory", "1GiB"), "give --slots"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_2(
    replay: Cli, trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = replay(trace, *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert err.count("\n") == 1


def test_what_is_no_trace_is_said_to_be_none(replay: Cli, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("text")
    code, _, err = replay(tmp_path / "t")
    assert code == 2
    assert "is no routing trace" in err
