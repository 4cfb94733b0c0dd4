"""Time a DeepSeek V4 on one CPU thread, and say what memory alone would allow.

Three parts. Prefill: one chunk of 256 tokens, and the same tokens one by one through the same
runner (the head only for the last, both times). Decode: one session and four in a batch, with the
time that each part of the layers takes. Floor: bytes of weights and cache that a token of the real
DeepSeek V4 Flash touches, from its sizes and tensor types alone, over the bandwidth of a big copy
on this machine and over given ones.

Figures are medians over the rounds. The parts are timed by wrappers around their methods, which
take about a microsecond a call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine.loader import read_shape
from ds4py.engine.open import open_runner
from ds4py.engine.runner import LocalRunner
from ds4py.gguf.file import GgufFile
from ds4py.layer_range import whole_model
from ds4py.models.deepseek4.attention import Attention
from ds4py.models.deepseek4.cache import CacheLayout
from ds4py.models.deepseek4.hyper import HyperConnection, StreamMix
from ds4py.models.deepseek4.moe import FeedForward, RoutedExperts, Router
from ds4py.models.deepseek4.shape import KNOWN, OVERLAPPED, Shape
from ds4py.models.deepseek4.slice import Slice
from tools import toy_deepseek4

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "toy-deepseek4-bench300.gguf"
PREFILL = 256

BATCHES = (1, 4)
COPY_BYTES = 256 << 20
HALF = 2
"""Bytes of a cached value."""

PARTS = {
    "attention": ((Attention, "__call__"),),
    "experts": ((FeedForward, "__call__"),),
    "  router": ((Router, "__call__"),),
    "  routed": ((RoutedExperts, "__call__"),),
    "hyper-connections": ((HyperConnection, "split"), (StreamMix, "merge")),
    "head": ((Slice, "logits"),),
}
"""What is timed; parts that are indented lie inside the one before them."""

Split = dict[str, float]
"""Milliseconds by part."""


# --- measuring ------------------------------------------------------------------------------------


class Bench:
    """A model whose spans are timed."""

    def __init__(self, runner: LocalRunner, advance: Callable[[int], None]):
        self._runner = runner
        self._advance = advance
        rng = random.Random(1)
        n_vocab = runner.card.n_vocab
        n_tokens = runner.n_ctx
        self._tokens = {
            session: [rng.randrange(10, n_vocab) for _ in range(n_tokens)]
            for session in range(1, max(BATCHES) + 1)
        }

    def span(self, sessions: range, pos0: int, n_tokens: int, *, want: OutputKind) -> float:
        """Return the milliseconds that one batch takes."""
        batch = [
            ForwardRequest(
                session=SessionId(session),
                tokens=tuple(self._tokens[session][pos0 : pos0 + n_tokens]),
                pos0=pos0,
                hidden=None,
                reset=pos0 == 0,
                output_kind=want,
            )
            for session in sessions
        ]
        start = time.perf_counter()
        answers = self._runner.run(batch)
        elapsed = time.perf_counter() - start
        for answer in answers:
            if not isinstance(answer, ForwardOutput):
                raise answer
        self._advance(n_tokens * len(batch))
        return 1e3 * elapsed

    def prefill(self) -> float:
        """Return the milliseconds of one chunk."""
        return self.span(range(1, 2), 0, PREFILL, want=OutputKind.LOGITS)

    def one_by_one(self) -> float:
        """Return the milliseconds of the same tokens in spans of one."""
        return sum(
            self.span(
                range(1, 2),
                at,
                1,
                want=OutputKind.LOGITS if at == PREFILL - 1 else OutputKind.NOTHING,
            )
            for at in range(PREFILL)
        )

    def decode(self, n_sessions: int, n_steps: int) -> tuple[float, Split]:
        """Return milliseconds of a step behind a prompt: the median, and the mean by part."""
        sessions = range(1, n_sessions + 1)
        for session in sessions:
            self.span(range(session, session + 1), 0, PREFILL, want=OutputKind.NOTHING)
        with stopwatch() as spent:
            steps = [
                self.span(sessions, PREFILL + i, 1, want=OutputKind.LOGITS) for i in range(n_steps)
            ]
        return statistics.median(steps), split(spent, sum(steps), n_steps)


@contextmanager
def stopwatch() -> Iterator[Counter[str]]:
    """Time all methods of `PARTS`, in seconds, while the block runs."""
    spent: Counter[str] = Counter()
    originals = [
        (owner, name, getattr(owner, name), part)
        for part, methods in PARTS.items()
        for owner, name in methods
    ]
    try:
        for owner, name, method, part in originals:
            setattr(owner, name, timed(method, part, spent))
        yield spent
    finally:
        for owner, name, method, _ in originals:
            setattr(owner, name, method)


def timed(method: Callable[..., Any], part: str, spent: Counter[str]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        start = time.perf_counter()
        result = method(*args)
        spent[part] += time.perf_counter() - start
        return result

    return wrapper


def split(spent: Counter[str], total_ms: float, n_steps: int) -> Split:
    parts = {part: 1e3 * spent[part] / n_steps for part in PARTS}
    outer = sum(value for part, value in parts.items() if not part.startswith(" "))
    shared = parts["experts"] - parts["  router"] - parts["  routed"]
    named = {}
    for part, value in parts.items():
        named[part] = value
        if part == "  routed":
            named["  shared"] = shared
    return named | {"rest": total_ms / n_steps - outer}


def copy_bandwidth() -> float:
    """Return bytes read plus bytes written per second by one thread."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / min(seconds)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    n_ctx = PREFILL + options.steps
    config = EngineConfig(
        model=options.model,
        device="cpu",
        precision=options.precision,
        n_ctx=n_ctx,
        n_slots=max(BATCHES),
        threads=1,
    )
    rounds = options.rounds
    total = PREFILL * (1 + 2 * rounds) + sum(n * n_ctx for n in BATCHES)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=total)
        bench = Bench(open_runner(config), lambda n: progress.advance(task, n))
        progress.update(task, description="prefill")
        bench.prefill()  # first-use costs
        pairs = [(bench.prefill(), bench.one_by_one()) for _ in range(rounds)]
        decodes = {}
        for n in BATCHES:
            progress.update(task, description=f"decode, {n} sessions")
            decodes[n] = bench.decode(n, options.steps)
    chunk, single = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "prefill_tps": 1e3 * PREFILL / chunk,
        "one_by_one_tps": 1e3 * PREFILL / single,
        "ratio": statistics.median(one / whole for whole, one in pairs),
        "decode": [
            {"sessions": n, "step_ms": step, "token_ms": step / n, "split_ms": parts}
            for n, (step, parts) in decodes.items()
        ],
    }


