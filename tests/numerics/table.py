"""`python -m tests.numerics.table`: prove every row of the matrix, write docs/numerics.md.

Owns: the table's words. Refuses to know: how a row is proved. Invariant: rows, flags and tolerances
follow from `modes` alone, so that the committed table can be compared with them; what was measured
is of one run on one processor.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from tests.numerics.measure import WRONG, Found, files_of, measure
from tests.numerics.modes import MODES, SIZES, Mode, choices, defaults, row_of

TABLE: Final = Path(__file__).parents[2] / "docs" / "numerics.md"

_INTRODUCTION: Final = """\
# What is computed, and how exactly

Written by `python -m tests.numerics.table`; do not edit. It proves every way to compute that a
user can choose on a CPU against a reference that reads one token at a time in plain NumPy
(`tests/unit/models/deepseek4_reference.py`, `llama_reference.py`, `decoder_reference.py`), with
batches of {sizes} rows:

- as the first tokens of a session (span), behind the tokens that a session has (tail), and as one
  token of each of so many sessions at different positions (sessions);
- **state**: each layer is given the reference's states and caches, and every row of its result is
  compared;
- **logits**: the same for the output head;
- **free**: the logits when tokens run through all layers, the median over the batches of a
  situation; over three stages they are equal bit by bit to those of one;
- **golden**: the logits after every recorded prompt of ds4's C engine, whole and with last spans
  of 1 to 13 tokens, as RMS (the spread of those logits is 3.2, and the engine's own builds differ
  by up to 0.42); the first token is the engine's unless two are nearer to each other than three
  times the noise.

Caches of another type than the products are proved with llama: the other plain blocks run through
the same code.

Numbers are relative RMS: measured / allowed. "Judged" is the part of the rows where no choice of
experts or index rows was so close that rounding may decide it; the others only must not be off by
more than {wrong}.

| architecture | flags | default | judged | state | logits | free | golden |
|---|---|---|--:|--:|--:|--:|--:|
"""

_END: Final = """
Files: {files}. Measured with torch {torch}.

On a GPU the defaults are the same, bf16 without rounding of activations; `./tools/gpu_check`
compares its results with those of the CPU.
"""


def render(found: Mapping[str, Found] | None) -> str:
    """Return the document; without results, with gaps in their places."""
    rows = [_row(mode, None if found is None else found[mode.name]) for mode in MODES]
    files = "; ".join(f"{mode.name}: {', '.join(files_of(mode))}" for mode in MODES)
    head = _INTRODUCTION.format(sizes=_sizes(), wrong=WRONG)
    return head + "".join(rows) + _END.format(files=files, torch=torch.__version__.split("+")[0])


def without_measurements(text: str) -> str:
    """Return a document with gaps in place of what was measured."""
    text = re.sub(r"Measured with torch \S+", "Measured with torch", text)
    text = re.sub(r"\| \d+ % \|", "|  |", text)
    return re.sub(r"\| [\d.e+-]+ / ", "|  / ", text)


def measured(text: str) -> list[tuple[float, float]]:
    """Return all pairs (measured, allowed) of a document."""
    pairs = re.findall(r"\| ([\d.e+-]+) / ([\d.e+-]+) (?=\|)", text)
    return [(float(one), float(limit)) for one, limit in pairs]


def _sizes() -> str:
    return "1 to 17, 31 to 33, 63 to 65 and 128" if len(SIZES) == 24 else str(SIZES)


def _row(mode: Mode, found: Found | None) -> str:
    limits, cells = mode.tolerance, []
    for name in ("state", "logits", "free", "golden"):
        limit = getattr(limits, name)
        value = "" if found is None else f"{getattr(found, name):.1e}"
        cells.append(f"{value} / {limit:.1e}" if limit else "")
    judged = "" if found is None else f"{100 * found.judged:.0f} %"
    is_default = any(row_of(choice) is mode for choice in defaults())
    return (
        f"| `{mode.architecture}` | {_flags(mode)} | {'yes' if is_default else ''} "
        f"| {judged} | {' | '.join(cells)} |\n"
    )


def _flags(mode: Mode) -> str:
    """Return the fewest flags that choose a mode."""
    ways = [
        [
            f"`--{name} {value}`"
            for name, value in (
                ("precision", choice.precision),
                ("act-quant", choice.act_quant),
                ("kv-type", choice.kv_type),
            )
            if value != "auto"
        ]
        for choice in choices()
        if row_of(choice) is mode
    ]
    return " ".join(min(ways, key=len)) or "none"


def main() -> int:
    """Write the table; return 1 if something is too far from the reference."""
    torch.set_num_threads(1)
    found = {}
    for mode in MODES:
        print(mode.name, flush=True)  # noqa: T201 - progress of a command
        found[mode.name] = measure(mode)
        for fault in found[mode.name].faults:
            print(f"  {fault}", flush=True)  # noqa: T201
    TABLE.write_text(render(found), encoding="utf-8")
    return int(any(one.faults for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
