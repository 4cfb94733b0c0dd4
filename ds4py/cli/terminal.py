"""What a user sees while waiting: log lines and progress bars on stderr.

Owns: the log format, the bars. Refuses to know: what is being done. Invariant: bars appear on a
terminal only; stdout belongs to the answer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    for noisy in ("asyncio", "httpx", "httpcore", "uvicorn"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))


@contextmanager
def progress_bar(what: str, *, unit: str) -> Iterator[Progress]:
    """Show how far something is, if stderr is a terminal.

    Args:
        what: Label.
        unit: "bytes" shows sizes, anything else counts.
    """
    if not sys.stderr.isatty():
        yield lambda _, __: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TextColumn(unit))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if done >= total:
                bar.stop()  # what follows, such as the answer, has the terminal to itself

        yield show
