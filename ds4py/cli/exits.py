"""How a program ends: exit statuses, and one clear line on stderr.

Owns: the map from errors to statuses (0 ok, 1 failed, 2 bad usage, 130 interrupted) and the form
`program: message`. Refuses to know: what the commands do. Invariant: an error that ds4py raises on
purpose never shows a traceback; any other error does, because it is a bug.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import click

from ds4py.errors import CancelledError, ConfigError, Ds4Error

OK: Final = 0
FAILED: Final = 1
BAD_USAGE: Final = 2
INTERRUPTED: Final = 130


def run(command: click.Command, program: str, args: Sequence[str] | None = None) -> NoReturn:
    """Run a command as the program and exit with its status; the body of every `main`.

    Args:
        command: A click command or group.
        program: Name that stands in usage and error lines.
        args: Arguments; None takes the process's own.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a narrow terminal encoding is no reason to die
            stream.reconfigure(errors="backslashreplace")
    leave(exit_status(command, program, args))


def leave(status: int) -> NoReturn:
    """End the process after all output; nothing else runs any more.

    The interpreter's own way out stops daemon threads wherever they are. One that is inside torch
    then takes the whole process down with an abort, after everything went well.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone: nobody to tell
            stream.flush()
    os._exit(status)


def exit_status(command: click.Command, program: str, args: Sequence[str] | None = None) -> int:
    """Run a command, tell errors on stderr, and return the exit status.

    A command may return an exit status of its own; None means 0.
    """
    try:
        result = command.main(args, prog_name=program, standalone_mode=False)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else program
        complain(program, f"{error.format_message()} Try '{where} --help'.")
        return BAD_USAGE
    except click.ClickException as error:
        complain(program, error.format_message())
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Ds4Error as error:
        complain(program, str(error))
        return _status(error)
    return result if isinstance(result, int) else OK


def _status(error: Ds4Error) -> int:
    match error:
        case ConfigError():
            return BAD_USAGE
        case CancelledError():  # only the user cancels a program's work
            return INTERRUPTED
        case _:
            return FAILED


def complain(program: str, message: str) -> None:
    """Write one line, `program: message`, to stderr."""
    click.echo(f"{program}: {printable(' '.join(message.split()))}", err=True)


def printable(text: str) -> str:
    """Return text from outside without anything that could steer a terminal or cannot be sent."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
