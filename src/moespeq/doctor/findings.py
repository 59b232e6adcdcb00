"""What a check says: evidence in figures, and where something is wrong, its likely cause and the command that mends it.

Every check gives exactly one finding each time, so that silence is a finding too. One that could not look says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Severity", "exit_code_of", "fine", "problem", "skipped", "verdict_of", "warning"]


class Severity(Enum):
    """WARNING costs speed or may cost it; PROBLEM means wrong, failing or impossible."""

    FINE = "ok"
    SKIPPED = "not checked"
    WARNING = "warning"
    PROBLEM = "problem"


_EXIT_CODES = {Severity.FINE: 0, Severity.SKIPPED: 0, Severity.WARNING: 1, Severity.PROBLEM: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """check: its name, always the same; remedy: a command, or what to do where no command does it."""

    check: str
    severity: Severity
    evidence: str
    cause: str | None = None
    remedy: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return {
            "check": self.check,
            "severity": self.severity.value,
            "evidence": self.evidence,
            "cause": self.cause,
            "remedy": self.remedy,
        }


def fine(check: str, evidence: str) -> Finding:
    """Looked at, and as it should be."""
    return Finding(check, Severity.FINE, evidence)


def skipped(check: str, reason: str) -> Finding:
    """Could not look."""
    return Finding(check, Severity.SKIPPED, reason)


def warning(check: str, evidence: str, cause: str, remedy: str) -> Finding:
    """Slower than need be, or soon in trouble."""
    return Finding(check, Severity.WARNING, evidence, cause, remedy)


def problem(check: str, evidence: str, cause: str, remedy: str) -> Finding:
    """Wrong, failing or impossible."""
    return Finding(check, Severity.PROBLEM, evidence, cause, remedy)


def exit_code_of(findings: Sequence[Finding]) -> int:
    """0: nothing is wrong; 1: warnings; 2: problems."""
    return max((_EXIT_CODES[finding.severity] for finding in findings), default=0)


def verdict_of(findings: Sequence[Finding]) -> str:
    """One line over all of them."""
    counts = Counter(finding.severity for finding in findings)
    skipped_checks = counts[Severity.SKIPPED]
    looked = f"{len(findings) - skipped_checks} checks" + (f", {skipped_checks} not checked" if skipped_checks else "")
    problems, warnings = counts[Severity.PROBLEM], counts[Severity.WARNING]
    if not problems and not warnings:
        return f"nothing wrong was found ({looked})"
    found = [
        f"{count} {name}{'s' * (count > 1)}" for count, name in ((problems, "problem"), (warnings, "warning")) if count
    ]
    return f"{' and '.join(found)} ({looked})"
