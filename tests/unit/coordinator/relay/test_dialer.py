"""Workers that the user names: dialled, introduced, refused, dialled again."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ds4py.config import RouteEntry
from ds4py.coordinator.relay.workers import dialer as dialer_module
from ds4py.coordinator.relay.workers import worker_hello as worker_hello_module
from ds4py.layer_range import LayerSpec
from ds4py.worker import worker as worker_module
from tests.by_hand import (
    PROMPT,
    WHOLE,
    dialling,
)
from tests.clusters import cluster, span, start_worker, wait_until
from tests.fake_runner import FakeRunner, reference_logits
from tests.peers import next_hop
from tests.sockets import Background


def test_a_plain_worker_is_served_if_the_route_says_its_layers() -> None:
    worker = start_worker(FakeRunner(WHOLE), speaks_extensions=False)
    with dialling(RouteEntry(worker.address, LayerSpec.parse("0:output"))) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            result = session.sync(PROMPT)
            np.testing.assert_array_equal(result.logits, reference_logits(PROMPT))
    worker.close()


def test_a_plain_worker_without_layers_is_explained_once(caplog, monkeypatch) -> None:
    monkeypatch.setattr(dialer_module, "REDIAL_PAUSE", 0.01)
    worker = start_worker(FakeRunner(WHOLE), speaks_extensions=False)
    with dialling(RouteEntry(worker.address)) as c:
        attempts: list[int] = []
        monkeypatch.setattr(
            c.coordinator._dialers[0],
            "_plain_span",
            _counting(c.coordinator._dialers[0], attempts),
        )
        wait_until(lambda: len(attempts) > 3, "it is tried again")
        assert not c.coordinator.health().ready
    worker.close()
    words = f"write its layers in --dist-route, for example {worker.address}=13:output"
    assert caplog.text.count(words) == 1


def _counting(dialer, attempts: list[int]):
    plain = type(dialer)._plain_span

    def counted():
        attempts.append(1)
        return plain(dialer)

    return counted


def test_a_worker_with_other_layers_than_the_route_says_is_not_used(caplog) -> None:
    worker = start_worker(FakeRunner(span("0-2")))
    with dialling(RouteEntry(worker.address, LayerSpec.parse("0-1"))):
        wait_until(lambda: "serves layers 0-2, but --dist-route says 0-1" in caplog.text, "told")
    worker.close()


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        (lambda: FakeRunner(WHOLE, name="another"), "model family mismatch"),
        (lambda: FakeRunner(span("0-6", 7), n_layers=7), "layer count mismatch"),
        (lambda: FakeRunner(WHOLE, n_ctx=32), "context too small"),
    ],
)
@pytest.mark.parametrize("dials_in", [False, True])
def test_a_worker_that_does_not_fit_is_told_in_both_logs_but_not_each_second(
    runner, words, dials_in, caplog, monkeypatch
) -> None:
    for module, name in ((dialer_module, "REDIAL_PAUSE"), (worker_module, "RECONNECT_PAUSE")):
        monkeypatch.setattr(module, name, 0.01)
    refusals: list[str] = []
    check = worker_hello_module.check_hello

    def counted(hello, facts):
        refusal = check(hello, facts)
        refusals.append(refusal.text)
        return refusal

    monkeypatch.setattr(worker_hello_module, "check_hello", counted)
    with caplog.at_level(logging.WARNING):
        if dials_in:
            with cluster([]) as c:
                worker = start_worker(runner(), coordinator=c.port.address)
                wait_until(lambda: len(refusals) > 3, "it comes again")
                worker.close()
        else:
            worker = start_worker(runner())
            with dialling(RouteEntry(worker.address)):
                wait_until(lambda: len(refusals) > 3, "it is dialled again")
            worker.close()
    assert words in refusals[0]
    assert caplog.text.count("refused us") == 1
    theirs = [r for r in caplog.records if r.name.startswith("ds4py.worker.worker")]
    assert words in theirs[0].getMessage()
    ours = [r for r in caplog.records if r.name.endswith((".coordinator", ".dialer"))]
    assert words in ours[0].getMessage()


def test_a_plain_worker_is_remembered_and_dialled_without_a_handshake(caplog, monkeypatch) -> None:
    monkeypatch.setattr(dialer_module, "REDIAL_PAUSE", 0.01)
    worker = start_worker(FakeRunner(WHOLE), speaks_extensions=False)
    with dialling(RouteEntry(worker.address, LayerSpec.parse("0:output"))) as c:
        c.wait_ready()
        worker.close()
        wait_until(lambda: not c.coordinator.health().ready, "the worker is missed")
        worker = start_worker(FakeRunner(WHOLE), listen=worker.address, speaks_extensions=False)
        c.wait_ready()
    worker.close()
    assert caplog.text.count("the peer sent EXT_HELLO") == 1


def test_closing_ends_a_handshake_that_nobody_answers() -> None:
    with next_hop() as silent:
        with dialling(RouteEntry(silent.address)):
            connection = silent.accept()
            assert Background(connection.receive).result() is not None  # its hello
        assert Background(connection.receive).result() is None
