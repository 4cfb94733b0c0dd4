"""A chat at the terminal: questions, answers, and commands that begin with a slash.

Owns: the loop, the commands, what is kept of an answer that was stopped; all of it as
docs/spec/server-and-cli.md#interactive has it. Refuses to know: where the model is, how lines are
typed. Invariant: stdout has answers only; whatever fails costs a turn, never the chat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from ds4py.api.events import Event, Figures, Piece
from ds4py.cli import exits
from ds4py.cli.chat.conversation import ChatHistory, Partner, Status
from ds4py.cli.chat.line_input import Lines, read_entry
from ds4py.cli.chat.printing import show
from ds4py.cli.flags.question import read_text
from ds4py.cli.terminal import prompt_progress
from ds4py.errors import ConfigError, Ds4Error

COMMANDS: Final = {
    "/help": "list the commands",
    "/think": "reason before answers",
    "/think-max": "the same, as much as possible (needs a context of 393216 tokens)",
    "/nothink": "answer without reasoning",
    "/system TEXT": "replace the system text; without one, leave it to the model",
    "/read FILE": "ask what stands in a file",
    "/ctx N": "let the conversation have N tokens; it is kept",
    "/status": "show what answers, how fast, and how full the context is",
    "/clear": "begin a new conversation",
    "/save FILE": "write the conversation, as the messages of an API request",
    "/load FILE": "go on with a saved conversation",
    "/power N": "accepted for ds4; has no effect",
    "/quit": "leave, as do /exit and Ctrl+D",
}
"""What a user may type, and what it does."""

_ALIASES: Final = {"exit": "quit"}
WORDS: Final = (*(usage.split()[0] for usage in COMMANDS), "/exit")

_WELCOME: Final = (
    "Type a question. /help lists commands; a line that ends with \\ goes on, and so does text "
    'between """.\nCtrl+C stops an answer, Ctrl+D leaves.'
)


def command_list() -> str:
    """Return the commands as a table."""
    width = max(map(len, COMMANDS)) + 2
    return "\n".join(f"{usage:<{width}}{what}" for usage, what in COMMANDS.items())


@dataclass
class _Said:
    """What an answer consists of so far."""

    answer: str = ""
    reasoning: str = ""
    begun: bool = False
    figures: Figures | None = None

    def noting(self, events: Iterator[Event]) -> Iterator[Event]:
        """Yield events as they pass."""
        for event in events:
            if isinstance(event, Figures):
                self.figures = event
            elif event != Piece():
                self.begun = True
                self.answer += event.text
                self.reasoning += event.reasoning
            yield event


