"""The file of lines that were typed, shared by all chats of a user and with ds4.

Owns: `.ds4_history` (docs/spec/server-and-cli.md#interactive): an entry per line, the newest last.
Refuses to know: terminals, what lines mean. Invariant: the file is replaced as a whole and is its
owner's alone; one that cannot be read or written costs the history, never the chat.
"""

from __future__ import annotations

import logging
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

LIMIT: Final = 512
"""Entries that are kept."""

_MAX_BYTES: Final = 4 << 20  # read from the end of a file; entries are lines that were typed
_NAME: Final = ".ds4_history"


def default_path() -> Path | None:
    """Return the file in the home directory; None for users without one."""
    try:
        return Path.home() / _NAME
    except RuntimeError:
        return None


class LineHistory:
    """Lines that were typed, over all chats.

    Args:
        path: The file; it need not exist. None remembers nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> list[str]:
        """Return the entries, the newest last."""
        if self._path is None:
            return []
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _MAX_BYTES))
                raw = file.read(_MAX_BYTES)
        except FileNotFoundError:
            return []
        except OSError as e:
            self._give_up(e)
            return []
        lines = raw.decode("utf-8", "replace").split("\n")
        return [line for line in lines if line][-LIMIT:]

    def add(self, entry: str) -> None:
        """Append an entry that has one line; empty ones and repetitions of the last are left out.

        The file is read again first: another chat may have added to it.
        """
        entries = self.read()
        if self._path is None or not entry or entries[-1:] == [entry]:
            return
        try:
            _replace(self._path.resolve(), "".join(f"{e}\n" for e in [*entries, entry][-LIMIT:]))
        except OSError as e:
            self._give_up(e)

    def _give_up(self, error: OSError) -> None:
        _log.warning("%s: %s; lines are not remembered", self._path, error.strerror)
        self._path = None


def _replace(path: Path, text: str) -> None:
    """Write a file that only its owner may read, all of it or nothing."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        fresh = Path(file.name)
        try:
            file.write(text.encode("utf-8", "replace"))
            file.close()
            fresh.replace(path)
        except OSError:
            with suppress(OSError):
                fresh.unlink()
            raise
