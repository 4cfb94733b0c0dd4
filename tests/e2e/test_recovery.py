"""Every stage of a route is killed (SIGKILL) and stopped (SIGSTOP) at every moment; anyone who asks
gets the exact greedy answer, or one clear error in time.

Real processes with the fake model, three hops, a prompt in nine chunks of which five are on their
way at once. The moments are exact: a stage stands still in its device, or a proxy between two peers
stands still in the middle of a frame, when the signal comes.

What is said in time: the end of a process is noticed at once, a stopped one within the alive
timeout; then a request waits for the rejoin timeout. `MARGIN` is what a busy machine may add.

What is tested elsewhere and not again here:

- real programs and models, killed or stopped anywhere in prefill and decode, and their clients over
  HTTP: `test_faults`, `test_extensions`; in the middle of a large WORK of the coordinator, or of a
  RESULT by hand: `test_faults`; in a snapshot: `test_snapshots`
- a stage that comes back does not displace the one that stood by:
`unit/coordinator/relay/test_standby` - the same promises by hand-made peers, frame by frame:
`unit/coordinator/relay/test_pipeline`,
  `unit/worker/test_forwarding`, `unit/worker/test_notices`, `conformance/statements` (66 to 68)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from ds4py.contracts import Session
from ds4py.coordinator.relay import coordinator as coordinator_module
from ds4py.errors import RouteIncompleteError
from ds4py.wire.frames import ExtType
from tests.e2e.moments import (
    ALIVE,
    ANSWER,
    COMPUTE,
    CUTS,
    HOPS,
    MARGIN,
    MOMENTS,
    N_CHUNKS,
    N_TOKENS,
    NAMES,
    PHASES,
    PROMPT,
    REJOIN,
    SIGNAL,
    Moment,
    caught,
    go_on,
    only_forgotten,
    refreshed,
    stopped,
    three_stages,
)
from tests.e2e.phases import DEADLINE, Door, Hold, Stage, fleet, greedy
from tests.support.clusters import wait_until
from tests.support.fake_runner import reference_logits
from tests.support.sockets import Background


@pytest.fixture(scope="module")
def stages() -> Iterator[list[Stage]]:
    with three_stages() as made:
        yield made


@pytest.fixture
def pool(stages: list[Stage], monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    return refreshed(stages, monkeypatch)


# --- killed or stopped, and back again -----------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stage_that_is_killed_and_started_again(pool: list[Stage], moment: Moment) -> None:
    with caught(pool, moment) as (f, _, answer, release), only_forgotten(f, moment.hop):
        f.stages[moment.hop].kill()
        if moment.where == "relay":
            release()
        f.restart(moment.hop)
        back = time.monotonic()
        assert answer.result() == ANSWER
        assert time.monotonic() - back < MARGIN


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stage_that_is_stopped_and_goes_on(pool: list[Stage], moment: Moment) -> None:
    """What it still had to do then disturbs nobody."""
    with (
        caught(pool, moment, alive_timeout=ALIVE) as (f, _, answer, release),
        only_forgotten(f, moment.hop),
    ):
        stopped(f, moment.hop)
        f.stages[moment.hop].resume()
        release()
        back = time.monotonic()
        assert answer.result() == ANSWER
        assert time.monotonic() - back < MARGIN


@pytest.mark.parametrize("moment", COMPUTE)
def test_a_stage_that_is_stopped_and_then_killed(pool: list[Stage], moment: Moment) -> None:
    """The dialler waits for a process that was killed before it could answer."""
    with (
        caught(pool, moment, alive_timeout=ALIVE) as (f, _, answer, _),
        only_forgotten(f, moment.hop),
    ):
        stopped(f, moment.hop)
        f.stages[moment.hop].kill()
        f.restart(moment.hop)
        assert answer.result() == ANSWER


# --- nobody comes back, or somebody stands by ----------------------------------------------------


@SIGNAL
@pytest.mark.parametrize("moment", COMPUTE)
def test_without_a_replacement_it_is_one_clear_error_in_time(
    pool: list[Stage], moment: Moment, signal: str
) -> None:
    """And a failed span rolls the timeline back: no old logits for a new prompt, also not for the
    very prompt that failed."""
    alive = ALIVE if signal == "stop" else DEADLINE
    with (
        caught(pool, moment, alive_timeout=alive, rejoin_timeout=REJOIN) as (f, session, answer, _),
        only_forgotten(f, moment.hop),
    ):
        start = time.monotonic()
        getattr(f.stages[moment.hop], signal)()
        with pytest.raises(RouteIncompleteError, match=f"no worker serves {NAMES[moment.hop]};"):
            answer.result()
        patience = REJOIN + (ALIVE if signal == "stop" else 0)
        assert REJOIN <= time.monotonic() - start < patience + MARGIN
        assert not session.tokens
        f.stages[moment.hop].kill()
        f.restart(moment.hop)
        f.wait_known(3)
        assert session.sync(PROMPT).n_cached == 0
        assert greedy(session, PROMPT, N_TOKENS) == ANSWER


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("hop", [1, 2])
def test_a_loss_that_the_stage_before_reports_first(
    pool: list[Stage], hop: int, phase: str
) -> None:
    """The connection between two stages breaks, and only later that to the coordinator: the request
    is replayed over the dead stage, and yet nobody waits for that."""
    moment = Moment("compute", phase, hop)
    with ExitStack() as stack:
        f = stack.enter_context(
            fleet(pool[:hop] + pool[hop + 1 :], rejoin_timeout=REJOIN, alive_timeout=2)
        )
        door = Door(f.port.address.port)
        stack.callback(door.close)
        f.stages.insert(hop, Stage(CUTS[hop], coordinator=door.address))
        stack.callback(f.stages[hop].close)
        f.wait_known(3)
        session = stack.enter_context(f.backend.lease(PROMPT))
        reached, _ = moment.prepare(f)
        answer = Background(lambda: greedy(session, PROMPT, N_TOKENS))
        reached()
        news = [door.hold(ExtType.ALIVE, down=d, after=0, deaf=True) for d in (False, True)]
        for way in news:
            way.wait()
        start = time.monotonic()
        f.stages[hop].kill()
        time.sleep(0.2)
        assert len(f.links()) == 3
        for way in news:
            way.release()
        with pytest.raises(RouteIncompleteError, match=f"no worker serves {NAMES[hop]};"):
            answer.result()
        assert time.monotonic() - start < 0.2 + REJOIN + MARGIN


@SIGNAL
@pytest.mark.parametrize("hop", [1, 2])
def test_a_loss_while_the_stage_before_computes(pool: list[Stage], hop: int, signal: str) -> None:
    """What it has for the lost stage then is an error, and not an attempt to reach it again."""
    alive = ALIVE if signal == "stop" else DEADLINE
    moment = Moment("compute", "prefill", hop - 1)
    with caught(pool, moment, alive_timeout=alive, rejoin_timeout=REJOIN) as (
        f,
        _,
        answer,
        release,
    ):
        getattr(f.stages[hop], signal)()
        f.wait_known(2)
        time.sleep(0.1)  # it reads of the loss
        start = time.monotonic()
        release()
        with pytest.raises(RouteIncompleteError, match=f"no worker serves {NAMES[hop]};"):
            answer.result()
        assert time.monotonic() - start < REJOIN + MARGIN


@SIGNAL
def test_a_loss_that_a_full_queue_hides(
    pool: list[Stage], signal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More chunks are on their way than the first stage takes, so that it cannot read of the loss
    behind them. A broken connection shows it all the same; after a silent one, the stage loses its
    own as well."""
    monkeypatch.setattr(coordinator_module, "_LOSS_SECONDS", ALIVE)
    alive = ALIVE if signal == "stop" else DEADLINE
    with (
        fleet(pool, window=N_CHUNKS, alive_timeout=alive) as f,
        f.backend.lease(PROMPT) as session,
    ):
        pool[1].order("hold", 0)
        n_before = len(pool[0].spans())
        answer = Background(lambda: greedy(session, PROMPT, N_TOKENS))
        wait_until(lambda: (12, 2) in pool[0].spans()[n_before:], "it takes no more")
        start = time.monotonic()
        getattr(f.stages[1], signal)()
        f.wait_known(2)
        if signal == "stop":
            f.wait_known(1)
            f.stages[1].resume()
            f.stages[1].order("go")
        else:
            f.restart(1)
        assert answer.result() == ANSWER
        assert time.monotonic() - start < (2 * ALIVE if signal == "stop" else 0) + MARGIN


