"""From what a server or a recorded run says of its drafts to findings: did acceptance fall, does drafting pay. Pure.

A governor that leaves drafting out because it would gain nothing does its work: that is told, and no warning.
What is judged is the share of drafts whose first token was kept: it does not depend on how deep k is. Trained models
lie at 0.9 and more, greedy (docs/adr/0002).
"""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from moespeq.doctor.findings import Finding, fine, problem, skipped, warning
from moespeq.doctor.signals import Acceptance, Signals

__all__ = ["check_decoding"]

_LEAST_DRAFTS = 12  # fewer say nothing
_LEAST_FIRST_SHARE = 0.7
_LEAST_COMPARED = 48  # drafted tokens, in rounds and along a text
_MOST_FALL = 0.15  # of that share, against earlier
_STANDARD_ERRORS = 3.0  # that a fall must be above: chance alone passes that once in 700 looks
_MOST_WRONG_ROUTES = 0.25
_MOST_ECHO_GAP = 0.5  # nats of one token: rounding of bf16 moves it by hundredths
_MOST_PLAIN_SHARE = 0.5
_LEAST_ROUNDS = 16
_LITTLE_WAITING = 0.15
_MUCH_LINK = 0.8


def check_decoding(signals: Signals) -> Iterator[Finding]:
    """Acceptance, then its three causes, then whether drafting pays."""
    yield _acceptance(signals)
    yield _kv_consistency(signals)
    yield _base_calibration(signals)
    yield _workload_shift(signals)
    yield _pays(signals)


def _acceptance(signals: Signals) -> Finding:
    name, seen = "acceptance", signals.acceptance
    if seen.drafts < _LEAST_DRAFTS:
        return skipped(name, f"{signals.source}: drafts {seen.drafts}, and {_LEAST_DRAFTS} or more say something")
    told = (
        f"the first token of {seen.first_share:.0%} of {seen.drafts} drafts was kept, "
        f"{seen.accepted_tok / seen.drafted_tok:.0%} of {seen.drafted_tok} drafted tokens"
    )
    if seen.first_share >= _LEAST_FIRST_SHARE:
        return fine(name, told)
    cause = "one of the next three checks, where it fires; else hot sampling, or a text that nobody could foretell"
    return warning(name, told, cause, f"moespeq doctor {quote(signals.model)}")


def _kv_consistency(signals: Signals) -> Finding:
    name = "KV consistency"
    report = "restart with --k 0 until it is mended, and report this output"
    if signals.echo_logprob_gap is not None:
        told = f"an answer's log-probabilities lie within {signals.echo_logprob_gap:.3f} of a prefill of the same text"
        if signals.echo_logprob_gap <= _MOST_ECHO_GAP:
            return fine(name, told)
        return problem(name, told, "keys and values of decoded tokens are not those of their text", report)
    in_rounds, on_text = signals.kept_in_rounds, signals.kept_on_text
    unknown = _why_not_compared(signals)
    if in_rounds is None or on_text is None or unknown is not None:
        return skipped(name, f"{unknown}; `moespeq doctor {quote(signals.model)}` compares caches")
    told = f"{in_rounds.share:.0%} of drafted tokens were kept in rounds, {on_text.share:.0%} along the finished text"
    if in_rounds.share >= on_text.share - _MOST_FALL:
        return fine(name, told)
    return problem(name, told, "rounds read other keys and values than the finished text has", report)


def _why_not_compared(signals: Signals) -> str | None:
    """Why rounds are not compared with the finished text; None where they are."""
    in_rounds, on_text = signals.kept_in_rounds, signals.kept_on_text
    if in_rounds is None or on_text is None:
        return signals.echo_refusal or f"{signals.source} does not tell what a draft along its text keeps; a trace does"
    if min(in_rounds.total, on_text.total) >= _LEAST_COMPARED:
        return None
    counted = f"its rounds kept or refused {in_rounds.total} drafted tokens, its text has {on_text.total}"
    return f"{signals.source}: {counted}, and {_LEAST_COMPARED} or more of each say something"


def _base_calibration(signals: Signals) -> Finding:
    name, routes = "base calibration", signals.routes
    if routes is None or not routes.total:
        return skipped(
            name, f"no routes were counted; `moespeq doctor {quote(signals.model)}` looks at the base itself"
        )
    told = f"the draft foretold another expert in {routes.wrong_share:.1%} of {routes.total} routes"
    if routes.wrong_share <= _MOST_WRONG_ROUTES:
        return fine(name, told)
    cause = "the base follows the weights badly: few bits, wide groups, or a store that is not this checkpoint's"
    remedy = f"moespeq doctor {quote(signals.model)}; then moespeq prepare MODEL --bits 4 --group 32"
    return warning(name, told, cause, remedy)


def _workload_shift(signals: Signals) -> Finding:
    name, now, before = "workload shift", signals.recent, signals.before
    if before is None or now is None or min(before.drafts, now.drafts) < _LEAST_DRAFTS:
        return skipped(name, f"{signals.source}: too few drafts, or none before, to compare")
    then = f"{before.first_share:.0%} of {before.drafts} before"
    told = f"{now.first_share:.0%} of {now.drafts} drafts began well now, {then}"
    if before.first_share - now.first_share <= max(_MOST_FALL, _STANDARD_ERRORS * _error(before, now)):
        return fine(name, told)
    cause = "other texts or hotter sampling than before; the governor follows by itself within some rounds"
    remedy = f"moespeq trace record {quote(signals.model)} -p PROMPT --out new.trace && moespeq trace show new.trace"
    return warning(name, told, cause, remedy)


def _error(before: Acceptance, now: Acceptance) -> float:
    """Of the difference of the two shares, if both were samples of one."""
    share = (before.first_accepted + now.first_accepted) / (before.drafts + now.drafts)
    return float((share * (1.0 - share) * (1 / before.drafts + 1 / now.drafts)) ** 0.5)


def _pays(signals: Signals) -> Finding:
    name = "speculation pays"
    if signals.k_asked == 0:
        return fine(name, "nothing was drafted: k = 0 was asked for, or no memory was left for a draft")
    if signals.rounds < _LEAST_ROUNDS:
        return skipped(name, f"{signals.source}: rounds {signals.rounds}, and {_LEAST_ROUNDS} or more say something")
    share = signals.plain_rounds / signals.rounds
    told = f"{share:.0%} of {signals.rounds} rounds drafted nothing (k = 0)"
    if share <= _MOST_PLAIN_SHARE:
        return fine(name, told)
    plan = f"moespeq plan {quote(signals.model)}"
    if signals.acceptance.drafts >= _LEAST_DRAFTS and signals.acceptance.first_share < _LEAST_FIRST_SHARE:
        remedy = f"{plan} says what would help; --base-memory 0 --k 0 gives the base's memory to slots"
        return warning(name, told, "few drafted tokens are kept", remedy)
    if signals.link_busy_s is not None and signals.link_busy_s > _MUCH_LINK * signals.pass_s:
        reason = "the link is busy already, and verifying more tokens at once asks for more experts"
    elif signals.pass_s > 0 and signals.stall_s <= _LITTLE_WAITING * signals.pass_s:
        reason = (
            f"passes wait for the link {signals.stall_s / signals.pass_s:.0%} of their time: a draft has little to hide"
        )
    else:
        reason = (
            "a round of several tokens takes longer than they are worth: slow draft steps, or many experts to fetch"
        )
    return fine(name, f"{told}: {reason}; `{plan}` says what would help")
