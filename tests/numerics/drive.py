"""Run one row of the matrix: every number of rows, in every place that a batch has them.

Owns: the three situations, feeding layers with the reference's states, chains of stages. Refuses to
know: tolerances. Invariant: all goes through `LocalRunner`, as a user's spans do.

| situation | a batch of n rows is |
|---|---|
| span | the first n tokens of a session |
| tail | n tokens behind those that a session has |
| sessions | one token of each of n sessions, at n different positions |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ds4py.activations import HiddenBatch
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.layer_range import LayerSpec
from tests.numerics.modes import SIZES, Mode
from tests.numerics.truths import F32, Truth, path_of

SITUATIONS = ("span", "tail", "sessions")
N_CTX = 512

_TAILS = ((5, 128, 65, 64, 33), (5, 63, 32, 31, *range(17, 0, -1)))
_PREPARED = (32, 64, 150, 270)
"""Positions up to which sessions are evaluated, before others copy a little less of them."""
_ROUNDS_BACK = 32
_LOGITS = 1000
"""Added to a session's number: its twin, which is asked for logits instead of states."""


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of one session inside a batch."""

    session: int
    start: int
    n_tokens: int

    @property
    def positions(self) -> range:
        """Where the tokens are."""
        return range(self.start, self.start + self.n_tokens)


@dataclass(frozen=True)
class Batch:
    """What is evaluated together; `copies` are sessions that begin as others, before it.

    Args:
        parts: Of different sessions.
        judged: Whether its results count; else it only prepares.
        copies: From which session, to which, how many tokens.
    """

    parts: Sequence[Part]
    judged: bool = True
    copies: Sequence[tuple[int, int, int]] = ()

    @property
    def n_rows(self) -> int:
        """Rows of all parts."""
        return sum(part.n_tokens for part in self.parts)


def batches(situation: str, sizes: Sequence[int] = SIZES) -> list[Batch]:
    """Return the batches of a situation, in order."""
    if situation == "span":
        return [Batch([Part(number, 0, size)]) for number, size in enumerate(sizes)]
    if situation == "tail":
        return [*_tails(sizes)]
    return [*_sessions(sizes)]


def _tails(sizes: Sequence[int]) -> Iterator[Batch]:
    for session, spans in enumerate(_TAILS):
        at = 0
        for size in spans:
            if at == 0 or size in sizes:
                yield Batch([Part(session, at, size)], judged=at > 0)
                at += size


def _sessions(sizes: Sequence[int]) -> Iterator[Batch]:
    sources = range(200, 200 + len(_PREPARED))
    for source, length in zip(sources, _PREPARED, strict=True):
        yield Batch([Part(source, 0, length)], judged=False)
    lengths: dict[int, int] = {}
    copies = []
    for number in range(max(sizes)):
        which, back = number % len(_PREPARED), number // len(_PREPARED)
        lengths[number] = _PREPARED[which] - back % _ROUNDS_BACK
        copies.append((sources[which], number, lengths[number]))
    for size in sizes:
        yield Batch([Part(one, lengths[one], 1) for one in range(size)], copies=copies)
        copies = []
        for one in range(size):
            lengths[one] += 1


# --- running -------------------------------------------------------------------------------------


def _cuts(n_layers: int, n_stages: int) -> list[LayerSpec]:
    ends = [n_layers * number // n_stages for number in range(n_stages + 1)]
    return [LayerSpec.parse(f"{a}-{b - 1}") for a, b in pairwise(ends)]


@contextmanager
def stages(mode: Mode, file: str, n_layers: int, n_stages: int) -> Iterator[list[LocalRunner]]:
    """Open a chain of stages."""
    config = mode.config(model=path_of(file), n_ctx=None, n_slots=300)
    runners = [open_runner(config, spec) for spec in _cuts(n_layers, n_stages)]
    try:
        yield runners
    finally:
        for runner in runners:
            runner.close()


def _run(runner: LocalRunner, works: Sequence[ForwardRequest]) -> list[ForwardOutput]:
    found = runner.run(works)
    for one in found:
        if not isinstance(one, ForwardOutput):
            raise one
    return found


def _copy(runner: LocalRunner, batch: Batch, shift: int = 0) -> None:
    for source, target, n_tokens in batch.copies:
        runner.fork(SessionId(source + shift), SessionId(target + shift), n_tokens)


def _drop_all(runner: LocalRunner) -> None:
    for shift in (0, _LOGITS):
        for session in range(300):
            runner.drop(SessionId(session + shift))


@dataclass(frozen=True)
class Rows:
    """Results of a batch's rows beside the reference's, `[n, width]`, and their positions."""

    batch: Batch
    got: F32
    expected: F32
    positions: npt.NDArray[np.int64]

    @property
    def errors(self) -> npt.NDArray[np.float64]:
        """Relative RMS of every row; infinity where a number is none."""
        exact = self.expected.astype(np.float64)
        off = np.square(self.got.astype(np.float64) - exact).mean(1)
        return np.nan_to_num(np.sqrt(off / np.square(exact).mean(1)), nan=np.inf)


def forced_layer(
    runner: LocalRunner, truth: Truth, layer: int, plan: Sequence[Batch]
) -> Iterator[Rows]:
    """Give one layer the reference's states; return its states after every judged batch."""
    _drop_all(runner)
    for batch in plan:
        _copy(runner, batch)
        outputs = _run(runner, _works(truth, batch, layer, OutputKind.HIDDEN))
        if batch.judged:
            got = [one.hidden.unpack() for one in outputs]
            yield _rows(batch, np.concatenate(got), truth.after[layer])


