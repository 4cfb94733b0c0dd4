"""Whole slices on a GPU: beside the CPU, with batches started ahead, and against the roofline.

Owns: which models, what is run with them. Refuses to know: how anything is computed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.engine.loader import read_shape
from ds4py.errors import Ds4Error
from ds4py.gguf.file import GgufFile
from tools import run_make_toy_gguf
from tools.gpu_measure import Bench
from tools.run_bench_deepseek import kv_read, touched

SMALL_LLAMA = {"n_layers": 3, "n_embd": 256, "n_vocab": 400, "n_head": 4, "n_head_kv": 2}
_SMALL = SMALL_LLAMA | {"d_head": 96, "n_ff": 512, "n_ctx": 512}
SMALL_FAMILIES = {
    "qwen3-1b": _SMALL,
    "qwen3moe-1b": _SMALL | {"n_expert": 8, "n_used": 2, "n_ff_expert": 128},
    "gemma3-1b": _SMALL | {"window": 20, "period": 2},
}
SMALL_DEEPSEEK = {"n_layers": 4, "n_expert": 4}


@dataclass
class Subject:
    """A runner and how it is fed.

    Args:
        runner: Of a slice that starts at layer 0.
        want: What its spans ask for.
    """

    runner: LocalRunner
    want: OutputKind

    def works(
        self, sessions: Sequence[int], tokens: Sequence[int], pos0: int
    ) -> list[ForwardRequest]:
        """Return the same span of every session."""
        return [
            ForwardRequest(
                session=SessionId(session),
                tokens=tuple(tokens),
                pos0=pos0,
                hidden=None,
                reset=pos0 == 0,
                output_kind=self.want,
                reply_bits=16,
            )
            for session in sessions
        ]

    def run(self, sessions: Sequence[int], tokens: Sequence[int], pos0: int) -> list[ForwardOutput]:
        """Evaluate the same span of every session as one batch."""
        return [good(one) for one in self.runner.run(self.works(sessions, tokens, pos0))]


def good(answer: ForwardOutput | Ds4Error) -> ForwardOutput:
    if not isinstance(answer, ForwardOutput):
        raise answer
    return answer


def make(path: Path, preset: str, changes: dict[str, Any], mix: str | None = None) -> Path:
    """Write a toy model."""
    run_make_toy_gguf.write(path, run_make_toy_gguf.plan(preset, mix, 0, changes))
    return path


# --- beside the CPU


def beside_cpu(bench: Bench, model: Path, n_prompt: int, n_decode: int, limit: float) -> None:
    """Compare logits and greedy tokens of both precisions with the CPU's float32 ones.

    Args:
        bench: For the report.
        model: Any file.
        n_prompt: Tokens of the prompt.
        n_decode: Tokens after it.
        limit: Largest error of a float32 logit, relative to the range of the logits. In bfloat16
            there is none: a chosen expert may change.
    """
    with GgufFile.open(model) as file:
        n_vocab = read_shape(file).n_vocab
    prompt = random.Random(1).choices(range(n_vocab // 2), k=n_prompt)
    device = str(bench.device)
    base: dict[str, Any] = {}
    for where, precision in (("cpu", "f32"), (device, "f32"), (device, "bf16")):
        config = EngineConfig(
            model=model,
            device=where,
            precision=precision,  # type: ignore[arg-type]
            n_ctx=n_prompt + n_decode + 1,
            threads=bench.threads,
            act_quant="none",
        )
        found = greedy(config, prompt, n_decode)
        base = base or found
        error = np.abs(found["logits"] - base["logits"]).max() / np.ptp(base["logits"])
        equal = int(np.cumprod(np.equal(found["tokens"], base["tokens"])).sum())
        figures = {
            "error": float(error),
            "greedy": equal,
            "prefill t/s": found["prefill"],
            "decode t/s": found["decode"],
        }
        name = f"{model.name} {where} {precision}"
        bench.add("model", name, figures, ok=bool(error < limit) if precision == "f32" else None)


def greedy(config: EngineConfig, prompt: list[int], n_decode: int) -> dict[str, Any]:
    subject = Subject(open_runner(config), OutputKind.LOGITS)
    subject.run([1], prompt, 0)  # first-use costs
    start = time.perf_counter()
    logits = subject.run([1], prompt, 0)[0].logits
    prefill = time.perf_counter() - start
    assert logits is not None
    tokens = [int(np.argmax(logits))]
    for place in range(n_decode):
        if place == 1:  # the first one pays for what decode uses first
            start = time.perf_counter()
        (output,) = subject.run([1], tokens[-1:], len(prompt) + place)
        tokens.append(int(np.argmax(output.logits)))
    decode = time.perf_counter() - start
    subject.runner.close()
    return {
        "logits": logits,
        "tokens": tokens,
        "prefill": len(prompt) / prefill,
        "decode": (n_decode - 1) / decode,
    }


# --- a slice of Flash


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurement of a slice.

    Args:
        chunk: Tokens of a chunk.
        n_chunks: Chunks of a prompt.
        n_steps: Steps of decode.
        n_sessions: Sessions that decode together.
    """

    chunk: int
    n_chunks: int
    n_steps: int
    n_sessions: int

    @property
    def n_prompt(self) -> int:
        """Tokens before the decode steps."""
        return self.chunk * self.n_chunks


