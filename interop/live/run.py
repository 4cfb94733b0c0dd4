"""From the rows of the table to their verdicts.

Owns: what happens in each case, what is expected, and that a route which fails costs only its own
rows. Refuses to know: how processes are started, how results are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from ds4py.config import EngineConfig
from interop.live.cluster import Cluster, LiveError, Setting
from interop.live.commands import COORDINATOR, WORKER
from interop.live.judge import MARGIN, Verdict, drift, judge
from interop.live.matrix import CHUNKED, RESTART, SHORT, Route, alone, chosen, cuts
from interop.live.trace import BRIEF, LATER, LONG, QUESTIONS, Trace, traces

NOT_RUN: Final = Verdict(None, "not run: no ds4 binary given")
_QUESTION: Final = {SHORT: BRIEF, CHUNKED: LONG, RESTART: LATER}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    route: Route
    case: str
    verdict: Verdict


class Oracle:
    """What should be answered; asked while no route runs, for it takes as much memory.

    Args:
        setting: What all routes share.
    """

    def __init__(self, setting: Setting):
        self._setting = setting
        self.alone = cache(self._ask_alone)
        self._traces = cache(self._trace)

    def _ask_alone(self, kind: str) -> Mapping[str, str]:
        """Return the answers of one process of a kind, by question."""
        with Cluster(alone(kind), self._setting) as whole:
            return {name: whole.ask(asked).text for name, asked in QUESTIONS.items()}

    def traces(self, route: Route) -> Mapping[str, Trace]:
        """Return the traces of ds4py with a route's cuts and width, by question."""
        return self._traces(0 if route.is_exact else route.n_hops, route.bits)

    def _trace(self, n_hops: int, bits: int) -> Mapping[str, Trace]:
        setting = self._setting
        engine = EngineConfig(
            model=setting.model,
            device="cpu",
            precision="f32",
            act_quant="cpu",
            n_ctx=setting.n_ctx,
            n_slots=1,
            threads=1,
        )
        parts = cuts(setting.n_layers, n_hops)
        return traces(engine, parts, bits, chunk=setting.chunk, n_tokens=setting.n_tokens)


def rows(setting: Setting, patterns: Sequence[str]) -> Iterator[Row]:
    """Run the rows whose names match a pattern, one after the other.

    Args:
        setting: What all routes share; it has commands for the kinds that can be run.
        patterns: Of row names.

    Raises:
        LiveError: A model in one process does not answer, so that nothing can be compared.
        Ds4Error: The model cannot be opened.
    """
    oracle = Oracle(setting)
    for route, cases in chosen(patterns):
        needed = {(route.coordinator, COORDINATOR), (route.workers, WORKER)}
        if needed <= setting.commands.keys():
            yield from _run(route, cases, setting, oracle)
        else:
            yield from (Row(route, case, NOT_RUN) for case in cases)


def _run(route: Route, cases: Sequence[str], setting: Setting, oracle: Oracle) -> Iterator[Row]:
    says_alone, traced = oracle.alone(route.coordinator), oracle.traces(route)
    n_done = 0
    try:
        with Cluster(route, setting) as cluster:
            cluster.ask(QUESTIONS[BRIEF], n_tokens=1)  # the route is complete: now failures count
            for case in cases:
                question = _QUESTION[case]
                verdict = _perform(case, cluster, route, says_alone[question], traced[question])
                yield Row(route, case, verdict)
                n_done += 1
    except LiveError as error:
        failed = Verdict(False, f"FAILED: {error}")
        yield from (Row(route, case, failed) for case in cases[n_done:])


def _perform(case: str, cluster: Cluster, route: Route, says_alone: str, trace: Trace) -> Verdict:
    if case == RESTART:
        cluster.ask(QUESTIONS[LONG], n_tokens=1)  # what the coordinator then takes as cached
        cluster.restart_last_worker()
    answer = cluster.ask(QUESTIONS[_QUESTION[case]])
    expected = says_alone if route.is_exact else trace.text
    verdict = judge(answer.text, expected, trace, None if route.is_ours else MARGIN)
    words = [verdict.words]
    if not route.is_exact:
        words.append(drift(answer.text, says_alone, trace))
    if answer.n_failed:
        words.append(f"{answer.n_failed} requests failed before")
    return replace(verdict, words="; ".join(words))