def test_a_failed_token_rolls_back_the_coordinators_own_layers_too(pool: list[Stage]) -> None:
    with (
        fleet(pool[1:], local="0-1", rejoin_timeout=0.1) as f,
        f.backend.lease(PROMPT) as session,
    ):
        session.sync(PROMPT)
        f.stages[1].kill()
        with pytest.raises(RouteIncompleteError):
            session.eval(7)
        f.restart(1)
        pool[2] = f.stages[1]
        f.wait_known(2)
        for line in ([*PROMPT, 7], PROMPT):
            result = session.sync(line)
            assert result.n_cached in {0, len(PROMPT) - 1}
            np.testing.assert_array_equal(result.logits, reference_logits(line))


@pytest.mark.parametrize("moment", COMPUTE)
def test_a_standby_serves_at_once_and_not_before(pool: list[Stage], moment: Moment) -> None:
    with ExitStack() as stack:
        standby = Stage(CUTS[moment.hop])
        stack.callback(standby.close)
        f, _, answer, _ = stack.enter_context(caught([*pool, standby], moment))
        assert not standby.spans()
        lost = time.monotonic()
        f.stages[moment.hop].kill()
        assert answer.result() == ANSWER
        assert time.monotonic() - lost < MARGIN
        assert standby.spans()[0] == (0, 2)


