"""Give one target many inputs, within a budget, and keep what it cannot bear.

Owns: the loop, the deadline of each input, the measuring of memory, the files of failing inputs.
Refuses to know: what inputs mean. Invariant: whatever an input does, the campaign goes on, and the
input lies in a file.
"""

from __future__ import annotations

import logging
import signal
import time
import traceback
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Final

import psutil

from interop.fuzz.target import LOGS, Target

MAX_FAILURES: Final = 10
"""Of one target; a campaign that has seen so many ends."""

_GROWTH_BYTES: Final = 64 << 20
_WARM: Final = 500  # inputs after which every cache is filled
_STEP_SECONDS: Final = 60.0


class Hang(BaseException):
    """Something was not done in time; no `except Exception` of the tested code takes it."""


@dataclass
class Tally:
    """What a campaign did.

    Args:
        name: Of the target.
        n_inputs: Inputs.
        n_frames: Frames in them.
        n_checks: Honest requests between them, all answered unless there are failures.
        seconds: For making and reading.
        outcomes: How the frames ended.
        peak_bytes: Most memory that a sampled input took.
        failures: What went wrong, and where the inputs are.
    """

    name: str
    n_inputs: int = 0
    n_frames: int = 0
    n_checks: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    failures: list[str] = field(default_factory=list)


class Campaign:
    """Gives inputs to one target.

    Args:
        target: Opened and closed here.
        seed: Equal seeds make equal inputs.
        keep: Folder for failing inputs, made when needed.
    """

    def __init__(self, target: Target, seed: int, keep: Path):
        self._target = target
        self._seed = seed
        self._keep = keep
        self._recent: deque[bytes] = deque(maxlen=max(1, target.check_every))
        self._warm_bytes = 0
        self.tally = Tally(target.name)

    def run(self, *, seconds: float, frames: float) -> Tally:
        """Make inputs until the time is up or enough frames were given."""
        rng = Random(f"{self._seed}/{self._target.name}")  # noqa: S311 - it must repeat
        self._target.make(Random(0))  # noqa: S311 - reads what inputs are made from
        with self._opened():
            start = time.monotonic()
            while time.monotonic() < start + seconds and self.tally.n_frames < frames:
                self._give(self._target.make(rng))
                if len(self.tally.failures) >= MAX_FAILURES:
                    break
            self._check()
            self.tally.seconds = time.monotonic() - start
            self._try(self._look_at_memory)
        return self.tally

    def repeat(self, inputs: Sequence[bytes]) -> Tally:
        """Give some inputs, and an honest request after each."""
        with self._opened():
            for data in inputs:
                self._give(data)
                self._check()
        return self.tally

    @contextmanager
    def _opened(self) -> Iterator[None]:
        handler = signal.signal(signal.SIGALRM, _hang)
        try:
            with _quiet_logs():
                self._try(self._target.open)
                yield
                self._try(self._target.close)
        finally:
            signal.signal(signal.SIGALRM, handler)

    def _give(self, data: bytes) -> None:
        tally, target = self.tally, self._target
        tally.n_inputs += 1
        self._recent.append(data)
        feed = self._measured if tally.n_inputs % target.sample_every == 0 else target.feed
        try:
            with _deadline(target.deadline):
                outcomes = feed(data)
        except (Exception, Hang) as e:  # noqa: BLE001 - this is what we look for
            self._failed(e, [data])
            return
        tally.n_frames += max(1, len(outcomes))
        tally.outcomes.update(outcomes)
        if target.check_every and tally.n_inputs % target.check_every == 0:
            self._check()
        if tally.n_inputs == _WARM:
            self._warm_bytes = _resident()

    def _measured(self, data: bytes) -> Sequence[str]:
        tracemalloc.start()
        try:
            outcomes = self._target.feed(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self.tally.peak_bytes = max(self.tally.peak_bytes, peak)
        limit = self._target.bytes_allowed + 64 * len(data)
        assert peak <= limit, f"took {peak} bytes for an input of {len(data)}, at most {limit}"
        return outcomes

    def _check(self) -> None:
        """Make an honest request; a target that does not answer it is started again."""
        if self._target.check_every:
            self.tally.n_checks += 1
            if not self._try(self._target.check):
                self._try(self._target.close)
                self._try(self._target.open)

    def _look_at_memory(self) -> None:
        growth = _resident() - self._warm_bytes if self._warm_bytes else 0
        assert growth < _GROWTH_BYTES, f"resident memory has grown by {growth} bytes"

    def _try(self, step: Callable[[], None]) -> bool:
        """Do what belongs to no single input; if it fails, the recent ones are to blame."""
        try:
            with _deadline(_STEP_SECONDS):
                step()
        except (Exception, Hang) as e:  # noqa: BLE001 - this is what we look for
            self._failed(e, list(self._recent))
            return False
        return True

    def _failed(self, error: BaseException, inputs: Sequence[bytes]) -> None:
        self._keep.mkdir(parents=True, exist_ok=True)
        start = f"{self._target.name}-seed{self._seed}-{self.tally.n_inputs}"
        for place, data in enumerate(inputs):
            (self._keep / f"{start}-{place:02}.bin").write_bytes(data)
        story = self._keep / f"{start}.txt"
        story.write_text("".join(traceback.format_exception(error)))
        self.tally.failures.append(
            f"{self._target.name}: {type(error).__name__}: {str(error)[:500]}\n"
            f"    story:  {story}\n"
            f"    repeat: python -m interop.fuzz --repeat {self._keep / start}-*.bin"
        )


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _hang(_signal: int, _frame: FrameType | None) -> None:
    raise Hang("not done in time")


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Keep warnings about hostile peers from all handlers of the process: they are very many."""
    logs, nothing = [logging.getLogger(name) for name in LOGS], logging.NullHandler()
    before = [log.propagate for log in logs]
    try:
        for log in logs:
            log.propagate = False
            log.addHandler(nothing)
        yield
    finally:
        for log, propagate in zip(logs, before, strict=True):
            log.propagate = propagate
            log.removeHandler(nothing)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
