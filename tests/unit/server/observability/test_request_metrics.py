"""Counting requests while they run."""

import asyncio
import threading

import pytest

from ds4py.errors import CancelledError, ClusterError, RequestError, RouteIncompleteError
from ds4py.server.observability.request_metrics import Ending, RequestMetrics, unmetered
from tests.unit.server.observability.measured import CHAT, Clock


def test_a_request_leaves_its_tokens_and_times():
    clock = Clock()
    meter = RequestMetrics(clock)
    request = meter.accepted(CHAT)
    clock.pass_(1.0)  # reading, tokenizing
    request.queued()
    clock.pass_(2.0)
    with request.leased():
        clock.pass_(4.0)
        request.prefilled(100, 30)
        request.token(reasoning=True)
        clock.pass_(0.25)
        request.token()
        clock.pass_(0.5)
        request.token()
        assert meter.read().leased == 1
    clock.pass_(1.0)
    request.finished("stop")
    counts = meter.read()
    assert (counts.prompt_tokens, counts.cached_tokens) == (100, 30)
    assert (counts.completion_tokens, counts.reasoning_tokens) == (3, 1)
    assert (counts.queue_wait.total, counts.first_token.total) == (2.0, 7.0)
    assert (counts.inter_token.total, counts.inter_token.counts[-1]) == (0.75, 2)
    assert counts.duration.total == 8.75
    assert counts.requests == {Ending(CHAT, "stop", 200): 1}
    assert (counts.leased, counts.active_seconds) == (0, 4.75)


def test_values_stand_below_their_bounds_inclusively():
    clock = Clock()
    meter = RequestMetrics(clock)
    for seconds in (0.01, 0.011, 1000.0):
        request = meter.accepted(CHAT)
        clock.pass_(seconds)
        request.finished("stop")
    seen = meter.read().duration
    by_bound = dict(zip([*seen.bounds, None], seen.counts, strict=True))
    assert (by_bound[0.01], by_bound[0.025], by_bound[600], by_bound[None]) == (1, 2, 2, 3)


@pytest.mark.parametrize(
    ("error", "leased", "ending"),
    [
        (RequestError("bad"), False, ("refused", 400)),
        (RequestError("full", status=429), False, ("refused", 429)),
        (RequestError("too late", status=503), True, ("error", 503)),
        (CancelledError("gone"), False, ("cancelled", 499)),
        (asyncio.CancelledError(), True, ("cancelled", 499)),
        (RouteIncompleteError("layers 1-2", first_missing=1), True, ("error", 503)),
        (ClusterError("no"), True, ("error", 500)),
        (ZeroDivisionError(), True, ("error", 500)),
    ],
)
def test_an_error_reply_is_counted_by_reason_and_status(error, leased, ending):
    meter = RequestMetrics(Clock())
    request = meter.accepted(CHAT)
    if leased:
        with request.leased():
            pass
    request.failed(error)
    assert meter.read().requests == {Ending(CHAT, *ending): 1}
    assert meter.read().rejected == (ending == ("refused", 429))


def test_a_stream_that_breaks_has_the_status_that_was_sent():
    meter = RequestMetrics(Clock())
    for error in (CancelledError("gone"), ClusterError("no")):
        request = meter.accepted(CHAT)
        with request.leased():
            pass
        request.finished("error", error)
    endings = {Ending(CHAT, "cancelled", 200): 1, Ending(CHAT, "error", 200): 1}
    assert meter.read().requests == endings


def test_a_request_ends_once():
    meter = RequestMetrics(Clock())
    request = meter.accepted(CHAT)
    request.finished("length")
    request.failed(ClusterError("and then"))
    counts = meter.read()
    assert counts.requests == {Ending(CHAT, "length", 200): 1}
    assert (counts.ended("length", "stop"), counts.ended("error")) == (1, 0)


def test_a_second_attempt_has_the_same_prompt():
    meter = RequestMetrics(Clock())
    request = meter.accepted(CHAT)
    request.prefilled(10, 4)
    request.prefilled(12, 12)
    assert (meter.read().prompt_tokens, meter.read().cached_tokens) == (10, 4)


def test_time_counts_as_active_once_whoever_runs_and_also_while_one_reads():
    clock = Clock()
    meter = RequestMetrics(clock)
    with meter.accepted(CHAT).leased():
        clock.pass_(1.0)
        with meter.accepted(CHAT).leased():
            clock.pass_(1.0)
            assert (meter.read().leased, meter.read().active_seconds) == (2, 2.0)
        clock.pass_(1.0)
    clock.pass_(50.0)
    assert (meter.read().leased, meter.read().active_seconds) == (0, 3.0)


def test_a_lease_ends_with_an_error_too():
    meter = RequestMetrics(Clock())
    with pytest.raises(ZeroDivisionError), meter.accepted(CHAT).leased():
        1 / 0  # noqa: B018
    assert meter.read().leased == 0


def test_many_threads_lose_no_token():
    meter = RequestMetrics()
    n_threads, n_tokens = 4, 500

    def generate():
        request = meter.accepted(CHAT)
        with request.leased():
            for _ in range(n_tokens):
                request.token()
        request.finished("length")

    threads = [threading.Thread(target=generate) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    counts = meter.read()
    assert counts.completion_tokens == n_threads * n_tokens
    assert counts.inter_token.counts[-1] == n_threads * (n_tokens - 1)
    assert (counts.ended("length"), counts.leased) == (n_threads, 0)


def test_a_meter_outside_of_a_server_works_alike():
    request = unmetered()
    request.queued()
    with request.leased():
        request.prefilled(3, 0)
        request.token()
    request.finished("stop")
