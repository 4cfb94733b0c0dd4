"""`python -m interop.live`: run ds4 and ds4py processes in one route and compare what they answer.

    python -m interop.live                       ds4py alone, on a small model made for the purpose
    python -m interop.live --rows 'py-py-2-*'    some rows, by COORDINATOR-WORKERS-HOPS-BITS-CASE
    python -m interop.live --model M.gguf --c-coordinator "CMD ..." --c-worker "CMD ..."

Each route answers greedily in three cases: a short prompt, a prompt of several chunks, and a later
turn of a conversation, before which the last worker was killed and started again. At 32 bits the
answer must be that of one process of the coordinator's kind; at 16 and 8 bits that of ds4py in one
process with the same cuts and rounding, and how long it is the answer without rounding is shown as
drift. ds4py alone must say the same to the end. A route with ds4 must do so up to the first near
tie, where the two best logits are nearer than a margin: other arithmetic may choose the other one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from ds4py.config import EngineConfig
from ds4py.engine.open import read_model
from ds4py.errors import Ds4Error
from interop.live.cluster import LiveError, Setting
from interop.live.commands import COORDINATOR, EXAMPLES, PLACEHOLDERS, WORKER, check, ours
from interop.live.matrix import PY, C
from interop.live.run import NOT_RUN, Row, rows
from tools.toy_deepseek4 import toy_deepseek4

VARIABLES: Final = {COORDINATOR: "DS4_LIVE_COORDINATOR", WORKER: "DS4_LIVE_WORKER"}
_ROW: Final = "{:<11} {:<7} {:>4} {:>4}  {:<8} {}"
_HEAD: Final = _ROW.format("coordinator", "workers", "hops", "bits", "case", "result")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 if no row that was run failed, 1 if one did, 2 if nothing can be compared.
    """
    asked = parse(argv)
    try:
        with ExitStack() as stack:
            folder = asked.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            results = report(asked, folder)
    except (Ds4Error, LiveError) as error:
        print(f"interop.live: {error}", file=sys.stderr)
        return 2
    if any(row.verdict == NOT_RUN for row in results):
        print(how_to_give_ds4())
    return 1 if any(row.verdict.fine is False for row in results) else 0


def report(asked: argparse.Namespace, folder: Path) -> list[Row]:
    """Print the table, row by row, and return it."""
    setting = settle(asked, folder)
    print(_HEAD)
    results = []
    for row in rows(setting, asked.rows):
        route = row.route
        parts = (route.coordinator, route.workers, route.n_hops, route.bits, row.case)
        print(_ROW.format(*parts, row.verdict.words), flush=True)
        results.append(row)
    return results


def settle(asked: argparse.Namespace, folder: Path) -> Setting:
    """Return what all routes share; without a model, one is made in the folder."""
    commands = {(PY, role): ours(role) for role in VARIABLES}
    for role, given in ((COORDINATOR, asked.c_coordinator), (WORKER, asked.c_worker)):
        if given:
            commands[C, role] = check(given, role)
    folder.mkdir(parents=True, exist_ok=True)
    model = asked.model or toy_deepseek4(folder / "toy.gguf")
    card, n_ctx = read_model(EngineConfig(model=model, n_ctx=asked.ctx))
    return Setting(
        model=model,
        n_layers=card.n_layers,
        n_ctx=n_ctx,
        chunk=asked.chunk,
        n_tokens=asked.tokens,
        deadline=asked.deadline,
        commands=commands,
        folder=folder,
    )


def how_to_give_ds4() -> str:
    """Say how the rows of ds4 can be run."""
    lines = ["", "This project has no ds4 programs. To run their rows too, give their commands:"]
    for role, variable in VARIABLES.items():
        lines += [f"  --c-{role} or {variable}, such as", f'    "{EXAMPLES[role]}"', "    where"]
        lines += [f"      {{{name}}}: {what}" for name, what in PLACEHOLDERS[role].items()]
    return "\n".join(
        [
            *lines,
            "A ds4 coordinator is its server program. ds4 evaluates layers only in builds with a",
            "GPU, and knows only its own models: give one with --model, and a --deadline for its",
            "loading. Every process gets a DS4_LOCK_FILE of its own.",
        ]
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments; commands may come from the environment instead."""
    parser = argparse.ArgumentParser(
        prog="python -m interop.live",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=how_to_give_ds4(),
    )
    parser.add_argument("--model", type=Path, help="GGUF file [a tiny DeepSeek V4]")
    for role, variable in VARIABLES.items():
        default = os.environ.get(variable)
        parser.add_argument(f"--c-{role}", metavar="CMD", default=default, help=f"of ds4's {role}")
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="[all]")
    parser.add_argument("--ctx", type=int, default=1024, help="tokens per session [1024]")
    parser.add_argument("--chunk", type=int, default=64, help="prompt tokens per chunk [64]")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer [24]")
    parser.add_argument("--deadline", type=float, default=120, help="seconds per answer [120]")
    parser.add_argument("--logs", type=Path, help="folder to keep the logs in")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
