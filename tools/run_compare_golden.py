"""The comparison behind ./tools/compare_golden.

For both tiny models that the C engine was recorded with:

- each half of each layer with recorded inputs, for the prompts whose states were recorded at every
  position: relative RMS of the state after it. A wrong formula shows in the median; single
  positions are off by a rounding step now and then.
- end to end, for every prompt: relative RMS of the logits, beside the spread of the engine's
  disturbed runs and what its other build has; and how many greedy tokens are equal from the first
  on, beside the steps on which the disturbed runs agree. The noise hides small errors here.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tests.support.golden_compare import (
    N_GREEDY,
    VARIANTS,
    Prompt,
    Spread,
    TinyModel,
    errors,
    forced,
    prompts,
    recordings,
    relative_rms,
)


def spread_cells(*parts: np.ndarray) -> list[str]:
    spread = Spread.of(parts)
    return [f"{value:.1e}" for value in (spread.median, spread.p99, spread.largest)]


def halves_table(model: TinyModel, variant: str, chosen: list[str]) -> Table:
    table = Table("prompt", "layer", title=f"tiny-{variant}: halves of layers with recorded inputs")
    for half in ("attention", "feed-forward"):
        for what in ("median", "p99", "max"):
            table.add_column(f"{half}\n{what}", justify="right")
    found = []
    for name, recording in recordings(variant).items():
        if name not in chosen:
            continue
        found.append(errors(forced(model.session(), recording), recording))
        layers = zip(found[-1].attention, found[-1].feed_forward, strict=True)
        for layer, (attention, feed_forward) in enumerate(layers):
            table.add_row(name, str(layer), *spread_cells(attention), *spread_cells(feed_forward))
        table.add_section()
    attention, feed_forward = [e.attention for e in found], [e.feed_forward for e in found]
    table.add_row("all", "all", *spread_cells(*attention), *spread_cells(*feed_forward))
    return table


def logits_table(model: TinyModel, variant: str, chosen: list[str]) -> Table:
    table = Table("prompt", title=f"tiny-{variant}: end to end")
    columns = ("logits\nrel. RMS", "engine's\nspread", "engine's\nother build", "best\nlogit")
    columns += ("greedy tokens\nequal", "engine's\nstable steps")
    for column in columns:
        table.add_column(column, justify="right")
    recorded = [prompt for name, prompt in prompts(variant).items() if name in chosen]
    sessions = [model.session() for _ in recorded]
    logits = np.stack([s.feed(p.tokens) for s, p in zip(sessions, recorded, strict=True)])
    tokens = model.greedy(sessions, logits, N_GREEDY)
    for prompt, own_logits, own_tokens in zip(recorded, logits, tokens, strict=True):
        table.add_row(prompt.name, *end_to_end_cells(prompt, own_logits, own_tokens))
    return table


def end_to_end_cells(prompt: Prompt, logits: np.ndarray, tokens: np.ndarray) -> list[str]:
    level = np.sqrt(np.square(prompt.logits).mean())
    differs = np.append(tokens != prompt.greedy, True)
    return [
        f"{relative_rms(logits, prompt.logits):.2%}",
        f"{prompt.noise_rms / level:.2%}",
        f"{relative_rms(prompt.other_logits, prompt.logits):.2%}",
        "same" if logits.argmax() == prompt.logits.argmax() else "other",
        str(differs.argmax()),
        str(prompt.stable_steps),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--act-quant", choices=["cpu", "none"], default="cpu")
    parser.add_argument("--prompt", choices=list(prompts("a")), help="this one only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [options.prompt] if options.prompt else list(prompts("a"))
    console = Console(width=110)
    for variant in VARIANTS:
        model = TinyModel(variant, options.precision, options.act_quant)
        if recordings(variant).keys() & set(chosen):
            console.print(halves_table(model, variant, chosen))
        console.print(logits_table(model, variant, chosen))


if __name__ == "__main__":
    main()
