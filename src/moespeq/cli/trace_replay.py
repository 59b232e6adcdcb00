"""`moespeq trace replay`: a routing trace on other hardware."""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moespeq.cli import options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moespeq.replay.policies import PolicyComparison
    from moespeq.replay.what_if import Outcome, Setting

__all__ = ["command"]

_NAME_WIDTH, _WIDTH = 21, 80


def command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A routing trace.")],
    *,
    k: Annotated[int | None, typer.Option("--k", help="Draft length, 0 to 64; by default as recorded.")] = None,
    slots: Annotated[int | None, typer.Option("--slots", help="Records that fit the device.")] = None,
    device_memory: Annotated[
        str | None,
        typer.Option("--device-memory", metavar="SIZE", help="In place of what the run had; slots follow."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option("--link", metavar="pcie3|pcie4|pcie5|SIZE", help="The link, or its bytes a second, such as 25GB."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="ours|lru|lfu|chunk", help="What leaves the slots, and comes first."),
    ] = None,
    prefetch: Annotated[
        bool | None, typer.Option("--prefetch/--no-prefetch", help="Fetch what the draft names, or do not.")
    ] = None,
    records: Annotated[
        str | None, typer.Option("--records", metavar="nested|plain", help="What crosses the link; plain is bf16.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Beside it each PCIe link, and twice the slots.")] = False,
    policies: Annotated[bool, typer.Option("--policies", help="Beside it each policy, and Belady's bound.")] = False,
    json: options.Json = False,
) -> None:
    """Tell what a recorded run would have taken otherwise.

    On other hardware or with other options, on a virtual clock. The run as recorded is replayed first: how far that is
    from what was measured says how far to trust the rest.

    Example: moespeq trace replay run.trace --link pcie4 --compare
    """
    from moespeq.cli.console import out, print_json, progress_bar
    from moespeq.replay import RoutingTrace
    from moespeq.replay.changes import Changes, neighbours
    from moespeq.replay.extrapolation import extrapolations
    from moespeq.replay.policies import compare_policies
    from moespeq.replay.what_if import recorded_outcome, recorded_setting, replay_setting

    recorded = RoutingTrace.read(trace)
    own = recorded_setting(recorded)
    asked = Changes(k, slots, device_memory, link, policy, prefetch, records).apply(recorded.header, own)
    settings = {"replayed": own}
    settings |= {} if asked == own else {"what if": asked}
    settings |= neighbours(asked, recorded.header.num_layers * recorded.header.num_experts) if compare else {}
    outcomes = {"recorded": recorded_outcome(recorded)}
    with progress_bar() as bar:
        tell = bar.counting("replays").update
        for number, (name, setting) in enumerate(settings.items()):
            tell(number, len(settings), name)
            outcomes[name] = replay_setting(recorded, setting)
        by_policy = compare_policies(recorded, asked, progress=tell) if policies else None
    trusted = extrapolations(recorded, asked)
    if json:
        print_json(_as_json(outcomes, settings, by_policy, trusted))
        return
    for line in _lines(outcomes, settings, by_policy, trusted):
        out.print(line)


def _lines(
    outcomes: Mapping[str, Outcome],
    settings: Mapping[str, Setting],
    by_policy: PolicyComparison | None,
    trusted: Sequence[str],
) -> list[str]:
    """For people: how far off the replay is, a row a setting, what the settings are, and what was not measured."""
    replayed = outcomes["replayed"]
    lines = [*_verdict(outcomes), "", _head("times")]
    times = [one.tok_per_s / replayed.tok_per_s for one in outcomes.values()]
    lines += _rows(list(outcomes), list(outcomes.values()), times)
    lines += ["", *(_wrapped(name, _described(setting)) for name, setting in settings.items())]
    lines += [_wrapped("extrapolated" if not number else "", said) for number, said in enumerate(trusted)]
    if by_policy is not None:
        told, saved = by_policy.outcomes, [one.saving_share for one in by_policy.outcomes]
        lines += ["", _head("saved"), *_rows([one.name for one in told], [one.outcome for one in told], saved)]
        bounds = by_policy.bounds
        lines += [
            "",
            f"saved: 1.00 is Belady's rule, which knows the future, at {bounds.belady / 1e6:.3g} MB a token,",
            f"0.00 no cache at all, at {bounds.no_cache / 1e6:.3g}",
        ]
    return lines


