"""`moespeq trace replay`: a routing trace on other hardware."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moespeq.cli import options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moespeq.replay.policies import PolicyComparison
    from moespeq.replay.what_if import Outcome, Setting

__all__ = ["command"]

_NAME_WIDTH = 24


def command(
    trace: Annotated[Path, typer.Argument(metavar="T", help="A routing trace.")],
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
    """What a recorded run would have taken on other hardware or with other options, on a virtual clock.

    The run as recorded is replayed first: how far that is from what was measured says how far to trust the rest.
    """
    from moespeq.cli.console import out, print_json
    from moespeq.replay import RoutingTrace
    from moespeq.replay.changes import Changes, neighbours
    from moespeq.replay.policies import compare_policies
    from moespeq.replay.what_if import recorded_outcome, recorded_setting, replay_setting

    recorded = RoutingTrace.read(trace)
    own = recorded_setting(recorded)
    asked = Changes(k, slots, device_memory, link, policy, prefetch, records).apply(recorded.header, own)
    settings = {"replayed": own}
    settings |= {} if asked == own else {"what if": asked}
    settings |= neighbours(asked, recorded.header.num_layers * recorded.header.num_experts) if compare else {}
    outcomes = {"recorded": recorded_outcome(recorded)}
    outcomes |= {name: replay_setting(recorded, setting) for name, setting in settings.items()}
    by_policy = compare_policies(recorded, asked) if policies else None
    if json:
        print_json(_as_json(outcomes, settings, by_policy))
        return
    for line in _lines(outcomes, settings, by_policy):
        out.print(line)


def _lines(
    outcomes: Mapping[str, Outcome], settings: Mapping[str, Setting], by_policy: PolicyComparison | None
) -> list[str]:
    """For people: how far off the replay is, a row for each setting, then what the settings are."""
    lines, replayed = [_verdict(outcomes), "", f"{_HEAD}  x replayed"], outcomes["replayed"]
    for name, outcome in outcomes.items():
        lines.append(f"{_row(name, outcome)} {outcome.tok_per_s / replayed.tok_per_s:11.2f}")
    lines += ["", *(f"{name:<{_NAME_WIDTH}}{_described(setting)}" for name, setting in settings.items())]
    if by_policy is not None:
        lines += ["", f"{_HEAD}  saved"]
        lines += [f"{_row(one.name, one.outcome)} {one.saving_share:6.2f}" for one in by_policy.outcomes]
        bounds = by_policy.bounds
        lines += [
            "",
            f"saved: 1.00 is Belady's rule, which knows the future, at {bounds.belady / 1e6:.3g} MB a token; "
            f"0.00 is no cache, at {bounds.no_cache / 1e6:.3g}",
        ]
    return lines


def _verdict(outcomes: Mapping[str, Outcome]) -> str:
    from moespeq.replay.what_if import TRUSTED_SHARE, error_share

    recorded, replayed = outcomes["recorded"], outcomes["replayed"]
    error = error_share(recorded, replayed)
    told = f"recorded {recorded.tok_per_s:.1f} tok/s, replayed {replayed.tok_per_s:.1f} ({round(100 * error):+d} %)"
    if abs(error) <= TRUSTED_SHARE:
        return told
    return f"{told}: more than {100 * TRUSTED_SHARE:.0f} % apart, so the rest is not to be trusted"


_HEAD = f"{'':<{_NAME_WIDTH}}   tok/s  ms/tok  MB/tok    hit   late   miss  wasted  stall"


def _row(name: str, outcome: Outcome) -> str:
    shares = (outcome.hit_share, outcome.late_share, outcome.miss_share)
    wasted = "      -" if outcome.wasted_share is None else f"{100 * outcome.wasted_share:6.1f}%"
    return (
        f"{name:<{_NAME_WIDTH}}{outcome.tok_per_s:8.2f}{1e3 / outcome.tok_per_s:8.2f}{outcome.bytes_per_tok / 1e6:8.3g}"
        f"{''.join(f'{100 * share:6.1f}%' for share in shares)} {wasted}{100 * outcome.stall_share:6.1f}%"
    )


def _described(setting: Setting) -> str:
    from moespeq.config import format_bytes
    from moespeq.replay.policies import policy_name

    depth = "k as recorded" if setting.k is None else f"k={setting.k}"
    rate = setting.link.bytes_per_s
    link = f"{rate / 1e9:.3g} GB/s" if math.isfinite(rate) else "a link that nothing crossed"
    return (
        f"{depth}, {setting.num_slots} slots of {format_bytes(max(setting.record_bytes))}, "
        f"{link}, {policy_name(setting.options.eviction)}"
        f"{'' if setting.options.prefetch else ' without prefetch'}"
    )


def _as_json(
    outcomes: Mapping[str, Outcome], settings: Mapping[str, Setting], by_policy: PolicyComparison | None
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
        "policies": None if by_policy is None else asdict(by_policy),
    }
