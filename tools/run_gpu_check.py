"""Prove and time the engine on a GPU: kernels against ceilings, models beside the CPU, a slice.

    ./tools/gpu_check                       all of it, on the first GPU, within six minutes
    ./tools/gpu_check --only products       one section, and the ceilings that it is measured by
    ./tools/gpu_check --dry-run             tiny sizes on the CPU: does the script itself run?

Sections: ceilings, products, experts, decode-attention, chunk-attention, sinkhorn, codec,
transfers, llama, deepseek, flash. A section that fails is reported and the others go on; one that
would begin too late is left out and said so. "of ceiling" is the share of the measured copy (GB/s,
decode) or matmul (TFLOP/s, prefill). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FLASH_LAYERS = 4  # the fewest that have every kind of layer


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--model", type=Path, help="another llama than SmolLM2, or than a toy")
    parser.add_argument("--slice", type=Path, help="a DeepSeek V4 file instead of a new toy")
    parser.add_argument(
        "--experts",
        type=int,
        default=64,
        help="of the Flash-shaped toy: 256 are the real ones (10 GB), fewer are written sooner and "
        "change what a chunk decodes, not what a token reads",
    )
    parser.add_argument("--only", nargs="+", metavar="SECTION", default=[])
    parser.add_argument("--seconds", type=float, default=300, help="begin no section after this")
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.device = "cpu"
    return options


def sections(
    bench: Any, options: argparse.Namespace, folder: Path
) -> dict[str, Callable[[], None]]:
    """Return what there is to do, by name, in order."""
    from tools import gpu_kernels, gpu_measure

    kernels: dict[str, Callable[[Any], None]] = {
        "ceilings": gpu_measure.ceilings,
        "products": gpu_kernels.products,
        "experts": gpu_kernels.experts,
        "decode-attention": gpu_kernels.decode_attention,
        "chunk-attention": gpu_kernels.chunk_attention,
        "sinkhorn": gpu_kernels.sinkhorn,
        "codec": gpu_kernels.codec,
        "transfers": gpu_kernels.transfers,
    }
    found: dict[str, Callable[[], None]] = {
        name: partial(section, bench) for name, section in kernels.items()
    }
    found["llama"] = partial(llama, bench, options, folder)
    found["families"] = partial(families, bench, folder)
    found["deepseek"] = partial(deepseek, bench, folder)
    found["flash"] = partial(flash, bench, options, folder)
    unknown = set(options.only) - found.keys()
    if unknown:
        sys.exit(
            f"gpu_check: no section {', '.join(sorted(unknown))}; there are {', '.join(found)}"
        )
    wanted = {"ceilings", *options.only} if options.only else found.keys()
    return {name: section for name, section in found.items() if name in wanted}


def llama(bench: Any, options: argparse.Namespace, folder: Path) -> None:
    from tools import gpu_models

    model = options.model or SMOLLM2
    if bench.tiny or not model.exists():
        model = gpu_models.make(
            folder / "llama.gguf", "llama-1b", gpu_models.SMALL_LLAMA | {"n_ff": 512}, "Q4_K"
        )
    gpu_models.beside_cpu(bench, model, bench.size(512, 9), bench.size(64, 2), limit=2e-3)


def families(bench: Any, folder: Path) -> None:
    """Every switch of the plain blocks: norms of heads, windows, caps, experts."""
    from tools import gpu_models

    for preset, changes in gpu_models.SMALL_FAMILIES.items():
        model = gpu_models.make(folder / f"{preset}.gguf", preset, changes, "Q8_0")
        gpu_models.beside_cpu(bench, model, bench.size(300, 30), bench.size(32, 2), limit=2e-3)


def deepseek(bench: Any, folder: Path) -> None:
    from tools import gpu_models

    model = gpu_models.make(folder / "tiny.gguf", "tiny", gpu_models.SMALL_DEEPSEEK)
    # a rounding on the border between two codes, or between two experts, may fall otherwise
    gpu_models.beside_cpu(bench, model, bench.size(300, 9), bench.size(32, 2), limit=5e-2)


def flash(bench: Any, options: argparse.Namespace, folder: Path) -> None:
    from tools import gpu_models

    model = options.slice
    if bench.tiny:
        model = gpu_models.make(folder / "flash.gguf", "tiny", gpu_models.SMALL_DEEPSEEK)
    elif model is None:
        sizes = {"n_layers": FLASH_LAYERS, "n_expert": options.experts}
        model = gpu_models.make(folder / "flash.gguf", "flash-slice", sizes)
    plan = gpu_models.Plan(
        chunk=bench.size(1024, 4),
        n_chunks=bench.size(4, 2),
        n_steps=bench.size(32, 1),
        n_sessions=bench.size(8, 2),
    )
    gpu_models.slice_rates(bench, model, plan)


def run(todo: dict[str, Callable[[], None]], seconds: float) -> list[dict[str, str]]:
    """Run sections; return what went wrong."""
    began, failures = time.monotonic(), []
    for number, (name, section) in enumerate(todo.items(), 1):
        spent = time.monotonic() - began
        print(f"[{number}/{len(todo)}] {spent:4.0f} s  {name}", file=sys.stderr, flush=True)
        if spent > seconds:
            failures.append({"section": name, "error": "left out: no time left"})
            continue
        try:
            section()
        except Exception as error:  # noqa: BLE001 - the other sections still tell something
            traceback.print_exc(limit=-4)
            failures.append({"section": name, "error": f"{type(error).__name__}: {error}"})
    return failures


def report(bench: Any, failures: list[dict[str, str]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("section", "what", "figures", "of ceiling", "", title=title, title_justify="left")
    for row in bench.rows:
        figures = "  ".join(f"{figure(value)} {unit}" for unit, value in row.figures.items())
        share = "" if row.of is None else f"{row.of:.2f}"
        verdict = {None: "", True: "ok", False: "WRONG"}[row.ok]
        table.add_row(row.section, row.name, figures, share, verdict)
    for failure in failures:
        table.add_row(failure["section"], failure["error"], "", "", "FAILED")
    Console(width=140, highlight=False).print(table)


def figure(value: float) -> str:
    return f"{value:.1e}" if 0 < value < 0.01 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
    import torch

    from tools.gpu_measure import Bench

    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    title = torch.cuda.get_device_name(device) if on_gpu else "a dry run on the CPU"
    bench = Bench(device, tiny=options.dry_run)
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder, torch.inference_mode():
        todo = sections(bench, options, Path(folder))
        failures = run(todo, options.seconds)
    report(bench, failures, title)
    good = not failures and all(row.ok is not False for row in bench.rows)
    rows = [
        {key: value for key, value in vars(row).items() if value is not None} for row in bench.rows
    ]
    facts = {"device": title, "torch": torch.__version__, "dry_run": options.dry_run, "ok": good}
    print(json.dumps(facts | {"failures": failures, "rows": rows}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
