"""Findings for people: a table a section, cause and remedy below what is wrong, a verdict at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moespeq.cli.console import out, print_table
from moespeq.doctor import Finding, Severity

__all__ = ["print_report"]

_STYLES = {Severity.FINE: "green", Severity.SKIPPED: "dim", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}


def print_report(sections: Mapping[str, Sequence[Finding]], verdict: str) -> None:
    """All sections, then the verdict."""
    for name, findings in sections.items():
        out.print(name, style="bold")
        print_table(_table(findings))
        out.print()
    out.print(f"verdict: {verdict}", style="bold")


def _table(findings: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        status = Text(finding.severity.value, style=_STYLES[finding.severity])
        lines = [Text(finding.evidence)]
        lines += [Text(f"cause: {finding.cause}")] if finding.cause else []
        lines += [Text(f"mend:  {finding.remedy}")] if finding.remedy else []
        table.add_row(f"  {finding.check}", status, Group(*lines))
    return table
