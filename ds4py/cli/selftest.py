"""`ds4py selftest`: whether this processor computes what it should.

Owns: the lines and the JSON object. Refuses to know: kernels. Invariant: exit status 1 if a kernel
differs from torch, which then is left out by every later program of this user on this machine.
"""

from __future__ import annotations

import dataclasses
import json

import click

from ds4py import __version__
from ds4py.cli.flags.shared import CONTEXT_SETTINGS


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def selftest(as_json: bool) -> None:
    """Compare every CPU kernel with torch on this processor.

    Kernels are compiled for the processor at hand when a model first needs them, and compared then
    too; this command compares all of them now, whatever earlier runs have found. A kernel that
    differs is left out from then on, and torch computes in its place.
    """
    from ds4py.runtime import run_selftest

    processor, kernels = run_selftest()
    where = f"ds4py {__version__} on {processor}"
    found = []
    if not as_json:
        click.echo(where)
    for kernel in kernels:
        found.append(kernel)
        if not as_json:
            verdict = "ok" if kernel.is_right else "DIFFERS"
            click.echo(
                f"{verdict:8}{kernel.name}: off by {kernel.error:.1e}, at most {kernel.limit:.0e} "
                f"({kernel.seconds:.2f} s)"
            )
    wrong = [kernel.name for kernel in found if not kernel.is_right]
    if as_json:
        rows = [dataclasses.asdict(kernel) for kernel in found]
        click.echo(json.dumps({"where": where, "kernels": rows, "left_out": wrong}))
    elif wrong:
        click.echo(f"{len(wrong)} of {len(found)} kernels are left out; please report these lines")
    else:
        click.echo(f"all {len(found)} kernels compute as torch does")
    if wrong:
        raise SystemExit(1)
