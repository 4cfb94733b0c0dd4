"""The moments of a request at which a stage is killed or stopped, and what must hold then.

Owns: the one prompt and its answer, the deadlines, three stages for every test. Invariant: a moment
is reached exactly, never about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from ds4py.contracts import Session
from ds4py.coordinator.relay.workers import dialer as dialer_module
from ds4py.wire.frames import FrameType
from tests.clusters import wait_until
from tests.e2e.phases import Fleet, Stage, fleet, greedy, truth
from tests.sockets import Background

CUTS = ("0-1", "2-3", "4-5")
NAMES = ("layers 0-1", "layers 2-3", "layers 4-5 and the output head")
HOPS = (0, 1, 2)
PHASES = ("prefill", "decode")
PROMPT = [5, 80, 3, 3, 41, 9, 77, 12, 1, 0, 96, 33, 60, 2, 8, 19, 25]
N_CHUNKS = 9
N_TOKENS = 10
ANSWER = truth(PROMPT, N_TOKENS)
ALIVE = 0.5
REJOIN = 0.5
MARGIN = 1.5


@contextmanager
def three_stages() -> Iterator[list[Stage]]:
    """Stages for the tests of a module, which may hurt them."""
    stages = [Stage(layers) for layers in CUTS]
    try:
        yield stages
    finally:
        for stage in stages:
            stage.close()


def refreshed(stages: list[Stage], monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """The same that run, others for those that do not; all are dialled without a pause."""
    monkeypatch.setattr(dialer_module, "REDIAL_PAUSE", 0.05)
    for hop, stage in enumerate(stages):
        if stage.fit:
            stage.order("go")
        else:
            stage.close()
            stages[hop] = Stage(CUTS[hop])
    return stages


@dataclass(frozen=True)
class Moment:
    """Where the request is when the signal comes.

    Args:
        where: "compute": in the device of the stage. "relay": in that of the last one, for whose
            results the others wait. "result": a part of a RESULT of the stage is out; "forward": a
            part of a WORK for the next one; "receive": it has a part of a WORK.
        phase: In the middle of the prompt, or of the answer.
        hop: The stage that gets the signal.
    """

    where: str
    phase: str
    hop: int

    @property
    def needs_doors(self) -> bool:
        return self.where in {"result", "forward", "receive"}

    def prepare(self, f: Fleet) -> tuple[Callable[[], object], Callable[[], None]]:
        """Make it come; how to wait for it, and how to let it pass."""
        if not self.needs_doors:
            position = 6 if self.phase == "prefill" else len(PROMPT) + 3
            stage = f.stages[self.hop if self.where == "compute" else -1]
            stage.order("hold", position)
            return lambda: stage.wait(f"held {position}"), lambda: stage.order("go")
        number, after = (4, 7) if self.phase == "prefill" else (N_CHUNKS + 4, 100)
        if self.where == "result":
            hold = f.doors[self.hop].hold(FrameType.RESULT, down=False, number=number, after=after)
        else:
            door = f.doors[self.hop + (self.where == "forward")]
            hold = door.hold(FrameType.WORK, down=True, number=number, after=after)
        return hold.wait, hold.release


WHERE = {"compute": HOPS, "relay": (0, 1), "result": HOPS, "forward": (0, 1), "receive": HOPS}
MOMENTS = [
    pytest.param(Moment(where, phase, hop), id=f"{where}-{phase}-{hop}")
    for where, hops in WHERE.items()
    for phase in PHASES
    for hop in hops
]
SIGNAL = pytest.mark.parametrize("signal", ["kill", "stop"])
COMPUTE = [moment for moment in MOMENTS if "compute" in str(moment.id)]


@contextmanager
def caught(
    stages: list[Stage], moment: Moment, **config: object
) -> Iterator[tuple[Fleet, Session, Background[list[int]], Callable[[], None]]]:
    """A request at its moment; its session, its answer, and what lets it pass."""
    with (
        fleet(stages, doors=moment.needs_doors, **config) as f,
        f.backend.lease(PROMPT) as session,
    ):
        reached, release = moment.prepare(f)
        answer = Background(lambda: greedy(session, PROMPT, N_TOKENS))
        reached()
        assert not answer.done
        yield f, session, answer, release


@contextmanager
def only_forgotten(f: Fleet, hop: int) -> Iterator[None]:
    """Whatever is done, the coordinator keeps its connections to all other stages."""
    before = f.links()
    yield
    wait_until(lambda: f.links().keys() == before.keys(), "all stages are known again")
    now = f.links()
    assert {layer for layer in now if now[layer] != before[layer]} == {2 * hop}


def stopped(f: Fleet, hop: int) -> None:
    """Stop a stage and see it noticed in time."""
    f.stages[hop].stop()
    start = time.monotonic()
    f.wait_known(len(f.stages) - 1)
    assert time.monotonic() - start < ALIVE + MARGIN


def go_on(session: Session, n_done: int) -> list[int]:
    """The rest of an answer that has begun; or the same request again if it is complete."""
    if n_done == N_TOKENS:
        return greedy(session, PROMPT, N_TOKENS)
    return ANSWER[:n_done] + [
        int(np.argmax(session.eval(token))) for token in ANSWER[n_done - 1 : -1]
    ]