class ChatLoop:
    """One chat, from its first line to its last.

    Args:
        partner: Anyone who answers.
        lines: Anyone who asks.
        talk: How it begins.
        program: Name in front of complaints.
        ids_only: Show token ids instead of text.
    """

    def __init__(
        self,
        partner: Partner,
        lines: Lines,
        talk: ChatHistory,
        *,
        program: str,
        ids_only: bool = False,
    ) -> None:
        self._partner, self._lines, self._talk = partner, lines, talk
        self._program, self._ids_only = program, ids_only
        self._status = exits.OK
        self._figures: Figures | None = None
        self._actions: dict[str, Callable[[str], None]] = {
            "help": lambda _: _tell(command_list()),
            "think": lambda _: self._think("high"),
            "think-max": lambda _: self._think("max"),
            "nothink": lambda _: self._think("none"),
            "system": self._system,
            "read": lambda name: self._ask(read_text(_path(name), "/read")),
            "ctx": self._resize,
            "status": lambda _: self._show_status(),
            "clear": lambda _: self._clear(),
            "save": self._save,
            "load": self._load,
            "power": lambda _: _tell("/power has no effect here: the machine runs as it can"),
            "quit": _leave,
        }

    def run(self) -> int:
        """Talk until the user leaves.

        Returns:
            The exit status: that of the last turn.
        """
        _tell(_WELCOME)
        while True:
            try:
                self._heed(read_entry(self._lines))
            except EOFError:
                return self._status
            except KeyboardInterrupt:
                if not self._lines.edited:
                    raise
            except Ds4Error as error:
                exits.complain(self._program, str(error))

    def _heed(self, entry: str) -> None:
        """Do what a user said."""
        if not entry.strip():
            return
        if not entry.startswith("/"):
            self._ask(entry)
            return
        word, *rest = re.split(r"\s+", entry[1:], maxsplit=1)
        action = self._actions.get(_ALIASES.get(word, word))
        if action is None:
            raise ConfigError(
                f"/{word}: no such command, nothing was sent; /help lists them, and a question "
                "that begins with / is sent with a space before it"
            )
        action("".join(rest).strip())

    def _ask(self, question: str) -> None:
        """Show the answer to a question, and keep both, or neither if there was none."""
        said = _Said()
        try:
            with (
                prompt_progress() as progress,
                closing(self._partner.reply(self._talk, question, progress)) as events,
            ):
                show(said.noting(events), ids_only=self._ids_only)
            self._status = exits.OK
        except KeyboardInterrupt:  # of an answer that is waited for elsewhere
            self._status = exits.OK
        except Ds4Error:
            self._status = exits.FAILED
            raise
        finally:
            self._keep(question, said)

    def _keep(self, question: str, said: _Said) -> None:
        self._figures = said.figures or self._figures
        if said.begun:
            self._talk.add(question, said.answer, said.reasoning)
        else:
            _tell("no answer: the question is taken back")

    def _think(self, how: str) -> None:
        self._talk.think = how
        _tell(f"thinking: {how}")
        if how == "max" and self._talk.turns:
            _tell("its instructions stand at the beginning of a conversation: /clear to have them")

    def _system(self, text: str) -> None:
        self._talk.system = text or None
        self._partner.forget()
        _tell("system text: yours" if text else "system text: as the model has it")

    def _resize(self, number: str) -> None:
        if not (number.isascii() and number.isdigit() and 0 < len(number) <= 9 and int(number)):
            raise ConfigError(f"/ctx {number!a}: expected a number of tokens, as in /ctx 8192")
        self._partner.resize(int(number))
        _tell(f"the context has {int(number)} tokens now; the conversation was kept")

    def _clear(self) -> None:
        self._talk.turns.clear()
        self._partner.forget()
        self._figures = None
        _tell("a new conversation")

    def _save(self, name: str) -> None:
        self._talk.save(_path(name))
        _tell(f"saved as {exits.printable(name)}")

    def _load(self, name: str) -> None:
        self._talk.load(_path(name))
        self._partner.forget()
        self._figures = None
        _tell(f"{len(self._talk.turns) // 2} questions and their answers")

    def _show_status(self) -> None:
        _tell("\n".join(_status_lines(self._partner.status(), self._talk, self._figures)))


def _status_lines(status: Status, talk: ChatHistory, last: Figures | None) -> Iterator[str]:
    used = last.n_prompt + last.n_generated if last is not None else 0
    yield f"model: {exits.printable(status.model)}, {status.where}"
    yield f"context: {used} of {status.n_ctx} tokens used"
    yield f"thinking: {talk.think or 'as the model does'}"
    for stage in status.stages:
        yield (
            f"  {exits.printable(stage.name)}: {stage.layers}; "
            f"prefill: {stage.prefill_per_second:.1f} t/s, "
            f"generation: {stage.decode_per_second:.1f} t/s"
        )
    if status.missing:
        yield f"missing: nobody serves {exits.printable(status.missing)}"


def _path(name: str) -> Path:
    if not name:
        raise ConfigError("no file named; give its name behind the command")
    try:
        return Path(name).expanduser()
    except RuntimeError as e:
        raise ConfigError(f"{name}: {e}") from e


def _leave(_: str) -> None:
    raise EOFError


def _tell(text: str) -> None:
    click.echo(text, err=True)
