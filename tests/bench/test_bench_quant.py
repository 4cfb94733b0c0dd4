"""How fast packed weights decode, against a plain memory copy in the same run.

Run with `pytest -m bench tests/bench/test_bench_quant.py`. One line a tensor type: decoded GB/s
(float32 values written), the same for bf16, and what share of the copy's rate the float32 run has.
"""

import sys
import time
from collections.abc import Callable

import pytest
import torch

from ds4py.quant.formats import FORMATS
from ds4py.quant.tensor import QuantTensor
from tests.support.quant_blocks import finite_blocks

ROWS, COLUMNS, REPEATS = 1024, 4096, 5


def fastest(run: Callable[[], object]) -> float:
    """Return the shortest of a few runs, seconds, after one to warm up."""
    run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.bench
def test_decode_rate_of_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source = torch.ones(ROWS, COLUMNS)
    target = torch.empty_like(source)
    n_values = source.numel()
    copy_rate = n_values * 4 / fastest(lambda: target.copy_(source)) / 1e9
    lines = [f"\ncopy {copy_rate:.1f} GB/s, one thread, {ROWS} x {COLUMNS}"]
    for kind in FORMATS.values():
        blocks = torch.from_numpy(finite_blocks(kind, 0, n_values // kind.block_values))
        weights = QuantTensor("w", kind, (ROWS, COLUMNS), blocks.view(ROWS, -1))
        f32 = n_values * 4 / fastest(weights.decode) / 1e9
        bf16 = n_values * 2 / fastest(lambda w=weights: w.decode(torch.bfloat16)) / 1e9
        lines.append(
            f"{kind.name:8} f32 {f32:6.2f} GB/s  bf16 {bf16:6.2f} GB/s  {f32 / copy_rate:5.0%}"
        )
    torch.set_num_threads(threads)
    with capsys.disabled():
        sys.stdout.write("\n".join(lines) + "\n")