@pytest.mark.parametrize("hop", HOPS)
def test_a_standby_that_joins_does_not_capture_a_running_session(
    pool: list[Stage], hop: int
) -> None:
    with fleet(pool) as f, f.backend.lease(PROMPT) as session, ExitStack() as stack:
        assert greedy(session, PROMPT, 3) == ANSWER[:3]
        newcomer = Stage(CUTS[hop], coordinator=f.port.address)
        stack.callback(newcomer.close)
        f.wait_known(4)
        n_before = [len(stage.spans()) for stage in pool]
        tokens = [int(np.argmax(session.eval(token))) for token in ANSWER[2:5]]
        assert tokens == ANSWER[3:6]
        assert [len(stage.spans()) for stage in pool] == [n + 3 for n in n_before]
        assert not newcomer.spans()
        pool[hop].kill()
        assert int(np.argmax(session.eval(ANSWER[5]))) == ANSWER[6]
        assert newcomer.spans()


# --- between requests and between tokens ---------------------------------------------------------


@pytest.mark.parametrize("between", ["requests", "tokens"])
@pytest.mark.parametrize("hop", HOPS)
def test_the_end_of_an_idle_stage_is_noticed_at_once(
    pool: list[Stage], hop: int, between: str
) -> None:
    with fleet(pool) as f, f.backend.lease(PROMPT) as session, only_forgotten(f, hop):
        n_done = 4 if between == "tokens" else N_TOKENS
        assert greedy(session, PROMPT, n_done) == ANSWER[:n_done]
        killed = time.monotonic()
        f.stages[hop].kill()
        wait_until(lambda: f.coordinator.health().missing == NAMES[hop], "it is missed")
        assert time.monotonic() - killed < MARGIN
        asking = Background(lambda: go_on(session, n_done))
        f.restart(hop)
        assert asking.result() == ANSWER


