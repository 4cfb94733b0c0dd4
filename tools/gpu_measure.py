"""Timing on a GPU or, to try a script out, on the CPU: best of some rounds, without launch costs.

Owns: clocks, ceilings, what a result line is. Refuses to know: what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Call = Callable[[], object]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Args:
        section: Part of the report.
        name: What was measured.
        figures: Numbers by unit, in the order of showing.
        of: What share of the ceiling that is; None if there is none.
        ok: Whether a check held; None for mere figures.
    """

    section: str
    name: str
    figures: dict[str, float]
    of: float | None = None
    ok: bool | None = None


@dataclass
class Bench:
    """What all sections share.

    Args:
        device: Subject of the measurements.
        tiny: Sizes that only show that the code runs.
        rows: The report so far.
        copy: Ceiling of memory, bytes read and written per second.
        matmul: Ceiling of bfloat16 products, operations per second.
    """

    device: torch.device
    tiny: bool
    rows: list[Row] = field(default_factory=list)
    copy: float = 0.0
    matmul: float = 0.0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(1)

    def add(
        self,
        section: str,
        name: str,
        figures: dict[str, float],
        *,
        of: float | None = None,
        ok: bool | None = None,
    ) -> None:
        """Report a line; see `Row`."""
        self.rows.append(Row(section, name, figures, of, ok))

    def randn(self, *shape: int) -> torch.Tensor:
        """Return float32 noise."""
        return torch.randn(shape, device=self.device, generator=self.generator)

    def bytes(self, *shape: int) -> torch.Tensor:
        """Return uint8 noise."""
        return torch.randint(
            256, shape, dtype=torch.uint8, device=self.device, generator=self.generator
        )

    @property
    def threads(self) -> int | None:
        """Threads of the CPU's own part; None: as many as suit."""
        return 1 if self.tiny else None

    def size(self, real: int, tiny: int) -> int:
        """Return the size that suits."""
        return tiny if self.tiny else real

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, *calls: Call, rounds: int = 5) -> float:
        """Return the best time of one call; several, on memory of their own, defeat the caches."""
        for call in calls:
            call()
        self.finish()
        run = self._recorded(calls)
        return min(self._once(run) for _ in range(1 if self.tiny else rounds)) / len(calls)

    def _recorded(self, calls: Sequence[Call]) -> Call:
        """Return what makes all calls, as one graph where that is possible."""

        def all_of_them() -> None:
            for call in calls:
                call()

        if self.device.type != "cuda":
            return all_of_them
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                all_of_them()
        except RuntimeError:  # some product waits for the host: then with its launches
            torch.cuda.synchronize(self.device)
            return all_of_them
        graph.replay()
        return graph.replay

    def _once(self, run: Call) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def memory_row(self, section: str, name: str, n_bytes: float, seconds: float) -> None:
        """Report a call that is limited by the bytes that it touches."""
        rate = n_bytes / seconds
        figures = {"us": 1e6 * seconds, "GB/s": rate / 1e9}
        self.add(section, name, figures, of=rate / self.copy if self.copy else None)

    def product_row(self, section: str, name: str, n_operations: float, seconds: float) -> None:
        """Report a call that is limited by its multiplications and additions."""
        rate = n_operations / seconds
        figures = {"us": 1e6 * seconds, "TFLOP/s": rate / 1e12}
        self.add(section, name, figures, of=rate / self.matmul if self.matmul else None)


def ceilings(bench: Bench) -> None:
    """Measure what memory and products can do at best here."""
    n_bytes = bench.size(1 << 30, 1 << 16)
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    took = bench.seconds(lambda: target.copy_(source))
    bench.copy = 2 * n_bytes / took
    bench.add("ceiling", "copy", {"us": 1e6 * took, "GB/s": bench.copy / 1e9})
    n = bench.size(8192, 64)
    left, right = bench.randn(n, n).to(BF16), bench.randn(n, n).to(BF16)
    took = bench.seconds(lambda: left @ right)
    bench.matmul = 2 * n**3 / took
    figures = {"us": 1e6 * took, "TFLOP/s": bench.matmul / 1e12}
    bench.add("ceiling", f"bfloat16 matmul {n}", figures)
