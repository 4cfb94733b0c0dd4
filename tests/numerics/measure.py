"""How far one row of the matrix is from the reference, in numbers, and what of it is too far.

Owns: running a mode over files and situations, the verdict. Refuses to know: pytest, documents.
Invariant: a row's numbers come from runs of the product's own runner, none from the tolerances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ds4py.contracts import ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner
from tests.numerics.drive import (
    SITUATIONS,
    Rows,
    batches,
    forced_layer,
    forced_logits,
    free_logits,
    stages,
)
from tests.numerics.modes import SIZES, Mode
from tests.numerics.truths import FILES, Truth, truth
from tests.support.golden_compare import Prompt, prompts

N_STAGES = 3
WRONG = 0.35
"""Relative RMS that no row may have, judged or not: another choice of experts gives half of it."""

LAST_SPANS = (1, 2, 3, 5, 12, 13)
"""Sizes of the last span of a recorded prompt."""
NEAR_TIE = 3.0
"""Times the noise of a logit: tokens that are nearer to each other may change places."""

MAIN = {"deepseek4-f32-rounded-kv-own", "deepseek4-bf16-kv-own", "llama-f32-kv-f32"} | {
    "llama-bf16-kv-bf16"
}
"""Rows that are proved with every file: what a user gets by `--precision` alone."""


@dataclass
class Found:
    """What one mode gave.

    Attributes:
        state: Largest error of a judged row's state that is no stray.
        logits: Largest error of a judged row's logits.
        free: Largest median of the logits' errors over the spans of a situation.
        golden: Largest RMS to the recorded logits; 0 without recordings.
        judged: Part of the rows that were judged.
        faults: Sentences that say what is too far; none is good.
    """

    state: float = 0.0
    logits: float = 0.0
    free: float = 0.0
    golden: float = 0.0
    judged: float = 1.0
    faults: list[str] = field(default_factory=list)


def files_of(mode: Mode) -> Sequence[str]:
    """Return the files that a mode is proved with."""
    files = FILES[mode.architecture]
    return files if mode.name in MAIN else files[:1]


def measure(mode: Mode, sizes: Sequence[int] = SIZES) -> Found:
    """Run all of a mode."""
    found, judged = Found(), []
    for file in files_of(mode):
        exact = truth(file, rounds=mode.rounds)
        judged += measure_layers(mode, file, exact, found, sizes)
        measure_chains(mode, file, exact, found, sizes)
        if file.startswith("tiny"):
            measure_golden(mode, file, found)
    found.judged = float(np.mean(judged))
    return found


def measure_layers(
    mode: Mode,
    file: str,
    exact: Truth,
    found: Found,
    sizes: Sequence[int] = SIZES,
    situations: Sequence[str] = SITUATIONS,
) -> list[float]:
    """Give every layer the reference's states, at every size of a batch.

    Returns:
        What part of each batch's rows was judged.
    """
    judged = []
    with stages(mode, file, exact.n_layers, exact.n_layers) as layers:
        for situation in situations:
            plan = batches(situation, sizes)
            runs = [forced_layer(runner, exact, layer, plan) for layer, runner in enumerate(layers)]
            for of_layers in zip(*runs, strict=True):
                where = f"{mode.name} {file}: {situation} of {of_layers[0].batch.n_rows} rows"
                judged.append(_judge_states(mode, exact, of_layers, found, where))
            for rows in forced_logits(layers[-1], exact, plan):
                where = f"{mode.name} {file}: {situation} of {rows.batch.n_rows} rows"
                _judge_logits(mode, exact, rows, found, where)
    return judged


def _judge_states(
    mode: Mode, exact: Truth, of_layers: Sequence[Rows], found: Found, where: str
) -> float:
    errors = np.stack([rows.errors for rows in of_layers])
    at = of_layers[0].positions
    sure = exact.gaps[:, at] > mode.tolerance.unsure
    if not errors.max() < WRONG:
        found.faults.append(f"{where}: state off by {errors.max():.2g}")
    own = np.sort(errors[sure])
    n_strays = int(max(1, mode.tolerance.strays * own.size)) if mode.tolerance.strays else 0
    strict = own[: own.size - n_strays]
    if strict.size:
        worst = float(strict[-1])
        found.state = max(found.state, worst)
        if worst > mode.tolerance.state:
            layer = int(np.where(sure, errors, 0).max(1).argmax())
            found.faults.append(f"{where}: state off by {worst:.2g}, most in layer {layer}")
    return float(sure.mean())


def _judge_logits(mode: Mode, exact: Truth, rows: Rows, found: Found, where: str) -> None:
    sure = exact.gaps[-1, rows.positions] > mode.tolerance.unsure
    own = rows.errors[sure]
    if own.size:
        worst = float(own.max())
        found.logits = max(found.logits, worst)
        if not worst <= mode.tolerance.logits:
            found.faults.append(f"{where}: logits off by {worst:.2g}")


def measure_chains(
    mode: Mode, file: str, exact: Truth, found: Found, sizes: Sequence[int] = SIZES
) -> None:
    """Run tokens through one stage and through three, which must give the same bits."""
    one = stages(mode, file, exact.n_layers, 1)
    three = stages(mode, file, exact.n_layers, N_STAGES)
    with one as whole, three as parts:
        for situation in SITUATIONS:
            plan, errors = batches(situation, sizes), []
            runs = (free_logits(chain, exact, plan) for chain in (whole, parts))
            for alone, cut in zip(*runs, strict=True):
                if not np.array_equal(alone.got, cut.got):
                    where = f"{mode.name} {file}: {situation} of {alone.batch.n_rows} rows"
                    found.faults.append(f"{where}: other logits with {N_STAGES} stages")
                errors.append(float(np.median(alone.errors)))
            usual = float(np.median(errors))
            found.free = max(found.free, usual)
            if not usual <= mode.tolerance.free:
                found.faults.append(f"{mode.name} {file}: {situation}: logits off by {usual:.2g}")


# --- recordings of the C engine ------------------------------------------------------------------


def measure_golden(mode: Mode, file: str, found: Found) -> None:
    """Evaluate every recorded prompt, whole and with last spans of some sizes."""
    with stages(mode, file, truth(file, rounds=mode.rounds).n_layers, 1) as (runner,):
        for prompt in prompts(file[-1]).values():
            for size, logits in _endings(runner, prompt.tokens):
                where = f"{mode.name} {file}: {prompt.name}, last span of {size}"
                _judge_golden(mode, prompt, logits, found, where)


def _judge_golden(mode: Mode, prompt: Prompt, logits: np.ndarray, found: Found, where: str) -> None:
    off = float(np.sqrt(np.square(logits - prompt.logits).mean()))
    found.golden = max(found.golden, off)
    if not off <= mode.tolerance.golden:
        found.faults.append(f"{where}: logits off by {off:.2g}")
    # what a run is off by tells how near two tokens must be to change places
    is_clear = prompt.gaps[0] > NEAR_TIE * max(prompt.usual_noise_rms, off)
    if is_clear and logits.argmax() != prompt.greedy[0]:
        found.faults.append(f"{where}: token {logits.argmax()}, expected {prompt.greedy[0]}")


def _endings(runner: LocalRunner, tokens: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield sizes of the last span with the logits after it."""
    session = SessionId(1)
    yield len(tokens), _logits(runner, session, tokens, 0)
    common = max(len(tokens) - max(LAST_SPANS), 0)
    runner.drop(session)
    if common:
        _logits(runner, session, tokens[:common], 0)
    for number, size in enumerate((size for size in LAST_SPANS if size < len(tokens)), 2):
        own, cut = SessionId(number), len(tokens) - size
        if common:
            runner.fork(session, own, common)
        if common < cut:
            _logits(runner, own, tokens[common:cut], common)
        yield size, _logits(runner, own, tokens[cut:], cut)
        runner.drop(own)
    runner.drop(session)


def _logits(
    runner: LocalRunner, session: SessionId, tokens: Sequence[int], pos0: int
) -> np.ndarray:
    work = ForwardRequest(
        session=session, tokens=tuple(tokens), pos0=pos0, hidden=None, output_kind=OutputKind.LOGITS
    )
    (output,) = runner.run([work])
    return output.logits
