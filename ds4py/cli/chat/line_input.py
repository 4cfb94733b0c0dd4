"""What a user types in a chat: single lines, and entries of several.

Owns: editing on a terminal, plain reading of a pipe, what makes an entry go on over lines. Refuses
to know: what entries mean. Invariant: an entry is bounded before it is kept; the end of the input
ends an entry that was begun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, Final, Protocol

from ds4py.cli.chat.line_history import LineHistory
from ds4py.errors import ConfigError

MAX_ENTRY: Final = 64 << 20
"""Bytes of a line, and characters of an entry."""

_FIRST: Final = "ds4> "
_NEXT: Final = "...  "
_QUOTES: Final = '"""'


class Lines(Protocol):
    """Where lines come from.

    Attributes:
        edited: By a person at a terminal, whose Ctrl+C clears the line.
    """

    edited: bool

    def read(self, prompt: str) -> str:
        """Return the next line, or a text of several that was pasted, without its end.

        Raises:
            EOFError: There is none.
            KeyboardInterrupt: The user wants to type it again.
            ConfigError: It is no text, or too long.
        """


def read_entry(lines: Lines) -> str:
    r"""Return what a user says next; it may have several lines.

    A line that ends with a backslash goes on. One that begins with three quotes goes on up to the
    line that ends with three; the quotes are left out.

    Raises:
        EOFError, KeyboardInterrupt, ConfigError: As `Lines.read` does.
    """
    line = lines.read(_FIRST)
    if not line.startswith(_QUOTES):
        parts = _collected(lines, line, lambda part: part.endswith("\\"))
        return "\n".join(part.removesuffix("\\") for part in parts)
    line = line.removeprefix(_QUOTES)
    parts = _collected(lines, line, lambda part: not part.rstrip().endswith(_QUOTES))
    return "\n".join(parts).rstrip().removesuffix(_QUOTES).strip("\n")


def _collected(lines: Lines, line: str, goes_on: Callable[[str], bool]) -> list[str]:
    """Return a line and those behind it, up to the first that does not go on."""
    parts, size = [line], len(line)
    try:
        while goes_on(parts[-1]):
            parts.append(lines.read(_NEXT))
            size += len(parts[-1])
            if size > MAX_ENTRY:
                raise ConfigError(f"an entry of more than {MAX_ENTRY >> 20} MiB: use /read FILE")
    except EOFError:
        pass
    return parts


class PipedLines:
    """Lines of a file or a pipe.

    Args:
        stream: Read to its end.
    """

    edited = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._over = False

    def read(self, _: str) -> str:
        """See `Lines.read`; there is nobody to show a prompt to."""
        raw = b"" if self._over else self._stream.readline(MAX_ENTRY + 1)
        if not raw:
            raise EOFError
        if len(raw) > MAX_ENTRY:
            self._over = True  # what follows is the rest of this line
            raise ConfigError(f"stdin: a line of more than {MAX_ENTRY >> 20} MiB")
        try:
            return raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as e:
            raise ConfigError(f"stdin: a line that is not UTF-8 text (byte {e.start})") from e


class EditedLines:
    """Lines of a person at a terminal, with editing, history, and words to complete by Tab.

    Args:
        history: Where lines are remembered.
        words: Commands.
    """

    edited = True

    def __init__(self, history: LineHistory, words: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import create_output

        self._session: PromptSession[str] = PromptSession(
            history=_remembered(history),
            key_bindings=_keys(),
            completer=WordCompleter(list(words), WORD=True),
            complete_while_typing=False,
            enable_suspend=True,
            # the answers may go to a file; prompts stay on the terminal then
            output=create_output(always_prefer_tty=True),
        )

    def read(self, prompt: str) -> str:
        """See `Lines.read`."""
        return self._session.prompt(prompt)


def _keys() -> Any:
    """Return the keys beyond the usual: Alt+Enter breaks the line without sending it."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _remembered(history: LineHistory) -> Any:
    """Return a history of the line editor that is kept in our file."""
    from prompt_toolkit.history import History

    class Remembered(History):
        def load_history_strings(self) -> Iterable[str]:
            return reversed(history.read())

        def store_string(self, string: str) -> None:
            for line in string.splitlines():
                history.add(line)

    return Remembered()


def open_lines(history: LineHistory, words: Sequence[str]) -> Lines:
    """Return the lines of this program's user."""
    if sys.stdin.isatty():
        return EditedLines(history, words)
    return PipedLines(sys.stdin.buffer)
