"""Frontiers as tables and JSON.

Owns: what stands in a row. Refuses to know: files, terminals, how anything was measured. Invariant:
the JSON object has every figure that a table or the CSV has.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table

from ds4py.bench.context_sweep import Frontier
from ds4py.contracts import ModelCard
from ds4py.tracing.events import Shares

_COLUMNS: Final = ("compute", "wire", "wait", "idle", "bubble")


def share_table(frontier: Frontier) -> Table:
    """Show what each stage did with the time of a frontier.

    Wire is time with a span on its way to or from the stage, wait is time with one at a later
    stage, idle is time with none; a bubble is all time without computing.
    """
    title = f"time of each stage at {frontier.row.ctx_tokens} tokens, %"
    shown = Table("", "stage", title=title, title_justify="left")
    for column in _COLUMNS:
        shown.add_column(column, justify="right")
    for what, by_stage in (("prefill", frontier.prefill), ("decode", frontier.decode)):
        for stage, shares in by_stage.items():
            shown.add_row(what, stage, *(f"{100 * v:.1f}" for v in share_object(shares).values()))
    return shown


def share_object(shares: Shares) -> dict[str, float]:
    """Return parts of a time by name."""
    return {column: round(getattr(shares, column), 4) for column in _COLUMNS}


def json_object(card: ModelCard, frontiers: Sequence[Frontier]) -> dict[str, Any]:
    """Return everything that was measured."""
    return {
        "model": card.name,
        "machine": platform.processor() or platform.machine(),
        "frontiers": [
            {
                **asdict(frontier.row),
                "stages": {
                    "prefill": _by_stage(frontier.prefill),
                    "decode": _by_stage(frontier.decode),
                },
            }
            for frontier in frontiers
        ],
    }


def _by_stage(shares: Mapping[str, Shares]) -> dict[str, dict[str, float]]:
    return {stage: share_object(own) for stage, own in shares.items()}


def logits_object(
    card: ModelCard, frontier: Frontier, *, n_prompt: int, n_ctx: int, device: str
) -> dict[str, Any]:
    """Return the logits of a frontier with the names of ds4-bench (server-and-cli.md#bench)."""
    best = int(frontier.logits.argmax())
    return {
        "source": "ds4py-bench",
        "model": card.name,
        "backend": device,
        "quality": False,
        "quant_bits": card.quant_bits,
        "prompt_tokens": n_prompt,
        "frontier_tokens": frontier.row.ctx_tokens,
        "prefill_tokens": frontier.row.prefill_tokens,
        "ctx": n_ctx,
        "vocab": card.n_vocab,
        "argmax_id": best,
        "argmax_logit": float(frontier.logits[best]),
        "logits": frontier.logits.tolist(),
    }
