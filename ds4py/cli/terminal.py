"""What a user sees while waiting: log lines and progress on stderr.

Owns: the log format, the bars, the lines instead of them. Refuses to know: what is being done.
Invariant: bars appear on a terminal only; stdout belongs to the answer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import click

Progress = Callable[[int, int], None]


def start_logging(program: str, *, level: int) -> None:
    """Send log lines to stderr in ds4's form: stamp, program, text."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"%(asctime)s {program}: %(message)s",
        datefmt="%m%d %H:%M:%S",
        force=True,
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(_one_line)
    for noisy in ("asyncio", "httpx", "httpcore", "uvicorn"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))


def _one_line(record: logging.LogRecord) -> bool:
    """Spell out control characters of what others sent, which could draw lines of their own."""
    text = record.getMessage()
    if not text.isprintable():
        record.msg = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
        record.args = ()
    return True


@contextmanager
def progress_bar(what: str, *, unit: Literal["bytes", "tokens"]) -> Iterator[Progress]:
    """Show how far something is, if stderr is a terminal.

    Args:
        what: Label.
        unit: "bytes" shows sizes, "tokens" counts and tells the rate.
    """
    if not sys.stderr.isatty():
        yield lambda _, __: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    counted = (MofNCompleteColumn(), TextColumn("tokens {task.fields[rate]}"))
    amount = (DownloadColumn(),) if unit == "bytes" else counted
    columns = (TextColumn("{task.description}"), BarColumn(), *amount)
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, rate="")

        def show(done: int, total: int) -> None:
            shown = bar.tasks[0]  # its own speed needs several steps
            speed = shown.speed or done / max(shown.elapsed or 0, 1e-3)
            bar.update(task, completed=done, total=total, rate=f"({speed:.0f} t/s)")
            if done >= total:
                bar.stop()  # what follows, such as the answer, has the terminal to itself

        yield show


@contextmanager
def prompt_progress(what: str = "prompt") -> Iterator[Progress]:
    """Show how far a prompt is: a bar with its rate on a terminal, ds4's lines otherwise.

    Args:
        what: Label of the bar.
    """
    if sys.stderr.isatty():
        with progress_bar(what, unit="tokens") as show:
            yield show
        return
    told = (0, 0)

    def tell(done: int, total: int) -> None:
        nonlocal told
        if total > 0 and (done, total) != told:
            told = (done, total)
            share = 100 * done // total
            click.echo(f"processing {total} input tokens: {done}/{total} ({share}%)", err=True)

    yield tell
