"""Where a question comes from: a flag, a file, ids, or stdin.

Owns: reading and checking it. Refuses to know: who answers. Invariant: a question that is returned
has something in it, and came from the one place that was named.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from ds4py.cli.chat.printing import Question
from ds4py.errors import ConfigError

_MAX_BYTES: Final = 64 << 20


def read_question(given: dict[str, float | int], **flags: Any) -> Question:
    """Take the question from the one place that was named.

    A text that spells DeepSeek's first token is a whole prompt, as in ds4.

    Args:
        given: Sampling flags.
        flags: The others.

    Raises:
        ConfigError: Several places, none, an unreadable file, or ids that are no numbers.
    """
    prompt, path, ids = flags["prompt"], flags["prompt_file"], flags["prompt_ids"]
    if sum(value is not None for value in (prompt, path, ids)) > 1:
        raise ConfigError("give one of --prompt, --prompt-file and --prompt-ids")
    text = None if ids is not None else prompt
    if path is not None:
        text = read_text(path, "--prompt-file")
    elif text is None and ids is None:
        text = _read_stdin()
    from ds4py.text.tokenizer.deepseek4_tokens import Marker

    return Question(
        text=text,
        ids=None if ids is None else _parse_ids(ids),
        system=flags["system"],
        raw=flags["raw"] or (text or "").startswith(Marker.BOS),
        max_tokens=flags["max_tokens"],
        sampling=given,
        think=flags["think"],
    )


def read_text(path: Path, why: str) -> str:
    """Return the text of a file.

    Args:
        path: The file.
        why: The flag or command that named it.

    Raises:
        ConfigError: It cannot be read, is too long, empty, or no UTF-8.
    """
    try:
        with path.open("rb") as file:
            return _text(file.read(_MAX_BYTES + 1), str(path))
    except OSError as e:
        raise ConfigError(f"{why} {path}: {e.strerror}") from e


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise ConfigError("no question: give --prompt, --prompt-file, --prompt-ids or pipe one in")
    return _text(sys.stdin.buffer.read(_MAX_BYTES + 1), "stdin")


def _text(raw: bytes, source: str) -> str:
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{source}: more than {_MAX_BYTES >> 20} MiB of prompt")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{source}: not UTF-8 text (byte {e.start}); convert it first") from e
    if not text.strip():
        raise ConfigError(f"{source}: the question is empty")
    return text


def _parse_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts):
        raise ConfigError(f"--prompt-ids {text!r}: expected token ids such as 0,108")
    return tuple(int(part) for part in parts)