# --- arithmetic -----------------------------------------------------------------------------------


def touched(sizes: Mapping[str, int], shape: Shape) -> dict[int | None, int]:
    """Return the bytes of weights that one token reads, by layer; None: outside the layers."""
    layers: dict[int | None, int] = defaultdict(int)
    for name, n_bytes in sizes.items():
        match = re.match(r"blk\.(\d+)\.", name)
        layer = int(match[1]) if match else None
        if "_exps." in name:
            layers[layer] += n_bytes * shape.n_used // shape.n_expert
        elif name.startswith("token_embd") or "tid2eid" in name:
            layers[layer] += n_bytes // shape.n_vocab
        else:
            layers[layer] += n_bytes
    return layers


def kv_read(shape: Shape, ratio: int, n_tokens: int) -> int:
    """Return the bytes of cached rows that a token reads in one layer behind `n_tokens` others."""
    rows = min(n_tokens, shape.window)
    index = 0
    if ratio:
        compressed = n_tokens // ratio
        if ratio == OVERLAPPED and compressed > shape.index_top_k:
            index = compressed * shape.index_width
            compressed = shape.index_top_k
        rows += compressed
    return HALF * (rows * shape.d_head + index)


def kv_held(shape: Shape, n_ctx: int) -> int:
    """Return the bytes of one session's caches."""
    layout = CacheLayout(shape, whole_model(shape.n_layers), n_ctx).tensors()
    return sum(torch.Size(part.shape).numel() * part.dtype.itemsize for part in layout)


