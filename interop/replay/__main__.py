"""`python -m interop.replay SCENARIO|all`: replay recorded conversations against ds4py.

Owns: arguments, the table, the exit status. Refuses to know: how a replay works. Invariant: the
status is 0 exactly if every party of every scenario did what is expected of it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from interop.replay.allowed import Allowed, general
from interop.replay.performance import Report, replay
from interop.replay.recording import load, scenario_names

_ROW: Final = "{:<18} {:<12} {:>5} {:>9} {:>9} {:>12}  {}"
_HEAD: Final = _ROW.format(
    *("scenario", "live", "sent", "received", "compared", "differences"),
    "computed numbers: median (largest)",
)
_ELSEWHERE: Final = "errors: hand-made requests, replayed by tests/conformance/test_wire_live.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="interop.replay", description=__doc__)
    parser.add_argument("scenario", choices=["all", *scenario_names()], help="which recording")
    asked = parser.parse_args(argv).scenario
    logging.basicConfig(level=logging.CRITICAL)  # parties are refused and die here on purpose
    print(_HEAD)
    reports = []
    for report in _replays(scenario_names() if asked == "all" else [asked]):
        print(row(report), flush=True)
        for difference in report.differences:
            print(f"    {difference}")
        reports.append(report)
    for deviation in _deviations(reports):
        print(f"allowed: {deviation.what} (spec {deviation.spec})")
    print(_ELSEWHERE)
    return 0 if all(not report.differences for report in reports) else 1


def row(report: Report) -> str:
    """Return a report as one line of the table."""
    numbers = ", ".join(
        f"{what} {np.median(values):.4f} ({max(values):.4f})"
        for what, values in report.distances.items()
    )
    return _ROW.format(
        *(report.scenario, report.live, report.sent, report.received, report.compared),
        len(report.differences),
        numbers,
    ).rstrip()


def _replays(names: Iterable[str]) -> Iterable[Report]:
    for name in names:
        scenario = load(name)
        for party in scenario.parties:
            yield replay(scenario, party)


def _deviations(reports: Iterable[Report]) -> list[Allowed]:
    return [*general(), *(entry for report in reports for entry in report.allowed)]


if __name__ == "__main__":
    sys.exit(main())
