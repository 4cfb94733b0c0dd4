"""Time the codec of hidden states beside memory copies of the same floats.

GB/s count the bytes of the float32 side, once. Two copies are the measure: into memory that is
already there, and into new memory, which is what packing and unpacking make too: for large tensors
the system hands out fresh pages, and that alone can take longer than the copy. All of them take
turns, and the best turn of each counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ds4py.engine.activation_codec import pack, unpack

TOKENS = (1, 64, 4096)
WIDTH = 16384
"""Values of a token of DeepSeek V4 Flash."""

COPY, COPY_TO_NEW = "copy", "copy to new memory"
TURN_VALUES = 1 << 22
"""A turn converts at least so many values, so that clocks and calls do not matter."""


def subjects(values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    there = torch.empty_like(values).fill_(1)
    timed: dict[str, Callable[[], object]] = {
        COPY: lambda: there.copy_(values),
        COPY_TO_NEW: values.clone,
    }
    for bits in (16, 8):
        codes = pack(values, bits)
        timed[f"pack {bits} bits"] = partial(pack, values, bits)
        timed[f"unpack {bits} bits"] = partial(unpack, codes, bits)
    return timed


def seconds(subject: Callable[[], object], n_calls: int, device: torch.device) -> float:
    """Return the time of one call."""
    finish(device)
    start = time.perf_counter()
    for _ in range(n_calls):
        subject()
    finish(device)
    return (time.perf_counter() - start) / n_calls


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(n_tokens: int, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Return GB/s by subject for one size."""
    generator = torch.Generator(device).manual_seed(1)
    values = torch.randn(n_tokens, options.width, device=device, generator=generator)
    timed = subjects(values)
    n_calls = max(1, TURN_VALUES // values.numel())
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(options.rounds + 1):  # one more: the first one warms up
        for name, subject in timed.items():
            best[name] = min(best[name], seconds(subject, n_calls, device))
    rates = {name: 4e-9 * values.numel() / best[name] for name in timed}
    return {"device": str(device), "tokens": n_tokens, "gb_per_second": rates}


def show(result: dict[str, Any], width: int) -> Table:
    rates = result["gb_per_second"]
    title = f"{result['device']}: {result['tokens']} x {width} values"
    table = Table("", title=title, title_justify="left")
    for name in ("us", "GB/s of floats", f"of a {COPY}", f"of a {COPY_TO_NEW}"):
        table.add_column(name, justify="right")
    n_bytes = 4 * result["tokens"] * width
    for name, rate in rates.items():
        ratios = (f"{rate / rates[copy]:.2f}" for copy in (COPY, COPY_TO_NEW))
        table.add_row(name, f"{n_bytes / rate / 1e3:.1f}", f"{rate:.2f}", *ratios)
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_codec",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--width", type=int, default=WIDTH, help="values per token")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    results = []
    for device in map(torch.device, devices):
        for n_tokens in options.tokens:
            results.append(measure(n_tokens, device, options))
            if not options.json:
                Console(width=100, highlight=False).print(show(results[-1], options.width))
    if options.json:
        machine = platform.processor() or platform.machine()
        facts = {"machine": machine, "cores": os.cpu_count(), "torch": torch.__version__}
        print(json.dumps(facts | {"width": options.width, "results": results}))


if __name__ == "__main__":
    main()
