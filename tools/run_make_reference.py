"""Write docs/reference.md: what the programs say about themselves, and the tables around it.

    ./tools/make_reference [-o FILE]

Flags, their texts and their sections are taken from the click commands, so there is nothing to keep
up to date here but `reference_tables`. The same code makes the same bytes, whatever terminal it
runs in.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from ds4py.cli.bench import bench
from ds4py.cli.client import client
from ds4py.cli.flags.help import TopicalCommand
from ds4py.cli.main import ds4py
from ds4py.cli.server import server
from ds4py.config import read_environment
from tools.reference_tables import CODES, ENDPOINTS, EXITS, STATUSES, VARIABLES

FILE: Final = Path(__file__).parents[1] / "docs" / "reference.md"
PROGRAMS: Final[Mapping[str, click.Command]] = {
    "ds4py-server": server,
    "ds4py-cli": client,
    "ds4py-bench": bench,
    "ds4py": ds4py,
}
"""Every installed program."""

_HEAD: Final = """\
# Reference

Every flag of every program, the environment, exit statuses, and the paths of the HTTP server.
`./tools/make_reference` writes this file from the programs; do not edit it. In brackets behind a
text stands what holds without the flag.
"""
_ELSEWHERE: Final = (
    "Anything else, `HEAD` and a slash at the end included, is 404. `OPTIONS` of any path is 204."
)
_REFUSED: Final = "Answered by a reason instead of an effect, and not shown by `--help`: "
_UNWRAPPED: Final = "\b"
"""Begins a paragraph whose lines click leaves as they are."""


def reference() -> str:
    """Return the whole text."""
    parts = [
        _HEAD,
        _contents(),
        *(part for name, command in PROGRAMS.items() for part in _manual(name, command)),
        "## Environment",
        _table(("variable", "values", "meaning"), _variables()),
        "## Exit statuses",
        _table(("status", "when"), [(str(status), when) for status, when in EXITS.items()]),
        "## HTTP",
        _table(("method", "path", "what it is"), ENDPOINTS),
        _ELSEWHERE,
        _table(("status", "when"), [(str(status), when) for status, when in STATUSES.items()]),
        "`error.code`, where an error has one:",
        _table(("code", "status", "when"), [(f"`{name}`", *rest) for name, *rest in CODES]),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _contents() -> str:
    titles = [*PROGRAMS, "Environment", "Exit statuses", "HTTP"]
    return " · ".join(f"[{title}](#{title.lower().replace(' ', '-')})" for title in titles)


def _manual(
    name: str, command: click.Command, parent: click.Context | None = None
) -> Iterator[str]:
    """Yield the parts of a program's section, then those of its subcommands."""
    context = click.Context(command, parent, name, **command.context_settings)
    yield f"{'##' if parent is None else '###'} {context.command_path}"
    yield f"    {context.command_path} {' '.join(command.collect_usage_pieces(context))}"
    yield from _paragraphs(command.help or "")
    for title, params in _sections(command, context).items():
        yield f"**{title}**"
        yield _flags(params, context)
    for title, text in getattr(command, "texts", {}).items():
        yield f"**{title.capitalize()}**"
        yield "\n".join(["```", text, "```"])
    hidden = sorted(_hidden(command))
    if hidden:
        yield f"{_REFUSED}{_code(hidden)}."
    if isinstance(command, click.Group):
        for sub in command.list_commands(context):
            found = command.get_command(context, sub)
            if found is not None:
                yield from _manual(sub, found, context)


def _paragraphs(help_text: str) -> Iterator[str]:
    """Yield a help text's paragraphs; lines that must not be wrapped become a block."""
    for paragraph in inspect.cleandoc(help_text).split("\n\n"):
        first, *rest = paragraph.strip("\n").split("\n")
        if first.strip() == _UNWRAPPED:
            yield "\n".join(["```", *rest, "```"])
        else:
            yield " ".join([first, *rest])


def _sections(command: click.Command, context: click.Context) -> dict[str, list[click.Parameter]]:
    """Return the flags as `--help` groups them."""
    shown = [
        param
        for param in command.get_params(context)
        if isinstance(param, click.Option) and param.get_help_record(context) is not None
    ]
    if not isinstance(command, TopicalCommand):
        return {"Options": list(shown)}
    named = {name for names in command.topics.values() for name in names}
    first = next(iter(command.topics))
    return {
        topic.capitalize(): [
            param
            for param in shown
            if param.name in names or (topic == first and param.name not in named)
        ]
        for topic, names in command.topics.items()
    }


def _flags(params: Sequence[click.Parameter], context: click.Context) -> str:
    records = [record for p in params if (record := p.get_help_record(context)) is not None]
    return "\n".join(f"- `{flag}`: {' '.join(text.split())}" for flag, text in records)


def _hidden(command: click.Command) -> Iterator[str]:
    for param in command.params:
        if isinstance(param, click.Option) and param.hidden:
            yield from param.opts


def _variables() -> list[tuple[str, str, str]]:
    """Return the rows of the environment.

    Raises:
        ValueError: The programs read another set of variables than is described.
    """
    read = {*_read_by_config(), *_read_by_flags()}
    if read != VARIABLES.keys():
        odd = ", ".join(sorted(read ^ VARIABLES.keys()))
        raise ValueError(f"{odd}: read but not described in tools/reference_tables.py, or reverse")
    return [(f"`{name}`", *rest) for name, rest in VARIABLES.items()]


def _read_by_config() -> set[str]:
    """Return the names that `ds4py.config` asks an environment for."""
    asked: set[str] = set()

    class Asked(dict[str, str]):
        def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
            asked.add(key)
            return default

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return False

    read_environment(Asked())
    return asked


def _read_by_flags() -> set[str]:
    """Return the variables that stand for flags."""
    options = (param for command in PROGRAMS.values() for param in command.params)
    return {str(option.envvar) for option in options if option.envvar}


def _code(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write docs/reference.md from the programs.")
    parser.add_argument("-o", "--output", type=Path, default=FILE, help="where [docs/reference.md]")
    parser.parse_args(args).output.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