def floor(
    name: str, sizes: Mapping[str, int], shape: Shape, context: int, bandwidths: Mapping[str, float]
) -> dict[str, Any]:
    """Say what one token touches, and how long that takes at given bytes per second."""
    weights = touched(sizes, shape)
    kinds: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for layer, ratio in enumerate(shape.ratios):
        kind = f"ratio {ratio}" + (", by token" if layer < shape.n_hash_layers else "")
        kinds[kind].append((weights[layer], kv_read(shape, ratio, context)))
    rows = [{"layers": "embedding, head", "count": 1, "weights": weights[None], "kv": 0}]
    for kind, layers in kinds.items():
        weight, kv = (sum(column) // len(layers) for column in zip(*layers, strict=True))
        rows.append({"layers": kind, "count": len(layers), "weights": weight, "kv": kv})
    total = sum(row["count"] * (row["weights"] + row["kv"]) for row in rows)
    return {
        "model": name,
        "file_bytes": sum(sizes.values()),
        "context": context,
        "rows": rows,
        "token_bytes": total,
        "kv_held": kv_held(shape, context),
        "floor_ms": {label: 1e3 * total / rate for label, rate in bandwidths.items()},
    }


def floors(options: argparse.Namespace) -> tuple[float, list[dict[str, Any]]]:
    """Return this machine's bandwidth, and the floors of Flash and of the measured model."""
    measured = copy_bandwidth()
    rates = {f"{measured / 1e9:.1f} GB/s, measured": measured}
    rates |= {f"{rate:g} GB/s": 1e9 * rate for rate in options.bandwidth}
    flash = next(shape for shape, known in KNOWN.items() if known.model_id == 0)
    table = toy_deepseek4.tensors(toy_deepseek4.FLASH, options.mix)
    sizes = {tensor.name: tensor.n_bytes for tensor in table}
    with GgufFile.open(options.model) as file:
        toy_sizes = {name: info.n_bytes for name, info in file.tensors.items()}
        toy = read_shape(file)
    return measured, [
        floor(f"DeepSeek V4 Flash, {options.mix}", sizes, flash, options.context, rates),
        floor(options.model.name, toy_sizes, toy, PREFILL, rates),
    ]


# --- report ---------------------------------------------------------------------------------------


def report(results: dict[str, Any], options: argparse.Namespace) -> None:
    console = Console(width=110, highlight=False)
    console.print(
        f"{options.model.name}, {options.precision}, one thread\n"
        f"prefill of {PREFILL} tokens {results['prefill_tps']:.1f} t/s, one by one "
        f"{results['one_by_one_tps']:.1f} t/s: {results['ratio']:.1f}x"
    )
    console.print(decode_table(results["decode"]))
    for one in results["floors"]:
        console.print(floor_table(one))
        times = ", ".join(f"{ms:.2f} at {label}" for label, ms in one["floor_ms"].items())
        console.print(
            f"a token touches {one['token_bytes'] / 1e6:.1f} MB of {one['file_bytes'] / 1e6:.0f} "
            f"MB; the cache of a session holds {one['kv_held'] / 1e6:.1f} MB\n"
            f"floor in ms per token: {times}"
        )


def decode_table(decodes: list[dict[str, Any]]) -> Table:
    table = Table("ms per step", title=f"decode behind {PREFILL} tokens", title_justify="left")
    for one in decodes:
        table.add_column(f"{one['sessions']} session{'s' * (one['sessions'] > 1)}", justify="right")
    for part in decodes[0]["split_ms"]:
        table.add_row(part, *(f"{one['split_ms'][part]:.2f}" for one in decodes))
    table.add_row("step", *(f"{one['step_ms']:.2f}" for one in decodes))
    table.add_row("per token", *(f"{one['token_ms']:.2f}" for one in decodes))
    return table


def floor_table(one: dict[str, Any]) -> Table:
    title = f"{one['model']}: MB per token at {one['context']}"
    table = Table("layers", title=title, title_justify="left")
    for name in ("count", "weights", "cache", "all of them"):
        table.add_column(name, justify="right")
    for row in one["rows"]:
        whole = row["count"] * (row["weights"] + row["kv"])
        figures = (f"{n / 1e6:.2f}" for n in (row["weights"], row["kv"], whole))
        table.add_row(row["layers"], str(row["count"]), *figures)
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_deepseek",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--precision", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=3, help="of prefill and one by one")
    parser.add_argument("--steps", type=int, default=32, help="of decode")
    mixes = (*toy_deepseek4.MIXES, toy_deepseek4.MIXED)
    parser.add_argument("--mix", choices=mixes, default="q2", help="Flash's experts")
    parser.add_argument("--context", type=int, default=32768, help="tokens that Flash has read")
    parser.add_argument(
        "--bandwidth",
        type=float,
        nargs="*",
        default=[50.0, 200.0, 800.0],
        metavar="GB/s",
        help="of other machines' memory",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    return parser.parse_args()


def main() -> None:
    options = parse()
    results = measure(options)
    bandwidth, both = floors(options)
    results |= {"copy_bytes_per_second": bandwidth, "floors": both}
    if not options.json:
        report(results, options)
        return
    facts = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "model": options.model.name,
        "precision": options.precision,
        "rounds": options.rounds,
    }
    print(json.dumps(facts | results))


if __name__ == "__main__":
    main()
