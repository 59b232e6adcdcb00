"""What `moespeq doctor` finds: facts of the machine, of a test generation, and of a server or run, and what they mean.

Probes measure and hold no opinion; checks are pure functions from what was measured to findings.
"""

from moespeq.doctor.findings import Finding, Severity, exit_code_of, verdict_of

__all__ = ["Finding", "Severity", "exit_code_of", "verdict_of"]
