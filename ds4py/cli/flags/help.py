"""`-h [TOPIC]`: the flags of a program, by topic.

Owns: the sections, the flag itself. Refuses to know: what the flags do. Invariant: every visible
flag stands in exactly one section; an unknown topic is no error
(docs/spec/server-and-cli.md#one-shot).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click

from ds4py.cli.exits import printable

F = TypeVar("F", bound=Callable[..., Any])


class TopicalCommand(click.Command):
    """A command whose help has sections that can be asked for.

    Args:
        topics: Topic -> names of its parameters. Others belong to the first one.
        texts: Topic -> a text of its own, shown when it is asked for.
        more: What click's commands take.
    """

    def __init__(
        self, *, topics: Mapping[str, Collection[str]], texts: Mapping[str, str], **more: Any
    ) -> None:
        super().__init__(**more | {"add_help_option": False})
        self.topics, self.texts = topics, texts

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write all sections; click calls it."""
        for topic in self.topics:
            self._write(topic, ctx, formatter)
        with formatter.section("Topics of --help"):
            formatter.write_text(", ".join([*self.topics, *self.texts, "all"]))

    def help_on(self, topic: str, ctx: click.Context) -> str:
        """Return the help on a topic; on everything for an empty or unknown one."""
        if topic in self.texts:
            return self.texts[topic]
        if topic in self.topics:
            formatter = ctx.make_formatter()
            self._write(topic, ctx, formatter)
            return formatter.getvalue().rstrip("\n")
        known = topic in ("", "all")
        notice = "" if known else f"No help on {printable(topic)}; here is all there is.\n\n"
        return notice + self.get_help(ctx)

    def _write(self, topic: str, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        listed = {name for names in self.topics.values() for name in names}
        first = next(iter(self.topics))
        records = [
            record
            for param in self.get_params(ctx)
            if param.name in self.topics[topic] or (topic == first and param.name not in listed)
            if (record := param.get_help_record(ctx)) is not None
        ]
        with formatter.section(topic.capitalize()):
            formatter.write_dl(records)


def help_option(function: F) -> F:
    """Add `-h/--help [TOPIC]` to a `TopicalCommand`."""
    return click.option(
        "-h",
        "--help",
        metavar="[TOPIC]",
        is_flag=False,
        flag_value="",
        is_eager=True,
        expose_value=False,
        callback=_show,
        help="Show this, or one section of it, and leave.",
    )(function)


def _show(ctx: click.Context, _: click.Parameter, topic: str | None) -> None:
    if topic is None or ctx.resilient_parsing:
        return
    assert isinstance(ctx.command, TopicalCommand)
    click.echo(ctx.command.help_on(topic, ctx))
    ctx.exit()
