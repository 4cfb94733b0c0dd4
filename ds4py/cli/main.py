"""The `ds4py` command: tools around a model; `ds4py-server` and `ds4py-cli` are other programs.

Owns: the group and its version. Refuses to know: what the subcommands do. Invariant: imports
nothing heavy.
"""

from __future__ import annotations

from typing import NoReturn

import click

from ds4py import __version__
from ds4py.cli import exits
from ds4py.cli.diagnostics.inspect import inspect
from ds4py.cli.selftest import selftest


@click.group(
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="ds4py")
def ds4py() -> None:
    """Tools for models that are cut by layers over several machines.

    Serve with ds4py-server, ask with ds4py-cli.
    """


ds4py.add_command(inspect)
ds4py.add_command(selftest)


def main() -> NoReturn:
    """Run `ds4py`."""
    exits.run(ds4py, "ds4py")
