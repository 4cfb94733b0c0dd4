"""`python -m interop.fuzz --seconds 60 --seed 1`: hostile input for decoders and live programs.

Owns: arguments, the table, the exit status. Refuses to know: how inputs are made and judged.
Invariant: the status is 0 exactly if every target bore every input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from interop.fuzz.campaign import Campaign, Tally
from interop.fuzz.live import LIVE
from interop.fuzz.pure import PURE
from interop.fuzz.saved import SAVED
from interop.fuzz.texts import TEXTS
from interop.fuzz.web import LiveHttp

TARGETS: Final = {target.name: target for target in (*PURE, *SAVED, *TEXTS, *LIVE, LiveHttp)}
_DAY: Final = 86400.0
_ROW: Final = "{:<13} {:>9} {:>9} {:>9} {:>8} {:>9} {:>9} {:>9}"
_HEAD: Final = _ROW.format(
    *("target", "inputs", "frames", "inputs/s", "checks", "outcomes", "peak KiB", "failures")
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(argv)
    print(_HEAD)
    tallies = []
    for tally in _repeated(options) if options.repeat else _fuzzed(options):
        print(row(tally), flush=True)
        for failure in tally.failures:
            print(f"  {failure}")
        if options.outcomes:
            print(f"  {dict(tally.outcomes.most_common())}")
        tallies.append(tally)
    n_inputs, n_frames = sum(t.n_inputs for t in tallies), sum(t.n_frames for t in tallies)
    n_failures = sum(len(t.failures) for t in tallies)
    print(f"{n_inputs} inputs, {n_frames} frames, {n_failures} failures")
    return 1 if n_failures else 0


def row(tally: Tally) -> str:
    """Return what a campaign did as one line of the table."""
    rate = tally.n_inputs / tally.seconds if tally.seconds else 0
    return _ROW.format(
        *(tally.name, tally.n_inputs, tally.n_frames, f"{rate:.0f}", tally.n_checks),
        *(len(tally.outcomes), tally.peak_bytes >> 10, len(tally.failures)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="interop.fuzz", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--seconds", type=float, metavar="S", help="for all targets together (60 without --frames)")
    add("--frames", type=int, metavar="N", help="for each target; what comes first ends it")
    add("--seed", type=int, default=1, metavar="N", help="equal seeds make equal inputs")
    names = ", ".join(TARGETS)
    add("--target", nargs="+", choices=TARGETS, metavar="NAME", help=f"all, or some of {names}")
    add("--keep", type=Path, default=Path("build/fuzz"), help="where failing inputs are written")
    add("--repeat", nargs="+", type=Path, metavar="FILE", help="give these inputs and no others")
    add("--outcomes", action="store_true", help="show how frames ended")
    return parser


def _fuzzed(options: argparse.Namespace) -> Iterator[Tally]:
    names = options.target or list(TARGETS)
    seconds = options.seconds or (_DAY if options.frames else 60.0)
    for name in names:
        campaign = Campaign(TARGETS[name](), options.seed, options.keep)
        yield campaign.run(seconds=seconds / len(names), frames=options.frames or float("inf"))


def _repeated(options: argparse.Namespace) -> Iterator[Tally]:
    """Give saved inputs to the targets that their names begin with."""
    for name, target in TARGETS.items():
        files = [file for file in options.repeat if file.name.partition("-")[0] == name]
        if files:
            campaign = Campaign(target(), options.seed, options.keep)
            yield campaign.repeat([file.read_bytes() for file in files])


if __name__ == "__main__":
    sys.exit(main())
