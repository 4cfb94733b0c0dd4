"""What a coordinator tells of its route: stages, cache memory, replays and changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds4py.config import CoordinatorConfig
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.errors import ModelError
from tests.support.clusters import SOCKETS, cluster, span, start_worker, wait_until
from tests.support.fake_runner import FakeRunner, card, reference_logits

PROMPT = [5, 80, 3, 3, 41, 9, 77]


def test_a_refused_span_counts_as_a_replay() -> None:
    failures = [ModelError("span", got="a bad day", expected="none")]

    def before(work) -> None:
        if failures:
            raise failures.pop()

    with cluster(["0-2", "3-5"], before=before, chunk=4) as c:
        c.wait_ready()
        assert c.coordinator.health().replays == 0
        with c.backend.lease(PROMPT) as session:
            np.testing.assert_array_equal(session.sync(PROMPT).logits, reference_logits(PROMPT))
        assert c.coordinator.health().replays == 1


def test_a_worker_that_is_lost_and_replaced_changes_the_route() -> None:
    with cluster(["0-2", "3-5"], dial_in=True) as c:
        c.wait_ready()
        before = c.coordinator.health().route_changes
        assert before >= 1
        c.workers.pop().close()
        wait_until(lambda: not c.coordinator.health().ready, "the loss is noticed")
        assert c.coordinator.health().missing
        c.workers.append(start_worker(FakeRunner(span("3-5")), coordinator=c.port.address))
        c.wait_ready()
        assert c.coordinator.health().route_changes == before + 1
        assert c.coordinator.health().missing == ""


def test_stages_tell_what_went_through_them() -> None:
    with cluster(["3-5"], local="0-2", chunk=4) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
            session.eval(1)
        own, remote = c.coordinator.health().stages
        assert (own.name, own.prefill_tokens, own.decode_tokens) == ("coordinator", 7, 1)
        assert (remote.prefill_tokens, remote.decode_tokens) == (7, 1)
        assert remote.input_bytes == 8 * 4 + 8 * 8 * 4  # ids, and hidden states of 8 values
        assert remote.output_bytes >= 97 * 4 * 2  # logits of the prompt and of the token
        assert own.decode_wait_usec > 0
        assert own.busy_usec == 3  # the fake needs a microsecond for each of three spans
        assert own.kv_bytes is own.kv_budget_bytes is remote.kv_bytes is None


@dataclass(frozen=True)
class Use:
    used: int
    budget: int


class Accountant(FakeRunner):
    """A slice that keeps an account of its cache memory, until it is closed."""

    @property
    def kv_use(self) -> Use:
        if self.closed:
            raise ModelError("runner", got="closed", expected="open")
        return Use(used=300, budget=1000)


def test_the_cache_memory_of_the_own_slice_is_told_as_long_as_it_is_open() -> None:
    coordinator = Coordinator(card(), 64, CoordinatorConfig(), SOCKETS, local=Accountant())
    (own,) = coordinator.health().stages
    assert (own.kv_bytes, own.kv_budget_bytes) == (300, 1000)
    coordinator.close()
    (own,) = coordinator.health().stages
    assert (own.kv_bytes, own.kv_budget_bytes) == (None, None)