@pytest.mark.parametrize("hop", HOPS)
def test_an_idle_stage_that_stops_and_goes_on_still_has_its_sessions(
    pool: list[Stage], hop: int
) -> None:
    with (
        fleet(pool, alive_timeout=ALIVE) as f,
        f.backend.lease(PROMPT) as session,
        only_forgotten(f, hop),
    ):
        assert greedy(session, PROMPT, 4) == ANSWER[:4]
        stopped(f, hop)
        asking = Background(lambda: session.eval(ANSWER[3]))
        f.stages[hop].resume()
        assert int(np.argmax(asking.result())) == ANSWER[4]
        assert [stage.spans()[-1] for stage in pool] == [(len(PROMPT) + 3, 1)] * 3


# --- before and while it introduces itself -------------------------------------------------------

INTRODUCTION = pytest.mark.parametrize("after", [0, 20], ids=["before", "while"])


@INTRODUCTION
@SIGNAL
@pytest.mark.parametrize("hop", HOPS)
def test_a_stage_that_is_dialled_and_hurt_as_it_introduces_itself(
    pool: list[Stage], hop: int, signal: str, after: int
) -> None:
    with fleet(pool, doors=True) as f, f.backend.lease(PROMPT) as session:
        session.sync(PROMPT[:5])
        with only_forgotten(f, hop):
            hold = f.doors[hop].hold(ExtType.HELLO, down=False, after=after)
            f.stages[hop].kill()
            f.wait_known(2)
            f.restart(hop)
            hold.wait()
            answer = hurt(f.stages[hop], signal, hold, session)
            if signal == "kill":
                f.restart(hop)
            assert answer.result() == ANSWER


def hurt(stage: Stage, signal: str, hold: Hold, session: Session) -> Background[list[int]]:
    """Hurt a stage that introduces itself while somebody asks; one that was stopped goes on."""
    getattr(stage, signal)()
    answer = Background(lambda: greedy(session, PROMPT, N_TOKENS))
    time.sleep(0.1)
    assert not answer.done
    if signal == "stop":
        stage.resume()
        hold.release()
    return answer


@INTRODUCTION
@SIGNAL
def test_a_stage_that_dials_and_is_hurt_as_it_introduces_itself(
    pool: list[Stage], signal: str, after: int
) -> None:
    with (
        fleet(pool[:2]) as f,
        f.backend.lease(PROMPT) as session,
        ExitStack() as stack,
    ):
        door = Door(f.port.address.port)
        stack.callback(door.close)

        def start() -> Stage:
            stage = Stage(CUTS[2], coordinator=door.address)
            stack.callback(stage.close)
            return stage

        first = start()
        f.wait_known(3)
        session.sync(PROMPT[:5])
        hold = door.hold(ExtType.HELLO, down=True, after=after)
        links = f.links()
        first.kill()
        second = start()
        hold.wait()
        answer = hurt(second, signal, hold, session)
        if signal == "kill":
            start()
        assert answer.result() == ANSWER
        now = f.links()
        assert {layer for layer in links if links[layer] != now[layer]} == {4}


def test_a_stage_that_dies_as_it_introduces_itself_is_one_clear_error_in_time(
    pool: list[Stage],
) -> None:
    with (
        fleet(pool, doors=True, rejoin_timeout=REJOIN) as f,
        f.backend.lease(PROMPT) as session,
    ):
        session.sync(PROMPT[:5])
        hold = f.doors[1].hold(ExtType.HELLO, down=False, after=20)
        f.stages[1].kill()
        f.restart(1)
        hold.wait()
        start = time.monotonic()
        f.stages[1].stop()
        with pytest.raises(RouteIncompleteError, match=f"no worker serves {NAMES[1]};"):
            session.sync(PROMPT)
        assert REJOIN <= time.monotonic() - start < REJOIN + MARGIN
        f.stages[1].kill()
        f.restart(1)
        f.wait_known(3)
        assert greedy(session, PROMPT, N_TOKENS) == ANSWER
