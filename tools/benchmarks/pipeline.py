"""Stages of one thread each against one process of one thread: the section `pipeline`.

Owns: which routes, which prompts, the shares of each stage's time. Refuses to know: processes, how
verdicts are shown. Invariant: the process beside a route takes the same chunks, so that a ratio
tells of the pipeline alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from ds4py.config import EngineConfig
from ds4py.engine.open import read_model
from ds4py.layer_range import LayerRange, balanced_cuts
from ds4py.tracing.events import COORDINATOR, Shares
from tools.benchmarks import targets
from tools.benchmarks.llama import NO_RPC, over_rpc
from tools.benchmarks.processes import (
    Rates,
    WorkerSettings,
    child,
    route,
    take_turns,
    told_rates,
    whole_model,
)
from tools.benchmarks.sections import SMOLLM2, Bench
from tools.benchmarks.targets import (
    Finding,
    Target,
    found,
    ideal_speedup,
    median_ratio,
    not_run,
)
from tools.benchmarks.timers import TimedJob

STAGES: Final = (2, 3)
PREFILLS: Final = (2048, 8192)
RPC_JOB: Final = TimedJob("prefill", 2048)
_N_CTX: Final = 8192
_WORKERS: Final = WorkerSettings(n_ctx=_N_CTX)
_ALONE: Final = "1 process"


def measure(bench: Bench) -> Iterator[Finding]:
    """Yield each route's part of the ideal, and two workers against llama.cpp's RPC."""
    why = bench.missing(SMOLLM2)
    if why:
        yield from (not_run(target, why) for target in (*targets.PIPELINE.values(), targets.RPC))
        return
    yield from _routes(bench)
    if bench.llama is None or not bench.llama.has_rpc:
        yield not_run(targets.RPC, NO_RPC)
    else:
        yield _beside_rpc(bench)


def _routes(bench: Bench) -> Iterator[Finding]:
    """Yield the parts of the ideal; all routes stand ready while one is measured."""
    model = bench.model(SMOLLM2)
    jobs = [TimedJob("prefill", n) for n in PREFILLS]
    with ExitStack() as stack:
        bench.step("starting routes")
        alone = whole_model(model, n_ctx=_N_CTX, chunk=bench.chunk)
        subjects = [stack.enter_context(child(_ALONE, alone))]
        routes = {
            n: stack.enter_context(route(model, even_cuts(bench, n), _WORKERS, chunk=bench.chunk))
            for n in STAGES
        }
        subjects += [under_test.subject(stage_name(n)) for n, under_test in routes.items()]
        rates = take_turns(subjects, jobs, bench.rounds, bench.step)
    for n, under_test in routes.items():
        for job in jobs:
            finding = part_of_ideal(bench, targets.PIPELINE[n, job.n], rates, n, job)
            yield replace(finding, detail=f"{finding.detail}; {told(under_test.shares[job])}")


def told(shares: Mapping[str, Shares]) -> str:
    """Return the shares of every worker as text."""
    parts = [
        f"{own.compute:.0%} compute {own.wire:.0%} wire {own.wait:.0%} wait {own.idle:.0%} idle"
        for stage, own in shares.items()
        if stage != COORDINATOR
    ]
    return "; ".join(f"stage {n}: {part}" for n, part in enumerate(parts))


def stage_name(n: int) -> str:
    """Return the name of a route of n workers in reports."""
    return f"{n} workers"


def part_of_ideal(
    bench: Bench, target: Target, rates: Rates, n_stages: int, job: TimedJob
) -> Finding:
    """Return how near to a full pipeline a route comes."""
    n_chunks = -(-job.n // bench.chunk)
    speedup = median_ratio(rates[stage_name(n_stages)][job], rates[_ALONE][job])
    ideal = ideal_speedup(n_stages, n_chunks, bench.cores)
    detail = f"{speedup:.2f}x of {ideal:.2f}x in {n_chunks} chunks; {told_rates(rates, job)}"
    return found(target, speedup / ideal, cores=bench.cores, detail=detail)


def _beside_rpc(bench: Bench) -> Finding:
    model = bench.model(SMOLLM2)
    assert bench.llama is not None
    with ExitStack() as stack:
        bench.step("starting RPC servers")
        ours = stack.enter_context(
            route(model, even_cuts(bench, 2), _WORKERS, chunk=bench.chunk)
        ).subject(stage_name(2))
        theirs = stack.enter_context(over_rpc(bench.llama, model, 2, n_ctx=_N_CTX))
        rates = take_turns((ours, theirs), (RPC_JOB,), bench.rounds, bench.step)
    ratio = median_ratio(rates[ours.name][RPC_JOB], rates[theirs.name][RPC_JOB])
    return found(targets.RPC, ratio, cores=bench.cores, detail=told_rates(rates, RPC_JOB))


def even_cuts(bench: Bench, n_stages: int) -> list[LayerRange]:
    """Return spans of equal numbers of layers: of a prompt, the head sees one row only."""
    card, _ = read_model(EngineConfig(model=bench.model(SMOLLM2)))
    return balanced_cuts([1] * card.n_layers, n_stages)
