"""What a failure must not cost: sessions of healthy stages, other connections, an open stream.

Real processes with the fake model, as in `test_recovery`, which has the list of what is tested
elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from ds4py.config import Address, ServerConfig
from ds4py.contracts import Session
from ds4py.errors import TransportError
from ds4py.server.http.app import create_app
from ds4py.server.http.server import HttpServer
from ds4py.transport.sockets import listen, local_address
from ds4py.wire.frames import ExtType, FrameType
from tests.clusters import ANY_PORT, wait_until
from tests.e2e.moments import (
    ALIVE,
    ANSWER,
    CUTS,
    HOPS,
    MARGIN,
    N_TOKENS,
    NAMES,
    PHASES,
    PROMPT,
    REJOIN,
    SIGNAL,
    Moment,
    go_on,
    only_forgotten,
    refreshed,
    three_stages,
)
from tests.e2e.phases import DEADLINE, Door, Fleet, Stage, fleet, greedy
from tests.sockets import Background
from tests.unit.server.support import text_stack


@pytest.fixture(scope="module")
def stages() -> Iterator[list[Stage]]:
    with three_stages() as made:
        yield made


@pytest.fixture
def pool(stages: list[Stage], monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    return refreshed(stages, monkeypatch)


# --- in the middle of a snapshot -----------------------------------------------------------------


@SIGNAL
@pytest.mark.parametrize("operation", ["save", "load"])
@pytest.mark.parametrize("hop", HOPS)
def test_a_stage_that_is_hurt_in_the_middle_of_a_shard_costs_the_operation_only(
    pool: list[Stage], hop: int, operation: str, signal: str
) -> None:
    """One clear error, in time also if the stage is only stopped; then the session goes on."""
    alive = ALIVE if signal == "stop" else DEADLINE
    with fleet(pool, doors=True, alive_timeout=alive) as f, f.backend.lease(PROMPT) as session:
        assert greedy(session, PROMPT, 4) == ANSWER[:4]
        saved = b"".join(session.save())
        hold = f.doors[hop].hold(FrameType.SNAPSHOT_CHUNK, down=operation == "load", after=60)
        attempt = Background(session.save if operation == "save" else lambda: session.load(saved))
        hold.wait()
        with only_forgotten(f, hop):
            start = time.monotonic()
            getattr(f.stages[hop], signal)()
            with pytest.raises(TransportError):
                attempt.result()
            assert time.monotonic() - start < (ALIVE if signal == "stop" else 0) + MARGIN
            assert len(session.tokens) == (len(PROMPT) + 3 if operation == "save" else 0)
            if signal == "kill":
                f.restart(hop)
            else:
                f.stages[hop].resume()
                hold.release()
            session.sync([*PROMPT, *ANSWER[:3]])
            assert go_on(session, 4) == ANSWER
        assert read_back(f, session) == ANSWER[-1]


def read_back(f: Fleet, session: Session) -> int:
    """Save and load a session; the token that its logits choose."""
    session.load(b"".join(session.save()))
    return int(np.argmax(session.sync(session.tokens).logits))


# --- promises ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hop", HOPS)
def test_a_mismatch_in_a_pipelined_prefill_is_drained_and_replayed(
    pool: list[Stage], hop: int
) -> None:
    """A stage has lost its sessions; no connection is shut down for that."""
    with fleet(pool) as f, f.backend.lease(PROMPT) as session:
        session.sync(PROMPT[:3])
        pool[hop].order("forget")
        pool[hop].wait("forgot")
        links = f.links()
        assert greedy(session, PROMPT, N_TOKENS) == ANSWER
        assert f.links() == links
        assert not any(link._pending for link in f.coordinator.workers.links.values())


@pytest.mark.parametrize("hop", [0, 1])
def test_replies_are_matched_by_id_when_an_error_overtakes_results(
    pool: list[Stage], hop: int
) -> None:
    """The error of a stage is back before the earlier answers of the last one, which are good."""
    with fleet(pool) as f, f.backend.lease(PROMPT) as session:
        session.sync(PROMPT[:1])
        links = f.links()
        pool[2].order("hold", 1)
        pool[hop].order("refuse", 5)
        asking = Background(lambda: greedy(session, PROMPT, N_TOKENS))
        pool[2].wait("held 1")
        pool[hop].wait("refused 5")
        (first,) = (link for link in f.coordinator.workers.links.values() if link._pending)
        wait_until(
            lambda: {2, 3} <= first._pending.keys() and 4 not in first._pending, "it is back"
        )
        pool[2].order("go")
        assert asking.result() == ANSWER
        assert f.links() == links


@pytest.mark.parametrize("dial_in", [False, True], ids=["dialled", "dialling"])
@pytest.mark.parametrize("hop", HOPS)
def test_a_healthy_worker_keeps_its_sessions_across_a_reconnect(
    pool: list[Stage], hop: int, dial_in: bool
) -> None:
    """Its control connection breaks; the next token evaluates one token on every stage."""
    with ExitStack() as stack:
        if dial_in:
            f = stack.enter_context(fleet(pool[:hop] + pool[hop + 1 :]))
            door = Door(f.port.address.port)
            stack.callback(door.close)
            stage = Stage(CUTS[hop], coordinator=door.address)
            stack.callback(stage.close)
            f.stages.insert(hop, stage)
            f.wait_known(3)
        else:
            f = stack.enter_context(fleet(list(pool), doors=True))
            door = f.doors[hop]
        session = stack.enter_context(f.backend.lease(PROMPT))
        assert greedy(session, PROMPT, 4) == ANSWER[:4]
        with only_forgotten(f, hop):
            old = f.links()[2 * hop]
            assert door.hang_up(ExtType.HELLO) == 1
            f.wait_new_link(old)
        before = [len(stage.spans()) for stage in f.stages]
        assert int(np.argmax(session.eval(ANSWER[3]))) == ANSWER[4]
        token = (len(PROMPT) + 3, 1)
        assert [s.spans()[n:] for s, n in zip(f.stages, before, strict=True)] == [[token]] * 3


@pytest.mark.parametrize("hop", [1, 2])
def test_a_relay_does_not_tear_down_its_upstream_for_an_idle_close(
    pool: list[Stage], hop: int
) -> None:
    """The connection from the stage before breaks while nothing is on its way."""
    with fleet(pool, doors=True) as f, f.backend.lease(PROMPT) as session:
        assert greedy(session, PROMPT, 4) == ANSWER[:4]
        links, before = f.links(), [len(stage.spans()) for stage in pool]
        assert f.doors[hop].hang_up(FrameType.WORK) == 1
        time.sleep(0.1)
        assert int(np.argmax(session.eval(ANSWER[3]))) == ANSWER[4]
        assert [len(stage.spans()) for stage in pool] == [n + 1 for n in before]
        assert f.links() == links


# --- what an HTTP client sees --------------------------------------------------------------------


@contextmanager
def http(f: Fleet) -> Iterator[Address]:
    """The API of a coordinator, which writes a comment after a tenth of a second of silence."""
    config = ServerConfig(keepalive_seconds=0.1)
    server = HttpServer(create_app(f.backend, text_stack(), config, n_sessions=1))
    door = listen(ANY_PORT)
    server.start([door])
    try:
        yield local_address(door)
    finally:
        server.close(DEADLINE)


class Stream:
    """A streaming completion; `lines` grows as they come."""

    def __init__(self, address: Address):
        self.lines: list[str] = []
        self._url = f"http://{address}/v1/completions"
        self._reading = Background(self._read)

    def _read(self) -> None:
        order = {
            "prompt": PROMPT,
            "max_tokens": N_TOKENS,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        with httpx.stream(
            "POST", self._url, json=order, trust_env=False, timeout=DEADLINE
        ) as reply:
            assert reply.status_code == 200
            for line in filter(None, reply.iter_lines()):
                self.lines.append(line)

    @property
    def n_comments(self) -> int:
        return sum(line.startswith(":") for line in self.lines)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """What was sent besides comments, up to now."""
        data = [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]
        return [json.loads(text) for text in data if text != "[DONE]"]

    @property
    def tokens(self) -> list[int]:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return [token for choice in choices for token in choice.get("token_ids", ())]

    def wait_end(self) -> None:
        self._reading.result()


@pytest.mark.parametrize("phase", PHASES)
def test_a_stream_stays_open_while_a_replacement_is_waited_for(
    pool: list[Stage], phase: str
) -> None:
    """Comments come meanwhile, and then the answer continues exactly where it stood."""
    moment = Moment("compute", phase, 1)
    with fleet(pool) as f, http(f) as address:
        reached, _ = moment.prepare(f)
        stream = Stream(address)
        reached()
        n_before = 0 if phase == "prefill" else 4
        wait_until(lambda: stream.tokens == ANSWER[:n_before], "what there is of the answer")
        n_comments = stream.n_comments
        f.stages[1].kill()
        wait_until(lambda: stream.n_comments >= n_comments + 5, "comments come")
        assert stream.tokens == ANSWER[:n_before]
        f.restart(1)
        stream.wait_end()
        assert stream.tokens == ANSWER
        assert stream.chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert stream.lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("phase", PHASES)
def test_a_stream_ends_with_one_clear_error_if_none_comes(pool: list[Stage], phase: str) -> None:
    moment = Moment("compute", phase, 1)
    with fleet(pool, rejoin_timeout=REJOIN) as f, http(f) as address:
        reached, _ = moment.prepare(f)
        stream = Stream(address)
        reached()
        start = time.monotonic()
        f.stages[1].kill()
        stream.wait_end()
        assert REJOIN <= time.monotonic() - start < REJOIN + MARGIN
        assert stream.tokens == ANSWER[: 0 if phase == "prefill" else 4]
        errors = [chunk["error"]["message"] for chunk in stream.chunks if "error" in chunk]
        assert len(errors) == 1
        assert f"no worker serves {NAMES[1]};" in errors[0]