def slice_rates(bench: Bench, model: Path, plan: Plan) -> None:
    """Measure prefill and decode of a slice against what its bytes and operations allow."""
    config = EngineConfig(
        model=model,
        device=str(bench.device),
        precision="bf16",
        n_ctx=plan.n_prompt + plan.n_steps + 2,
        n_slots=plan.n_sessions,
        threads=bench.threads,
    )
    start = time.perf_counter()
    subject = Subject(open_runner(config), OutputKind.HIDDEN)
    loaded = {"s": time.perf_counter() - start, "GB": subject.runner.weight_bytes / 1e9}
    bench.add("slice", "load", loaded)
    needs = token_needs(model, plan.n_prompt)
    prefill_rows(bench, subject, plan, needs["operations"])
    decode_rows(bench, subject, plan, needs["bytes"])
    subject.runner.close()


def token_needs(model: Path, n_behind: int) -> dict[str, float]:
    """Return bytes and operations of one token in the layers of a file."""
    with GgufFile.open(model) as file:
        shape = read_shape(file)
        infos = {name: file.tensors[name] for name in file.tensors if name.startswith("blk.")}
    layers = touched({name: info.n_bytes for name, info in infos.items()}, shape)  # type: ignore[arg-type]
    values = 0.0
    for name, info in infos.items():
        count = float(np.prod(info.shape)) * (len(info.shape) > 1 and "tid2eid" not in name)
        values += count * shape.n_used / shape.n_expert if "_exps." in name else count  # type: ignore[attr-defined]
    rows = sum(kv_read(shape, ratio, n_behind) for ratio in shape.ratios)  # type: ignore[arg-type, attr-defined]
    return {"bytes": sum(layers.values()) + rows, "operations": 2 * values}


def prefill_rows(bench: Bench, subject: Subject, plan: Plan, operations: float) -> None:
    """One chunk after the other, and each started before the one before it is complete."""
    tokens = [number % 97 + 3 for number in range(plan.chunk)]
    chunks = [number * plan.chunk for number in range(plan.n_chunks)]

    def single() -> None:
        for pos0 in chunks:
            subject.run([1], tokens, pos0)

    def ahead() -> None:
        before = None
        for pos0 in chunks:
            begun = subject.runner.forward_async(subject.works([1], tokens, pos0))
            if before is not None:
                good(before.complete()[0])
            before = begun
        if before is not None:
            good(before.complete()[0])

    for label, run in (("single", single), ("started ahead", ahead)):
        seconds = best(bench, run)
        figures = {"t/s": plan.n_prompt / seconds, "ms": 1e3 * seconds}
        share = operations * plan.n_prompt / seconds / bench.matmul if bench.matmul else None
        bench.add("slice", f"prefill {plan.n_chunks} x {plan.chunk}, {label}", figures, of=share)


def decode_rows(bench: Bench, subject: Subject, plan: Plan, n_bytes: float) -> None:
    """Steps of one session, and of several together, whose experts differ: no share then."""
    for n_sessions in (1, plan.n_sessions):
        sessions = range(1, n_sessions + 1)
        tokens = [number % 97 + 3 for number in range(plan.chunk)]
        for session in sessions:
            for pos0 in range(0, plan.n_prompt, plan.chunk):
                subject.run([session], tokens, pos0)
        subject.run(sessions, [5], plan.n_prompt)  # first-use costs
        bench.finish()
        start = time.perf_counter()
        for step in range(1, plan.n_steps + 1):
            subject.run(sessions, [5 + step % 7], plan.n_prompt + step)
        step_seconds = (time.perf_counter() - start) / plan.n_steps
        figures = {"t/s": n_sessions / step_seconds, "ms": 1e3 * step_seconds}
        share = n_bytes / step_seconds / bench.copy if bench.copy and n_sessions == 1 else None
        bench.add(
            "slice", f"decode behind {plan.n_prompt}, {n_sessions} sessions", figures, of=share
        )


def best(bench: Bench, run: Callable[[], None]) -> float:
    """Return the better time of two runs after one that does not count."""
    run()
    seconds = []
    for _ in range(1 if bench.tiny else 2):
        bench.finish()
        start = time.perf_counter()
        run()
        bench.finish()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
