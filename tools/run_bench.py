"""Every speed that ds4py promises against its target: the program behind ./tools/bench.

The sections, their targets and what they compare with are in `tools/benchmarks`. It ends with one
JSON object on stdout, and with status 1 if something could not be measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from ds4py.cli import exits
from ds4py.cli.terminal import start_logging
from tools.benchmarks.llama import find_llama
from tools.benchmarks.processes import available_cores
from tools.benchmarks.run import chosen, json_line, run, table
from tools.benchmarks.sections import Bench
from tools.benchmarks.targets import Verdict

PROGRAM: Final = "tools/bench"
_WIDTH: Final = 160  # of a table that goes to a file
_FILE: Final = click.Path(path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("sections", nargs=-1, metavar="[SECTION]...")
@click.option("--models", type=_FILE, default=Path("models"), help="Model files [models].")
@click.option("--rounds", type=click.IntRange(1), default=5, help="Turns of each [5].")
@click.option(
    *("--dist-prefill-chunk", "chunk"),
    type=click.IntRange(1),
    default=256,
    help="Prompt tokens per chunk of a pipeline [256].",
)
@click.option("--llama-python", type=_FILE, help="An interpreter that has llama_cpp.")
@click.option("--llama-bench", type=_FILE, help="llama.cpp's program of that name.")
def bench(
    sections: tuple[str, ...],
    models: Path,
    rounds: int,
    chunk: int,
    llama_python: Path | None,
    llama_bench: Path | None,
) -> int:
    """Measure ds4py against its targets, all of them or those of the named sections.

    Sections: cpu, pipeline, hop, sessions, start. The last one needs no llama.cpp.
    """
    start_logging(PROGRAM, level=logging.WARNING)
    names = chosen(sections)
    with _status() as step:
        measured = Bench(
            models=models,
            rounds=rounds,
            chunk=chunk,
            cores=len(available_cores()),
            llama=find_llama(llama_python),
            llama_bench=llama_bench,
            step=step,
        )
        findings = run(measured, names)
    out = Console()
    (out if out.is_terminal else Console(width=_WIDTH)).print(table(findings))
    click.echo(json_line(findings, measured))
    failed = any(finding.verdict is Verdict.FAILED for finding in findings)
    return exits.FAILED if failed else exits.OK


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being measured."""
    with Console(stderr=True).status("starting") as status:
        yield status.update


if __name__ == "__main__":
    exits.run(bench, PROGRAM)
