"""`ds4py inspect FILE`: what a model file holds, and how to cut it over machines.

Owns: the tables and the JSON object. Refuses to know: how files are read or cuts are found.
Invariant: never imports torch, never touches a weight; text from the file cannot steer the
terminal.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ds4py.cli.exits import printable
from ds4py.cli.flags.shared import CONTEXT_SETTINGS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ds4py.gguf.summary import ModelSummary
    from ds4py.layer_range import LayerRange

DEFAULT_CUTS: Final = (2, 3, 4)
Cuts = list[tuple[int, "list[LayerRange]"]]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--cuts",
    "machines",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Suggest a cut over N machines; may be repeated.  [default: 2, 3 and 4]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def inspect(file: Path, machines: tuple[int, ...], as_json: bool) -> None:
    """Show what the GGUF model FILE holds and how to cut it by layers.

    FILE may be any shard of a split model.
    """
    from ds4py.gguf.file import GgufFile
    from ds4py.gguf.summary import summarize

    with GgufFile.open(file) as model:
        summary = summarize(model)
    cuts = _cuts(summary, machines)
    if as_json:
        click.echo(json.dumps(_as_object(file, summary, cuts)))
    else:
        _print(file, summary, cuts)


def _cuts(summary: ModelSummary, machines: Sequence[int]) -> Cuts:
    """Cut for the numbers that were asked for, or for the default ones that are possible."""
    from ds4py.gguf.summary import suggest_cuts

    counts = machines or [n for n in DEFAULT_CUTS if n <= summary.n_layers]
    return [(n, suggest_cuts(summary, n)) for n in counts]


def _flag(layers: LayerRange) -> str:
    # A-B that ends on the last layer includes the output head, so the head needs no word here.
    return f"{layers.start}-{layers.end}"


def _as_object(file: Path, summary: ModelSummary, cuts: Cuts) -> dict[str, object]:
    slices = [
        {
            "machines": n,
            "slices": [
                {
                    "layers": _flag(layers),
                    "has_output": layers.has_output,
                    "n_bytes": summary.range_bytes(layers),
                }
                for layers in ranges
            ],
        }
        for n, ranges in cuts
    ]
    return {"file": str(file), **dataclasses.asdict(summary), "cuts": slices}


def _print(file: Path, summary: ModelSummary, cuts: Cuts) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for table in (_model_table(file, summary), _quant_table(summary), _bytes_table(summary)):
        console.print(table, "")
    if summary.missing_shards:
        _line(console, f"Not counted, missing: {', '.join(summary.missing_shards)}")
    if cuts:
        _line(console, "Suggested cuts, the largest slice as small as possible:")
    for n, ranges in cuts:
        _line(console, f"\n  {n} machines" if n > 1 else "\n  1 machine")
        for layers in ranges:
            flag = f"--dist-layers {_flag(layers)}"
            _line(console, f"    {flag:<24}{_size(summary.range_bytes(layers)):>10}")


def _line(console: Console, text: str) -> None:
    # soft_wrap: a flag that is broken over two lines cannot be copied.
    console.print("\n".join(printable(line) for line in text.split("\n")), soft_wrap=True)


def _table(*headers: str) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=bool(any(headers)), pad_edge=False, padding=(0, 3, 0, 0))
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index and header else "left", overflow="fold")
    return table


def _model_table(file: Path, summary: ModelSummary) -> Table:
    table = _table("", "")
    tokens, width = summary.n_ctx_train, summary.n_embd
    rows = {
        "model": summary.name or "(no name)",
        "architecture": summary.architecture or "(none)",
        "file": str(file),
        "size": f"{_size(summary.total_bytes)} in {summary.n_tensors} tensors",
        "layers": str(summary.n_layers),
        "context": "unknown" if tokens is None else f"{tokens} tokens",
        "vocabulary": "unknown" if summary.n_vocab is None else f"{summary.n_vocab} tokens",
        "width": "unknown" if width is None else str(width),
    }
    for label, value in rows.items():
        table.add_row(label, printable(value))
    return table


def _quant_table(summary: ModelSummary) -> Table:
    table = _table("type", "tensors", "bytes")
    for share in summary.quants:
        table.add_row(share.type_name, str(share.n_tensors), _size(share.n_bytes))
    return table


def _bytes_table(summary: ModelSummary) -> Table:
    """Show bytes by place; neighbouring layers of one size share a row."""
    table = _table("part", "bytes each", "bytes")
    table.add_row("embedding", "", _size(summary.embedding_bytes))
    groups = itertools.groupby(enumerate(summary.layer_bytes), key=lambda pair: pair[1])
    for size, group in groups:
        numbers = [layer for layer, _ in group]
        first, last, n = numbers[0], numbers[-1], len(numbers)
        label = f"layer {first}" if n == 1 else f"layers {first}-{last}"
        table.add_row(label, _size(size), _size(size * n))
    tied = " (the embedding again)" if summary.tied else ""
    table.add_row(f"output head{tied}", "", _size(summary.head_bytes))
    if summary.other_bytes:
        table.add_row("other", "", _size(summary.other_bytes))
    return table


def _size(n_bytes: int) -> str:
    from rich.filesize import decimal

    return decimal(n_bytes)
