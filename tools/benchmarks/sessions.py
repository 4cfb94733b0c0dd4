"""Many sessions over one route: the section `sessions`.

Owns: aggregate decode rates, and the pauses that a long prompt makes. Refuses to know: how sessions
share stages, how verdicts are shown. Invariant: one session and several are timed on the same
workers, in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from ds4py.contracts import Backend, Session
from tools.benchmarks import targets
from tools.benchmarks.pipeline import even_cuts
from tools.benchmarks.processes import WorkerSettings, route
from tools.benchmarks.sections import SMOLLM2, Bench
from tools.benchmarks.targets import Finding, Target, found, median_ratio, not_run
from tools.benchmarks.timers import DECODE_CONTEXT, random_tokens

N_SESSIONS: Final = 8
N_PROMPT: Final = 4096
_N_TOKENS: Final = 48
_N_ALONE: Final = 32
_N_CTX: Final = 8192


def measure(bench: Bench) -> Iterator[Finding]:
    """Yield the rates with and without batching, and the worst pause."""
    if why := bench.missing(SMOLLM2):
        yield from (
            not_run(target, why) for target in (targets.BATCHED, targets.UNBATCHED, targets.PAUSE)
        )
        return
    for target, batching in ((targets.BATCHED, True), (targets.UNBATCHED, False)):
        settings = WorkerSettings(n_ctx=_N_CTX, n_sessions=N_SESSIONS, batching=batching)
        bench.step(f"{N_SESSIONS} sessions, batching {'on' if batching else 'off'}: starting")
        model, ranges = bench.model(SMOLLM2), even_cuts(bench, 2)
        with route(model, ranges, settings, chunk=bench.chunk) as under_test:
            yield _rates(bench, under_test.backend, target)
            if batching:
                yield _pause(bench, under_test.backend)


# --- rates ----------------------------------------------------------------------------------------


def _rates(bench: Bench, backend: Backend, target: Target) -> Finding:
    decode_rate(backend, N_SESSIONS, 4)  # first-use costs
    one, many = [], []
    for turn in range(bench.rounds):
        bench.step(f"{target.name}: round {turn + 1}")
        one.append(decode_rate(backend, 1, _N_TOKENS))
        many.append(decode_rate(backend, N_SESSIONS, _N_TOKENS))
    alone, together = statistics.median(one), statistics.median(many)
    detail = f"one session {alone:.3g} t/s, {N_SESSIONS} together {together:.3g} t/s"
    return found(target, median_ratio(many, one), cores=bench.cores, detail=detail)


def decode_rate(backend: Backend, n_sessions: int, n_tokens: int) -> float:
    """Return tokens per second of all sessions together, each decoding by itself."""
    n_vocab = backend.card.n_vocab
    with ExitStack() as stack, ThreadPoolExecutor(n_sessions) as threads:
        sessions = [stack.enter_context(backend.lease(())) for _ in range(n_sessions)]
        for session in sessions:
            session.rewind(0)
            session.sync(random_tokens(DECODE_CONTEXT, n_vocab))
        replies = [random_tokens(n_tokens, n_vocab) for _ in sessions]
        start = time.perf_counter()
        list(threads.map(_decode, sessions, replies))
        return n_sessions * n_tokens / (time.perf_counter() - start)


def _decode(session: Session, tokens: Sequence[int]) -> None:
    for token in tokens:
        session.eval(token)


# --- pauses ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """Seconds between two tokens of one session.

    Args:
        alone: Median, with nobody else there.
        worst: Longest while another session's prompt came in.
        chunk: What all stages together need for the last chunk of that prompt, the dearest.
        n_tokens: Tokens that came meanwhile.
    """

    alone: float
    worst: float
    chunk: float
    n_tokens: int

    @property
    def chunks(self) -> float:
        """The worst pause beyond the usual one, in chunks."""
        return (self.worst - self.alone) / self.chunk


def _pause(bench: Bench, backend: Backend) -> Finding:
    bench.step(f"decoding beside a prompt of {N_PROMPT} tokens")
    pauses = pauses_beside_prompt(backend, N_PROMPT, bench.chunk)
    detail = (
        f"worst pause {1e3 * pauses.worst:.0f} ms, alone {1e3 * pauses.alone:.1f} ms, the last "
        f"chunk of {bench.chunk} tokens {1e3 * pauses.chunk:.0f} ms on all stages; "
        f"{pauses.n_tokens} tokens meanwhile"
    )
    return found(targets.PAUSE, pauses.chunks, cores=bench.cores, detail=detail)


def pauses_beside_prompt(backend: Backend, n_prompt: int, chunk: int) -> Pauses:
    """Decode in one session while the prompt of another one comes in."""
    n_vocab = backend.card.n_vocab
    prompt = random_tokens(n_prompt, n_vocab)
    with (
        backend.lease(()) as talking,
        backend.lease(()) as reading,
        ThreadPoolExecutor(1) as thread,
    ):
        for session in (talking, reading):
            session.rewind(0)
        talking.sync(random_tokens(DECODE_CONTEXT, n_vocab))
        alone = [_timed_token(talking, n_vocab) for _ in range(_N_ALONE)]
        coming = thread.submit(reading.sync, prompt)
        amid = [_timed_token(talking, n_vocab)]
        while not coming.done() and len(talking.tokens) < talking.n_ctx:
            amid.append(_timed_token(talking, n_vocab))
        coming.result()
        reading.rewind(n_prompt - chunk)
        before = _prefill_usec(backend)
        reading.sync(prompt)
        last_chunk = (_prefill_usec(backend) - before) / 1e6
    return Pauses(
        alone=statistics.median(alone), worst=max(amid), chunk=last_chunk, n_tokens=len(amid)
    )


def _timed_token(session: Session, n_vocab: int) -> float:
    (token,) = random_tokens(1, n_vocab)
    start = time.perf_counter()
    session.eval(token)
    return time.perf_counter() - start


def _prefill_usec(backend: Backend) -> int:
    return sum(stage.prefill_usec for stage in backend.health().stages)
