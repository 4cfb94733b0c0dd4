"""The latest lines of the log."""

import logging
import threading

import pytest

from ds4py.server.observability.event_log import MAX_EVENTS, MAX_TEXT, EventLog

CLUSTER = logging.getLogger("ds4py.coordinator.relay.coordinator")
REQUESTS = logging.getLogger("ds4py.server.http.endpoint")


@pytest.fixture(autouse=True)
def everything_is_logged(caplog):
    caplog.set_level(logging.DEBUG, logger="ds4py")


def test_lines_are_kept_with_time_level_and_text():
    events = EventLog()
    with events.attached():
        CLUSTER.info("%s joined", "worker 10.0.0.2:8001")
        CLUSTER.warning("worker left")
        CLUSTER.error("lost")
        CLUSTER.critical("all lost")
        CLUSTER.debug("detail")
    kept = events.recent()
    assert [(event.level, event.text) for event in kept] == [
        ("info", "worker 10.0.0.2:8001 joined"),
        ("warning", "worker left"),
        ("error", "lost"),
        ("error", "all lost"),
    ]
    assert 1.5e9 < kept[0].time <= kept[-1].time


def test_lines_of_single_requests_do_not_push_out_the_rest():
    events = EventLog()
    with events.attached():
        CLUSTER.info("joined")
        REQUESTS.info("chatcmpl-1 done")
        REQUESTS.warning("request failed")
        logging.getLogger("ds4py.coordinator.relay.profile").info("decode at 7")
        logging.getLogger("ds4py.cli.server").info("ready")
    assert [event.text for event in events.recent()] == ["joined", "request failed", "ready"]


def test_only_the_latest_lines_are_kept_and_none_is_long():
    events = EventLog()
    with events.attached():
        for n in range(MAX_EVENTS + 5):
            CLUSTER.info("line %d of\n\t\x0bmany %s", n, "x" * 10_000)
    kept = events.recent()
    assert len(kept) == MAX_EVENTS
    assert kept[0].text.startswith("line 5 of many xxx")
    assert kept[0].text.endswith("x…")
    assert {len(event.text) for event in kept} == {MAX_TEXT}


def test_a_line_of_the_longest_length_is_whole():
    events = EventLog()
    with events.attached():
        CLUSTER.info("%s", "x" * MAX_TEXT)
    assert events.recent()[0].text == "x" * MAX_TEXT


def test_nothing_is_heard_before_or_after():
    events = EventLog()
    CLUSTER.info("before")
    with pytest.raises(ZeroDivisionError), events.attached():
        1 / 0  # noqa: B018
    CLUSTER.info("after")
    logging.getLogger("elsewhere").warning("not ours")
    assert events.recent() == ()


def test_a_line_that_can_not_be_written_disturbs_nobody(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    events, alone = EventLog(), logging.getLogger("ds4py.alone")
    monkeypatch.setattr(alone, "propagate", False)
    with events.attached("ds4py.alone"):
        alone.info("%d", "no number")
        alone.info("fine")
    assert [event.text for event in events.recent()] == ["fine"]


def test_threads_may_write_while_one_reads():
    events = EventLog()

    def write():
        for n in range(300):
            CLUSTER.info("line %d", n)

    with events.attached():
        threads = [threading.Thread(target=write) for _ in range(3)]
        for thread in threads:
            thread.start()
        seen = [len(events.recent()) for _ in range(200)]
        for thread in threads:
            thread.join(10)
    assert seen == sorted(seen)
    assert len(events.recent()) == MAX_EVENTS
