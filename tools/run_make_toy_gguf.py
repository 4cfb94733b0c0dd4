"""Write a model file of random weights: it loads, computes and talks, and knows nothing.

    ./tools/make_toy_gguf --preset tiny -o tiny.gguf
    ./tools/make_toy_gguf --preset bench300 --mix mixed --layers 12 -o toy.gguf
    ./tools/make_toy_gguf --preset flash-slice --layers 4 -o flash-4.gguf
    ./tools/make_toy_gguf --preset tiny --set n_expert=32 --set ratios=0,4 -o odd.gguf
    ./tools/make_toy_gguf --preset llama-1b --mix Q4_K -o llama.gguf
    ./tools/make_toy_gguf --preset qwen3moe-1b --mix Q4_K -o qwen3moe.gguf

Presets: tiny (ds4's tiny test model), bench300 (the proportions of DeepSeek V4 Flash in about 300
MB), flash-slice (the real sizes of Flash, fewer layers: 2 GB each and 1.6 GB more), pro-slice, and
llama-1b, qwen3-1b, qwen3moe-1b, gemma3-1b. The same arguments make the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ds4py.errors import ConfigError, Ds4Error
from tools import toy_decoder, toy_deepseek4, toy_llama
from tools.gguf_writer import Bytes, TensorSource, WriteValue, save_gguf

SLICE_LAYERS = 4  # the fewest that have every kind of layer
LLAMA_KINDS = ("Q4_K", "Q8_0", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F32")
PRESETS: dict[str, toy_deepseek4.Sizes | toy_llama.Sizes | toy_decoder.Sizes] = {
    "tiny": toy_deepseek4.Sizes(),
    "bench300": toy_deepseek4.BENCH,
    "flash-slice": replace(toy_deepseek4.FLASH, n_layers=SLICE_LAYERS),
    "pro-slice": replace(toy_deepseek4.PRO, n_layers=SLICE_LAYERS),
    "llama-1b": toy_llama.Sizes(),
    "qwen3-1b": toy_decoder.Sizes(),
    "qwen3moe-1b": toy_decoder.QWEN3_MOE,
    "gemma3-1b": toy_decoder.GEMMA3,
}


@dataclass(frozen=True)
class Plan:
    """A file to write."""

    metadata: dict[str, WriteValue]
    tensors: list[TensorSource]
    n_layers: int
    mix: str

    @property
    def n_bytes(self) -> int:
        """Packed bytes of all tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors)


def plan(preset: str, mix: str | None, seed: int, changes: dict[str, Any]) -> Plan:
    sizes = PRESETS[preset]
    unknown = changes.keys() - {*sizes.__dataclass_fields__}
    if unknown:
        known = ", ".join(sizes.__dataclass_fields__)
        raise ConfigError(f"--set: got {', '.join(sorted(unknown))}, expected one of {known}")
    for name, value in changes.items():
        if isinstance(value, int) and value < (name != "n_hash_layers"):
            raise ConfigError(f"{name}: got {value}, expected 1 or more")
    sizes = replace(sizes, **changes)
    if isinstance(sizes, toy_decoder.Sizes):
        mix = check_mix(mix or LLAMA_KINDS[0], LLAMA_KINDS)
        tensors = toy_decoder.tensors(sizes, mix, seed)
        return Plan(toy_decoder.metadata(sizes), tensors, sizes.n_layers, mix)
    if isinstance(sizes, toy_llama.Sizes):
        mix = check_mix(mix or LLAMA_KINDS[0], LLAMA_KINDS)
        tensors = toy_llama.tensors(sizes, mix, seed)
        return Plan(toy_llama.metadata(sizes), tensors, sizes.n_layers, mix)
    mix = check_mix(mix or "q2", (*toy_deepseek4.MIXES, toy_deepseek4.MIXED))
    tensors = toy_deepseek4.tensors(sizes, mix, seed)
    return Plan(toy_deepseek4.metadata(sizes), tensors, sizes.n_layers, mix)


def check_mix(mix: str, known: tuple[str, ...]) -> str:
    if mix not in known:
        raise ConfigError(f"--mix: got {mix}, expected one of {', '.join(known)} for this preset")
    return mix


def counted(tensor: TensorSource, advance: Callable[[int], None]) -> TensorSource:
    """Return the same tensor, which tells how many bytes were asked for."""

    def pieces() -> Iterator[Bytes]:
        for piece in tensor.pieces():
            yield piece
            advance(len(piece))

    return replace(tensor, packed=pieces)


def write(path: Path, wanted: Plan) -> None:
    """Write beside the file and rename, so that an interrupted run leaves no half of a model."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    partial = path.with_name(f"{path.name}.partial")
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(path.name, total=wanted.n_bytes)
            tensors = [counted(t, lambda n: progress.advance(task, n)) for t in wanted.tensors]
            save_gguf(partial, wanted.metadata, tensors)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def change(text: str) -> tuple[str, int | tuple[int, ...]]:
    """Read NAME=NUMBER or ratios=NUMBER,NUMBER,..."""
    name, _, value = text.partition("=")
    numbers = tuple(int(number) for number in value.split(","))
    return name, numbers if name == "ratios" else int(value)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make_toy_gguf", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument(
        "--mix",
        help="types of the routed experts: q2 (default), q4, q8, f16, or mixed (the last\n"
        f"layers q4, the others q2); for the others, of every matrix: {', '.join(LLAMA_KINDS)}",
    )
    parser.add_argument(
        "--set",
        type=change,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a size, such as n_embd=512; names are those of Sizes in toy_deepseek4.py",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    layers = {} if args.layers is None else {"n_layers": args.layers}
    try:
        wanted = plan(args.preset, args.mix, args.seed, {**dict(args.set), **layers})
        write(args.output, wanted)
    except Ds4Error as error:
        sys.exit(f"make_toy_gguf: {error}")
    size = args.output.stat().st_size
    print(
        f"{args.output}: {size / 1e6:.1f} MB, {wanted.n_layers} layers, "
        f"{len(wanted.tensors)} tensors, mix {wanted.mix}, seed {args.seed}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
