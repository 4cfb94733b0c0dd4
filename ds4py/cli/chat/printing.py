"""One question and its answer, wherever the model is.

Owns: `Question`, the events of an answer, and how they are shown. Refuses to know: HTTP, sessions.
Invariant: stdout carries the answer only; figures go to stderr.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import click

from ds4py.api.events import Event, Figures, Piece

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What could steer a terminal; line breaks and tabs are no harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Args:
        text: User's text; None if `ids` are given.
        ids: Raw token ids instead of a text.
        system: System text; empty sends none, None leaves it to the model.
        raw: The text is a whole prompt: continue it as it is, without the chat format.
        max_tokens: Output budget; None ends at the end token or the context.
        sampling: Given sampling flags only: the rest is the server's to choose.
        think: How much to reason: "none", "high" or "max"; None leaves it to the model.
    """

    text: str | None
    ids: tuple[int, ...] | None
    system: str | None
    raw: bool
    max_tokens: int | None
    sampling: dict[str, float | int]
    think: str | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """How far the prompt of a remote answer is, in tokens."""

    n_done: int
    n_prompt: int


def show(events: Iterator[Event], *, ids_only: bool) -> Figures | None:
    """Print an answer as it comes and its figures after it.

    Args:
        events: The answer.
        ids_only: Print token ids, separated by commas, instead of text.
    """
    figures: Figures | None = None
    n_ids, began, reasoned = 0, False, False
    try:
        for event in events:
            began = True
            if isinstance(event, Figures):
                figures = event
            elif ids_only:
                for token in event.ids:
                    click.echo(f"{',' if n_ids else ''}{token}", nl=False)
                    n_ids += 1
            else:
                reasoned = _say(event, reasoned)
            sys.stdout.flush()
    finally:
        if began:  # an answer that never came leaves stdout empty
            click.echo()
    if figures is not None:
        click.echo(_told(figures), err=True)
    return figures


def _say(piece: Piece, reasoned: bool) -> bool:
    """Print a piece of text, on a line of its own where the answer begins behind reasoning.

    Args:
        piece: Its reasoning is dim on a terminal.
        reasoned: Reasoning was printed last.

    Returns:
        Whether reasoning was printed last.
    """
    if piece.reasoning:
        click.secho(_harmless(piece.reasoning), nl=False, dim=True)
        reasoned = True
    if piece.text and reasoned:
        click.echo()
        reasoned = False
    click.echo(_harmless(piece.text), nl=False)
    return reasoned


def _harmless(text: str) -> str:
    """Spell out control characters of a model's text on a terminal; a file gets them as they are.

    A model repeats what its prompt holds, a web page for example, and must not move the cursor or
    fill the clipboard of anyone who reads its answer.
    """
    if not sys.stdout.isatty():
        return text
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def awaited(
    events: Iterator[Event | Prefill], progress: Callable[[int, int], None]
) -> Iterator[Event]:
    """Yield an answer, telling how far its prompt is and, before it begins, that it is done."""
    n_prompt, waiting = 0, True
    for event in events:
        if isinstance(event, Prefill):
            n_prompt = event.n_prompt
            progress(event.n_done, n_prompt)
            continue
        if waiting:
            progress(n_prompt, n_prompt)
            waiting = False
        yield event


def _told(figures: Figures) -> str:
    """Return two lines: how many tokens, and how fast in ds4's words."""
    cached = f" ({figures.n_cached} cached)" if figures.n_cached else ""
    return (
        f"prompt: {figures.n_prompt} tokens{cached}, answer: {figures.n_generated} tokens\n"
        f"prefill: {figures.prefill_per_second:.1f} t/s, "
        f"generation: {figures.decode_per_second:.1f} t/s"
    )
