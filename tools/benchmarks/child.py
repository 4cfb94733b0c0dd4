"""A process that owns a whole model with one thread and times jobs that it reads from stdin.

Owns: the other end of `processes.child`: "ready", then a line of seconds for each line of a job.
Refuses to know: what the seconds are for. Invariant: it ends when stdin does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ds4py.config import CoordinatorConfig, EngineConfig, PrefillTuning, SocketConfig
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.session_pool import SessionPool
from ds4py.engine.open import open_runner
from tools.benchmarks.timers import TimedJob, timed_job


def main(model: str, n_ctx: str, chunk: str) -> None:
    """Serve jobs.

    Args:
        model: GGUF file.
        n_ctx: Tokens of the session.
        chunk: Tokens per chunk of a prompt; 0 takes the default.
    """
    runner = open_runner(EngineConfig(model=Path(model), n_ctx=int(n_ctx), n_slots=1, threads=1))
    config = CoordinatorConfig(prefill=PrefillTuning(chunk=int(chunk) or None))
    coordinator = Coordinator(runner.card, runner.n_ctx, config, SocketConfig(), local=runner)
    backend = SessionPool(coordinator, 1)
    _say("ready")
    for line in sys.stdin:
        _say(timed_job(backend, TimedJob.parse(line)))
    coordinator.close()


def _say(answer: object) -> None:
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