def _verdict(outcomes: Mapping[str, Outcome]) -> list[str]:
    from moespeq.replay.what_if import TRUSTED_SHARE, error_share

    recorded, replayed = outcomes["recorded"], outcomes["replayed"]
    error = error_share(recorded, replayed)
    told = f"recorded {recorded.tok_per_s:.1f} tok/s, replayed {replayed.tok_per_s:.1f} ({round(100 * error):+d} %)"
    if abs(error) <= TRUSTED_SHARE:
        return [told]
    return [told, f"That is more than {100 * TRUSTED_SHARE:.0f} % apart: the rest is not to be trusted."]


def _head(compared: str) -> str:
    return f"{'':<{_NAME_WIDTH}}   tok/s{compared:>8}  MB/tok    hit   late   miss wasted  stall"


def _rows(names: Sequence[str], outcomes: Sequence[Outcome], compared: Sequence[float]) -> list[str]:
    from moespeq.cli.console import column

    megabytes = column([one.bytes_per_tok / 1e6 for one in outcomes])
    return [_row(*each) for each in zip(names, outcomes, compared, megabytes, strict=True)]


def _row(name: str, outcome: Outcome, compared: float, megabytes: str) -> str:
    shares = (outcome.hit_share, outcome.late_share, outcome.miss_share, outcome.wasted_share, outcome.stall_share)
    percents = "".join("      -" if share is None else f"{100 * share:6.1f}%" for share in shares)
    return f"{name:<{_NAME_WIDTH}}{outcome.tok_per_s:8.2f}{compared:8.2f}{megabytes:>8}{percents}"


def _wrapped(name: str, text: str) -> str:
    return fill(f"{name:<{_NAME_WIDTH}}{text}", _WIDTH, subsequent_indent=" " * _NAME_WIDTH)


def _described(setting: Setting) -> str:
    from moespeq.config import format_bytes
    from moespeq.replay.policies import policy_name

    depth = "k as recorded" if setting.k is None else f"k={setting.k}"
    rate = setting.link.bytes_per_s
    link = f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"
    return (
        f"{depth}, {setting.num_slots} slots of {format_bytes(max(setting.record_bytes))}, "
        f"{link if math.isfinite(rate) else 'a link that nothing crossed'}, {policy_name(setting.options.eviction)}"
        f"{'' if setting.options.prefetch else ' without prefetch'}"
    )


def _as_json(
    outcomes: Mapping[str, Outcome],
    settings: Mapping[str, Setting],
    by_policy: PolicyComparison | None,
    trusted: Sequence[str],
) -> dict[str, Any]:
    from dataclasses import asdict

    from moespeq.replay.policies import policy_name
    from moespeq.replay.what_if import TRUSTED_SHARE, error_share

    error = error_share(outcomes["recorded"], outcomes["replayed"])
    return {
        "error_share": error,
        "is_trusted": abs(error) <= TRUSTED_SHARE,
        "outcomes": {name: asdict(outcome) for name, outcome in outcomes.items()},
        "settings": {
            name: {
                "k": setting.k,
                "num_slots": setting.num_slots,
                "record_bytes": max(setting.record_bytes),
                "link_bytes_per_s": setting.link.bytes_per_s if math.isfinite(setting.link.bytes_per_s) else None,
                "policy": policy_name(setting.options.eviction),
                "prefetch": setting.options.prefetch,
            }
            for name, setting in settings.items()
        },
        "extrapolated": list(trusted),
        "policies": None if by_policy is None else asdict(by_policy),
    }
