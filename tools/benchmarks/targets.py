"""What counts as fast enough, and the verdict on a measured value.

Owns: every bar with its limit, verdicts, medians of paired runs, the ideal of a pipeline. Refuses
to know: how anything is measured or shown. Invariant: a bar is a ratio or an absolute cost of one
run on one machine, never a rate that only holds on somebody's computer; a value that the machine
could not show is not judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

Unit = Literal["x", "%", "s", "us", "chunks"]


class Verdict(StrEnum):
    """What a finding says of its bar."""

    PASS = "pass"
    SHORT = "falls short"
    NOT_JUDGED = "not judged"
    NOT_RUN = "not run"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing that must be fast enough.

    Args:
        section: Which measurement it belongs to.
        name: What is measured, and against what.
        limit: The bar, in `unit`; a share of 1 for "%".
        unit: Of limit and value.
        at_least: Whether more is better.
        cores: Fewest cores that can show it.
    """

    section: str
    name: str
    limit: float
    unit: Unit = "x"
    at_least: bool = True
    cores: int = 1

    def met_by(self, value: float) -> bool:
        """Whether a value is on the right side of the limit, or on it."""
        return value >= self.limit if self.at_least else value <= self.limit

    def write(self, value: float) -> str:
        """Return a value with the bar's unit."""
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        if self.unit == "us":
            return f"{value:.0f} us"
        return f"{value:.2f}x" if self.unit == "x" else f"{value:.2f} {self.unit}"

    @property
    def wanted(self) -> str:
        """The limit as people say it."""
        return f"{'at least' if self.at_least else 'at most'} {self.write(self.limit)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found for one bar.

    Args:
        target: Which.
        value: In the bar's unit; None if nothing was measured.
        detail: The figures behind the value, or why there is none.
        obstacle: Why the value cannot be judged; empty if it can.
        failed: Whether measuring it went wrong.
    """

    target: Target
    value: float | None
    detail: str = ""
    obstacle: str = ""
    failed: bool = False

    @property
    def verdict(self) -> Verdict:
        """Whether the bar is met."""
        if self.value is None:
            return Verdict.FAILED if self.failed else Verdict.NOT_RUN
        if self.obstacle:
            return Verdict.NOT_JUDGED
        return Verdict.PASS if self.target.met_by(self.value) else Verdict.SHORT

    def as_object(self) -> dict[str, object]:
        """Return what a JSON line tells."""
        return {
            "section": self.target.section,
            "bar": self.target.name,
            "value": None if self.value is None else round(self.value, 4),
            "limit": self.target.limit,
            "unit": self.target.unit,
            "at_least": self.target.at_least,
            "verdict": self.verdict.value,
            "detail": "; ".join(filter(None, (self.detail, self.obstacle))),
        }


def found(target: Target, value: float, *, cores: int, detail: str = "") -> Finding:
    """Return a measured value, judged if there were cores enough."""
    obstacle = "" if cores >= target.cores else f"needs {target.cores} cores, has {cores}"
    return Finding(target=target, value=value, detail=detail, obstacle=obstacle)


def not_run(target: Target, why: str, *, failed: bool = False) -> Finding:
    """Return a bar that nothing was measured for."""
    return Finding(target=target, value=None, detail=why, failed=failed)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio inside each round.

    A slow minute of the machine hits both of a round, so it leaves their ratio alone.
    """
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def ideal_speedup(n_stages: int, n_chunks: int, cores: int) -> float:
    """Return how many times as fast as one process equal one-thread stages can be.

    A full pipeline takes `C + S - 1` steps for `S * C` units of work; no more than the machine's
    cores work at once.
    """
    return min(n_stages * n_chunks / (n_chunks + n_stages - 1), float(cores))


def _less(section: str, name: str, limit: float, unit: Unit) -> Target:
    return Target(section=section, name=name, limit=limit, unit=unit, at_least=False)


def _more(section: str, name: str, limit: float, unit: Unit = "x", cores: int = 1) -> Target:
    return Target(section=section, name=name, limit=limit, unit=unit, cores=cores)


PREFILL: Final = {
    "SmolLM2 Q4_1": _more("cpu", "SmolLM2 Q4_1: prefill 512 / llama.cpp", 3.0),
    "1B Q4_K": _more("cpu", "1B Q4_K: prefill 512 / llama.cpp", 3.0),
    "1B Q8_0": _more("cpu", "1B Q8_0: prefill 512 / llama.cpp", 3.0),
}
DECODE: Final = {
    "SmolLM2 Q4_1": _more("cpu", "SmolLM2 Q4_1: decode / llama.cpp", 0.9),
    "1B Q4_K": _more("cpu", "1B Q4_K: decode / llama.cpp", 1.0),
    "1B Q8_0": _more("cpu", "1B Q8_0: decode / llama.cpp", 1.0),
}
PIPELINE: Final = {
    (stages, n): _more(
        "pipeline", f"{stages} stages: prefill {n}, part of the ideal", 0.95, "%", cores=stages
    )
    for stages in (2, 3)
    for n in (2048, 8192)
}
RPC: Final = _more("pipeline", "2 workers: prefill 2048 / llama.cpp over 2 RPC servers", 5.0)
HOP: Final = _less("hop", "one more hop for a token of 64 KiB", 150.0, "us")
RECEIVE: Final = _more("hop", "frames of 256 MiB / a bare recv_into loop", 0.9)
BATCHED: Final = _more("sessions", "8 sessions on 2 workers: decode / one session", 4.0, cores=2)
UNBATCHED: Final = _more("sessions", "the same, batching switched off", 1.9, cores=2)
PAUSE: Final = _less("sessions", "worst pause of a decode beside a prompt of 4096", 1.0, "chunks")
HELP: Final = _less("start", "--help of the slowest program", 0.2, "s")
OPEN: Final = _less("start", "opening a file of 262k tokens", 1.0, "s")
READY: Final = _less("start", "worker's loading / reading its slice once", 2.0, "x")
MEMORY: Final = _less("start", "worker's memory / (weights + KV + constant)", 1.15, "x")

ALL: Final = (
    *(bar for pair in zip(PREFILL.values(), DECODE.values(), strict=True) for bar in pair),
    *PIPELINE.values(),
    RPC,
    HOP,
    RECEIVE,
    BATCHED,
    UNBATCHED,
    PAUSE,
    HELP,
    OPEN,
    READY,
    MEMORY,
)
"""Every bar, in the order of the report."""
