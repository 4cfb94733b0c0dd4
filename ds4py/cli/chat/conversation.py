"""A conversation, and what answers it, wherever the model is.

Owns: `ChatHistory` with its file form, the protocol `Partner`, `Status`. Refuses to know: HTTP,
sessions, terminals. Invariant: questions and answers alternate, and every question has its answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import msgspec

from ds4py.api.events import Event
from ds4py.errors import ConfigError

Progress = Callable[[int, int], None]
"""Told (prompt tokens done, prompt tokens)."""

_MAX_FILE: Final = 64 << 20


class _Saved(msgspec.Struct, omit_defaults=True):
    role: str
    content: str
    reasoning_content: str = ""


@dataclass
class ChatHistory:
    """What was said so far, and how the next question is asked.

    Args:
        system: System text; empty sends none, None leaves it to the model.
        think: How much to reason: "none", "high" or "max"; None leaves it to the model.
        turns: Questions and answers in turn.
    """

    system: str | None = None
    think: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def add(self, question: str, answer: str, reasoning: str = "") -> None:
        """Append a question and what was answered."""
        said = {"role": "assistant", "content": answer}
        if reasoning:
            said["reasoning_content"] = reasoning
        self.turns += [{"role": "user", "content": question}, said]

    def save(self, path: Path) -> None:
        """Write what was said as the `messages` of a request.

        Raises:
            ConfigError: The file cannot be written.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        text = json.dumps([*system, *self.turns], ensure_ascii=False, indent=1)
        try:
            path.write_text(f"{text}\n", encoding="utf-8", errors="replace")
        except OSError as e:
            raise ConfigError(f"{path}: {e.strerror}") from e

    def load(self, path: Path) -> None:
        """Replace what was said, and the system text if it has one, by a saved conversation.

        Raises:
            ConfigError: The file is none.
        """
        saved = _read(path)
        system = saved.pop(0).content if saved and saved[0].role == "system" else self.system
        roles = [message.role for message in saved]
        if roles != ["user", "assistant"] * (len(saved) // 2):
            raise ConfigError(
                f"{path}: expected questions and answers in turn, behind one system message at most"
            )
        self.system = system
        self.turns = [msgspec.to_builtins(message) for message in saved]


def _read(path: Path) -> list[_Saved]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE + 1)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
    if len(raw) > _MAX_FILE:
        raise ConfigError(f"{path}: more than {_MAX_FILE >> 20} MiB")
    try:
        return msgspec.json.decode(raw, type=list[_Saved])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        raise ConfigError(f"{path}: not a saved conversation: {e}") from e


@dataclass(frozen=True, slots=True)
class StageFigures:
    """A part of the route and its rates in tokens per second; 0 if it has done nothing yet."""

    name: str
    layers: str
    prefill_per_second: float
    decode_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What answers, and whether it can.

    Args:
        model: Its name.
        where: "in this process", or an address.
        n_ctx: Tokens that a conversation can have.
        missing: Layers that nobody serves; empty if all is well.
        stages: The route in the order of layers.
    """

    model: str
    where: str
    n_ctx: int
    missing: str
    stages: tuple[StageFigures, ...]


class Partner(Protocol):
    """Anyone who answers. Used by one thread."""

    def reply(
        self, talk: ChatHistory, question: str, progress: Progress
    ) -> Generator[Event, None, None]:
        """Ask a question behind a conversation; closing the generator stops the answer.

        Ctrl+C ends the answer early, with `Figures` that say so or as `KeyboardInterrupt`. What was
        answered until then counts as said, if it has at least one token.

        Args:
            talk: What was said before. An answer in it is the last one given here, unless `forget`
                was called.
            question: The question.
            progress: Told how far the prompt is.
        """

    def forget(self) -> None:
        """Take the next conversation from its texts alone: it was replaced, or its system text."""

    def resize(self, n_ctx: int) -> None:
        """Let conversations have so many tokens; what was said stays.

        Raises:
            Ds4Error: That is not possible; nothing was changed.
        """

    def status(self) -> Status:
        """Tell what answers.

        Raises:
            Ds4Error: It cannot be asked.
        """

    def close(self) -> None:
        """Give back what was opened."""
