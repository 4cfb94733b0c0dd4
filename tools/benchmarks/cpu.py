"""One thread beside llama.cpp's one thread: the section `cpu`.

Owns: which models, which jobs. Refuses to know: processes, how verdicts are shown. Invariant: both
run on the same core, one at a time, in turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Final

from tools.benchmarks import targets
from tools.benchmarks.llama import NO_LLAMA, llama_bench, one_process
from tools.benchmarks.processes import TimedProcess, child, take_turns, told_rates, whole_model
from tools.benchmarks.sections import LLAMA_1B_Q4_K, LLAMA_1B_Q8_0, SMOLLM2, Bench
from tools.benchmarks.targets import Finding, found, median_ratio, not_run
from tools.benchmarks.timers import TimedJob

MODELS: Final = {
    "SmolLM2 Q4_1": SMOLLM2,
    "1B Q4_K": LLAMA_1B_Q4_K,
    "1B Q8_0": LLAMA_1B_Q8_0,
}
PREFILL: Final = TimedJob("prefill", 512)
DECODE: Final = TimedJob("decode", 64)
_N_CTX: Final = 1024


def measure(bench: Bench) -> Iterator[Finding]:
    """Yield prefill and decode of every model against llama.cpp."""
    for name, file in MODELS.items():
        why = bench.missing(file)
        if bench.llama is None and bench.llama_bench is None:
            why = NO_LLAMA
        if why:
            yield not_run(targets.PREFILL[name], why)
            yield not_run(targets.DECODE[name], why)
        else:
            yield from _compare(bench, name, file)


def _compare(bench: Bench, name: str, file: str) -> Iterator[Finding]:
    model = bench.model(file)
    with ExitStack() as stack:
        bench.step(f"{name}: loading")
        ours = stack.enter_context(child("ds4py", whole_model(model, n_ctx=_N_CTX)))
        theirs = stack.enter_context(_baseline(bench, file))
        rates = take_turns((ours, theirs), (PREFILL, DECODE), bench.rounds, bench.step)
    for target, job in ((targets.PREFILL[name], PREFILL), (targets.DECODE[name], DECODE)):
        ratio = median_ratio(rates[ours.name][job], rates[theirs.name][job])
        yield found(target, ratio, cores=bench.cores, detail=told_rates(rates, job))


def _baseline(bench: Bench, file: str) -> AbstractContextManager[TimedProcess]:
    if bench.llama_bench is not None:
        return nullcontext(llama_bench(bench.llama_bench, bench.model(file)))
    assert bench.llama is not None
    return one_process(bench.llama, bench.model(file), n_ctx=_N_CTX)
