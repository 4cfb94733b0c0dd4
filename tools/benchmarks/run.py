"""All targets in one run: `./tools/bench`.

Owns: the sections, their order, the table and the JSON line. Refuses to know: how anything is
measured. Invariant: every bar of the chosen sections has one line, whatever went wrong; one
section's failure does not stop the others.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rich.table import Table

from ds4py.errors import ConfigError, Ds4Error
from tools.benchmarks import cpu, hop, pipeline, sessions, start, targets
from tools.benchmarks.sections import Bench
from tools.benchmarks.targets import Finding, Verdict, not_run

SECTIONS: Final[dict[str, Callable[[Bench], Iterator[Finding]]]] = {
    "cpu": cpu.measure,
    "pipeline": pipeline.measure,
    "hop": hop.measure,
    "sessions": sessions.measure,
    "start": start.measure,
}
_COLOURS: Final = {
    Verdict.PASS: "green",
    Verdict.SHORT: "red",
    Verdict.NOT_JUDGED: "yellow",
    Verdict.NOT_RUN: "dim",
    Verdict.FAILED: "red",
}


def chosen(names: Sequence[str]) -> list[str]:
    """Return the sections to run, in their own order; no name means all.

    Raises:
        ConfigError: There is no such section.
    """
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise ConfigError(f"section {unknown[0]!r}: expected one of {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in names or not names]


def run(bench: Bench, sections: Sequence[str]) -> list[Finding]:
    """Measure some sections and return a finding for each of their bars."""
    return [finding for name in sections for finding in _guarded(bench, name)]


def _guarded(bench: Bench, name: str) -> Iterator[Finding]:
    """Yield a section's findings, and what it did not come to because it failed."""
    done, why = set(), "left out"
    try:
        for finding in SECTIONS[name](bench):
            done.add(finding.target)
            yield finding
    except Ds4Error as e:
        why = str(e)
    for target in targets.ALL:
        if target.section == name and target not in done:
            yield not_run(target, why, failed=True)


def table(findings: Sequence[Finding]) -> Table:
    """Show every finding in a line."""
    shown = Table("bar", "measured", "wanted", "verdict", "figures")
    for f in findings:
        value = "" if f.value is None else f.target.write(f.value)
        verdict = f"[{_COLOURS[f.verdict]}]{f.verdict.value}[/]"
        detail = "; ".join(filter(None, (f.obstacle, f.detail)))
        shown.add_row(f.target.name, value, f.target.wanted, verdict, detail)
    return shown


def json_line(findings: Sequence[Finding], bench: Bench) -> str:
    """Return everything as one JSON object."""
    facts = {
        "machine": platform.processor() or platform.machine(),
        "cores": bench.cores,
        "rounds": bench.rounds,
        "chunk": bench.chunk,
    }
    return json.dumps({**facts, "findings": [finding.as_object() for finding in findings]})
