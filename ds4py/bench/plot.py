"""A picture of prefill and decode against context.

Owns: the look of the picture. Refuses to know: how rates were measured. Invariant: nothing is drawn
on a screen; importing it needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from ds4py.bench.context_sweep import Row
from ds4py.errors import ConfigError

_MAX_LABELS: Final = 12


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Write a PNG with prefill above and decode below, both from zero.

    Args:
        path: Where.
        rows: At least one.
        title: What was measured.

    Raises:
        ConfigError: The file cannot be written.
    """
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    context = [row.ctx_tokens for row in rows]
    series = (
        (upper, "prefill", [row.prefill_tps for row in rows], "tab:blue"),
        (lower, "decode", [row.gen_tps for row in rows], "tab:orange"),
    )
    for axes, name, rates, colour in series:
        axes.plot(context, rates, color=colour, marker="o")
        axes.set_ylabel(f"{name}, tokens per second")
        axes.set_ylim(0, max(1e-9, *rates) * 1.15)
        axes.grid(visible=True, alpha=0.3)
        for x, rate in list(zip(context, rates, strict=True))[:: -(-len(rows) // _MAX_LABELS)]:
            axes.annotate(f"{rate:.3g}", (x, rate), (0, 7), textcoords="offset points", ha="center")
    upper.set_title(title)
    lower.set_xlabel("context, tokens")
    lower.xaxis.set_major_formatter(EngFormatter(sep=""))
    try:
        figure.savefig(path, format="png")
    except OSError as e:
        raise ConfigError(f"--png {path}: {e.strerror}") from e
