"""The Triton kernels compile to machine code for real GPUs, which needs no GPU.

What the interpreter accepts the compiler may refuse. The launches of ds4py run as they are, in a
process of their own (Triton decides between compiler and interpreter when it is imported), except
for the last step: the program is compiled and not started.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: pip install 'ds4py[dev]'",
)
ROOT = Path(__file__).parents[4]


def compiled(capability: int, names: str, cache: Path) -> int:
    """Return how many kernels a process compiled, which prints their number."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    arguments = [sys.executable, "-W", "error", __file__, str(capability), names]
    done = subprocess.run(
        arguments, env=environment, check=True, capture_output=True, text=True, timeout=600
    )
    return int(done.stdout)


@pytest.mark.parametrize("names", ["Q4_K", "IQ2_XXS"])
def test_the_kernels_of_a_format_compile(names, tmp_path):
    assert compiled(90, names, tmp_path) == 6


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_the_kernels_of_all_formats_compile(capability, tmp_path):
    assert compiled(capability, "", tmp_path) == 6 * 9


class CompiledOnly:
    """A kernel whose launch compiles it."""

    def __init__(self, kernel, results):
        self._kernel = kernel
        self._results = results

    def __getitem__(self, grid):
        def launch(*args, **options):
            self._results.append(self._kernel.warmup(*args, grid=grid, **options).asm["cubin"])

        return launch


def pretend_there_is_a_device(capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device=None: 0,
    )
    driver.set_active(device)


def main(capability: int, names: list[str]) -> None:
    import torch

    from ds4py.kernels.cuda import decode, launch, multiply_few, multiply_many
    from ds4py.kernels.cuda.layouts import LAYOUTS
    from ds4py.layers import experts  # noqa: F401
    from ds4py.quant.formats import FORMATS
    from ds4py.quant.tensor import QuantTensor

    assert "triton" not in sys.modules, "products import Triton before they need it"
    pretend_there_is_a_device(capability)
    from ds4py.kernels.cuda import gemm

    results: list[bytes] = []
    launches = {
        name: CompiledOnly(getattr(gemm, name), results) for name in ("gemv", "gemm", "decode")
    }
    launch._kernels = lambda: SimpleNamespace(**launches)
    for name in names or LAYOUTS:
        kind = next(kind for kind in FORMATS.values() if kind.name == name)
        row_bytes = 2048 // kind.block_values * kind.block_bytes
        raw = torch.zeros((128, row_bytes), dtype=torch.uint8)
        matrix = QuantTensor(name, kind, (128, 2048), raw)
        stack = QuantTensor(name, kind, (4, 32, 2048), raw)
        tokens = torch.zeros((64, 2048), dtype=torch.bfloat16)
        multiply_few(tokens[:1], matrix, torch.bfloat16)
        multiply_few(tokens[:3], matrix, torch.bfloat16)
        multiply_few(tokens[:6].float(), stack, torch.float32, torch.zeros(6, dtype=torch.int64))
        multiply_many(tokens, matrix, torch.bfloat16)
        decode(matrix, torch.bfloat16)
        decode(matrix, torch.float32, torch.zeros(5, dtype=torch.int64))
    assert all(results)
    sys.stdout.write(str(len(results)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split())
