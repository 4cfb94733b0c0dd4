"""Speed of one process on SmolLM2: prefill and decode, tokens per second.

    .venv/bin/python -m pytest -m bench -s tests/bench/test_bench_engine.py

Prints a table and one JSON line. One thread: figures per core, comparable between machines.
"""

import json
import platform
import sys
import time

import pytest
import torch

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from tests.support.models import smollm2_path

SESSION = SessionId(1)
REPEATS = 3
DECODE_STEPS = 32
CHUNK = 512


def run(runner: LocalRunner, n_tokens: int, pos0: int) -> float:
    """Evaluate a span and return the seconds it took."""
    work = ForwardRequest(
        session=SESSION,
        tokens=tuple(1000 + i for i in range(n_tokens)),
        pos0=pos0,
        hidden=None,
        reset=pos0 == 0,
        output_kind=OutputKind.LOGITS,
    )
    started = time.perf_counter()
    (answer,) = runner.run([work])
    assert isinstance(answer, ForwardOutput), answer
    return time.perf_counter() - started


def prefill(runner: LocalRunner, n_tokens: int) -> float:
    """Tokens per second of a prompt in chunks of 512."""
    return n_tokens / sum(run(runner, CHUNK, start) for start in range(0, n_tokens, CHUNK))


def decode(runner: LocalRunner, n_ctx: int) -> float:
    """Tokens per second of single tokens after `n_ctx` cached ones."""
    for start in range(0, n_ctx, CHUNK):
        run(runner, min(CHUNK, n_ctx - start), start)
    seconds = sum(run(runner, 1, n_ctx + step) for step in range(DECODE_STEPS))
    return DECODE_STEPS / seconds


@pytest.mark.bench
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_engine_speed(precision, capsys):
    torch.set_num_threads(1)
    config = EngineConfig(
        model=smollm2_path(), device="cpu", precision=precision, threads=1, n_slots=1
    )
    runner = open_runner(config)
    run(runner, CHUNK, 0)
    run(runner, 1, CHUNK)
    measures = {
        "prefill_512": lambda: prefill(runner, 512),
        "prefill_2048": lambda: prefill(runner, 2048),
        "decode_128": lambda: decode(runner, 128),
        "decode_1024": lambda: decode(runner, 1024),
    }
    best = {name: max(measure() for _ in range(REPEATS)) for name, measure in measures.items()}
    figures = {name: round(speed, 1) for name, speed in best.items()}
    lines = [
        f"\n{precision}, one thread, best of {REPEATS}:",
        *[f"  {name:14}{speed:10.1f} t/s" for name, speed in figures.items()],
        json.dumps({"precision": precision, "machine": platform.platform(), **figures}),
    ]
    with capsys.disabled():
        sys.stdout.write("\n".join(lines) + "\n")
