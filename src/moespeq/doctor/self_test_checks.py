"""From a test generation to findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from moespeq.doctor.base_probe import BaseFacts
from moespeq.doctor.findings import Finding, fine, problem, warning
from moespeq.doctor.self_test import SelfTest

__all__ = ["check_self_test"]

_MOST_PREFILL_GAP = 0.05  # passes of another shape differ in the last bits of bf16; a draft's own keys by twice this
_MOST_WRONG_ROUTES = 0.25
_LEAST_ACCEPTED = 0.3  # of 8 drafted tokens: each with a chance of 0.7
_ERROR_SHARES = {4: 0.2, 3: 0.4, 2: 0.8}  # twice what trained models' bases have, by bits


def check_self_test(test: SelfTest, command: str) -> Iterator[Finding]:
    """command: how the model under test is named on a command line."""
    yield _text(test)
    yield _kv_cache(test)
    yield _base(test.base, command)
    yield _acceptance(test, command)


def _text(test: SelfTest) -> Finding:
    told = f"{test.num_tok} tokens of {test.model} on {test.device}, k = {test.k} against k = 0"
    if test.first_difference is None:
        return fine("self-test: text", f"{told}: identical")
    cause = "an engine that is not exact on this machine: a bug, or memory that flips bits"
    told = f"{told}: they part at token {test.first_difference + 1}"
    return problem("self-test: text", told, cause, "run with --k 0 until it is mended, and report this output")


def _kv_cache(test: SelfTest) -> Finding:
    name = "self-test: KV cache"
    if test.kv_differing:
        told = f"{test.kv_differing} of {test.num_layers} layers hold other keys or values than a run with k = 0"
        cause = "rejected or draft tokens left something in the cache"
        return problem(name, told, cause, "run with --k 0 until it is mended, and report this output")
    told = f"all {test.num_layers} layers as with k = 0, bit for bit; {test.prefill_gap:.2%} from a prefill's"
    if test.prefill_gap <= _MOST_PREFILL_GAP:
        return fine(name, told)
    cause = f"verify passes and prefill differ by more than rounding explains ({_MOST_PREFILL_GAP:.0%})"
    return problem(
        name, told, cause, "report this output; `moespeq doctor --device cpu` says whether the GPU is at fault"
    )


def _base(base: BaseFacts, command: str) -> Finding:
    name = "self-test: base calibration"
    told = f"{base.num_experts} experts, INT4" if base.bits == 4 else f"{base.num_experts} experts, {base.bits} bits"
    if base.damaged:
        told = f"{told}: {len(base.damaged)} damaged, such as: {base.damaged[0]}"
        return problem(name, told, "the store changed after it was written", f"moespeq verify {command}")
    if base.num_unlike_checkpoint:
        told = f"{told}: {base.num_unlike_checkpoint} decode to other weights than the checkpoint's"
        return problem(name, told, "the store is of another checkpoint, or damaged", f"moespeq verify {command}")
    if base.num_recoded:
        told = f"{told}: the weights of {base.num_recoded}, quantized again, give another base"
        return problem(name, told, "the base was made by another encoder", f"moespeq prepare {command} --out NEW_STORE")
    checked = "" if base.num_unlike_checkpoint is None else ", weights as in the checkpoint"
    told = f"{told}: as their weights quantize{checked}; the base leaves {base.error_share:.1%} of their norm"
    if base.error_share <= _ERROR_SHARES[base.bits]:
        return fine(name, told)
    cause = "weights that so few bits do not follow: outliers within a group"
    return warning(name, told, cause, f"moespeq prepare {command} --bits 4 --group 32 --out NEW_STORE")


def _acceptance(test: SelfTest, command: str) -> Finding:
    kept, drafted = test.acceptance.accepted_tok, test.acceptance.drafted_tok
    share = kept / drafted if drafted else 0.0
    told = f"{kept} of {drafted} drafted tokens kept, {test.routes.wrong_share:.1%} of routes foretold wrong"
    if share >= _LEAST_ACCEPTED and test.routes.wrong_share <= _MOST_WRONG_ROUTES:
        return fine("self-test: draft", told)
    cause = "a model whose draft says little of it: few bits, or weights that were never trained"
    remedy = f"moespeq prepare {command} --bits 4 --group 32 --out NEW_STORE, or run with --k 0"
    return warning("self-test: draft", told, cause, remedy)