def forced_logits(runner: LocalRunner, truth: Truth, plan: Sequence[Batch]) -> Iterator[Rows]:
    """Give the last layer the reference's states; return the logits of every part's last row."""
    _drop_all(runner)
    for batch in plan:
        _copy(runner, batch, _LOGITS)
        works = _works(truth, batch, truth.n_layers - 1, OutputKind.LOGITS, _LOGITS)
        outputs = _run(runner, works)
        if batch.judged:
            yield _last_rows(batch, np.stack([one.logits for one in outputs]), truth)


def free_logits(
    chain: Sequence[LocalRunner], truth: Truth, plan: Sequence[Batch]
) -> Iterator[Rows]:
    """Run tokens through a chain; return the logits of every part's last row."""
    for runner in chain:
        _drop_all(runner)
    for batch in plan:
        for runner in chain:
            _copy(runner, batch)
        hidden: list[HiddenBatch | None] = [None] * len(batch.parts)
        outputs: list[ForwardOutput] = []
        for runner in chain:
            want = OutputKind.LOGITS if runner is chain[-1] else OutputKind.HIDDEN
            outputs = _run(
                runner,
                [
                    _work(truth, part, state, want)
                    for part, state in zip(batch.parts, hidden, strict=True)
                ],
            )
            hidden = [one.hidden for one in outputs]
        if batch.judged:
            yield _last_rows(batch, np.stack([one.logits for one in outputs]), truth)


def _works(
    truth: Truth, batch: Batch, layer: int, want: OutputKind, shift: int = 0
) -> list[ForwardRequest]:
    works = []
    for part in batch.parts:
        rows = truth.before[layer][part.start : part.start + part.n_tokens]
        state = HiddenBatch.pack(rows, 32) if layer else None
        works.append(_work(truth, part, state, want, shift))
    return works


def _work(
    truth: Truth, part: Part, state: HiddenBatch | None, want: OutputKind, shift: int = 0
) -> ForwardRequest:
    tokens = tuple(truth.tokens[at] for at in part.positions)
    return ForwardRequest(
        session=SessionId(part.session + shift),
        tokens=tokens,
        pos0=part.start,
        hidden=state,
        output_kind=want,
    )


def _rows(batch: Batch, got: F32, exact: F32) -> Rows:
    at = np.array([position for part in batch.parts for position in part.positions])
    return Rows(batch, got, exact[at], at)


def _last_rows(batch: Batch, got: F32, truth: Truth) -> Rows:
    at = np.array([part.positions[-1] for part in batch.parts])
    return Rows(batch, got, truth.logits[at], at)
