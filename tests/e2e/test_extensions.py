"""Real programs that are stopped, not killed: noticed in time, replaced, and welcome back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ds4py.errors import CancelledError
from tests.e2e.support import (
    LONG_IDS,
    Alone,
    LocalServer,
    complete,
    coordinator,
    evaluated,
    route,
)
from tests.e2e.test_faults import N_TOKENS, Asked, prompt
from tests.processes import Launcher, WorkerProgram, wait_for

ALIVE_SECONDS = 2.0
SLICES = ("0-2", "3-5")


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("extensions")) as launcher:
        yield launcher


def start(launch: Launcher, model: Path, layers: str, *more: object) -> WorkerProgram:
    return launch.worker(
        *("--dist-role", "worker", "--dist-listen", "127.0.0.1:0", "-m", model),
        *("--dist-layers", layers, "--precision", "f32", "--sessions", 16, *more),
    )


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_stopped_worker_is_noticed_and_the_stream_goes_on_exactly(
    launch: Launcher, toy: Path, alone: Alone, phase: str
) -> None:
    """First the last stage, which another one stands by for; then the first, which comes back."""
    ids, n_tokens = (prompt(11), N_TOKENS) if phase == "prefill" else (prompt(11, 9), 800)
    front, *twins = (start(launch, toy, layers) for layers in ("0-2", "3-5", "3-5"))
    with coordinator(
        toy,
        chunk=2,
        route=route(front, *twins),
        alive_timeout=ALIVE_SECONDS,
        rejoin_timeout=60,
    ) as server:
        known(server, 3)
        asked = Asked(server, ids, n_tokens)
        asked.wait_under_way(phase)
        last = next(twin for twin in twins if twin.port == used(server)[1])
        stopped_at = time.monotonic()
        last.program.pause()
        known(server, 2)
        assert time.monotonic() - stopped_at < ALIVE_SECONDS + 2
        asked.wait_end()
        assert (asked.error, asked.text) == (None, alone.text(ids, n_tokens))
        assert last.port not in used(server)

        front.program.pause()
        wait_for(lambda: server.health()["http_status"] == 503, "the silence is noticed")
        front.program.resume()
        last.program.resume()
        known(server, 3)
        text = complete(server, prompt(12, 20), N_TOKENS)
        assert text == alone.text(prompt(12, 20), N_TOKENS)
        assert last.port not in used(server)  # it stands by now
    for worker in (front, *twins):
        worker.program.close()


def known(server: LocalServer, n_workers: int) -> None:
    registry = server.node.coordinator.workers.registry
    wait_for(lambda: len(registry.records) == n_workers, f"{n_workers} workers are registered")


def used(server: LocalServer) -> list[int]:
    """Data ports of the stages of the route, in order."""
    found = server.node.coordinator.ensure_pipeline(after_loss=False, cancelled=None).route
    return [hop.address.port for hop in found.hops]


def test_a_stopped_coordinator_loses_its_workers_and_finds_them_again(
    launch: Launcher, toy: Path, alone: Alone
) -> None:
    """Workers that dial in drop the dead connection and keep everything else."""
    with ExitStack() as stack:
        inner = stack.enter_context(launch.inside("dial-in"))
        server = inner.server(
            *("--dist-role", "coordinator", "--dist-listen", "127.0.0.1:0", "-m", toy),
            *("--precision", "f32", "--dist-alive-timeout", ALIVE_SECONDS),
        )
        workers = [
            start(inner, toy, layers, "--dist-coordinator", server.address) for layers in SLICES
        ]
        server.wait_ready()
        ids = LONG_IDS[:40]
        assert complete(server, ids, N_TOKENS) == alone.text(ids, N_TOKENS)
        server.program.pause()
        for worker in workers:
            worker.program.wait_log(r"given up: silent for 2 s", deadline=ALIVE_SECONDS + 8)
        server.program.resume()
        server.wait_ready()
        more = [*ids, 5]
        assert complete(server, more, N_TOKENS) == alone.text(more, N_TOKENS)
        for worker in workers:
            assert worker.program.log.count("is ds4py") == 1
            assert "Traceback" not in worker.program.log
        assert "Traceback" not in server.program.log


def test_what_is_done_of_a_prompt_whose_client_is_gone_is_kept(
    launch: Launcher, toy: Path, alone: Alone
) -> None:
    worker = start(launch, toy, "0-5")
    with coordinator(toy, chunk=8, route=route(worker)) as server:
        server.wait_ready()
        backend = server.node.backend
        seen: list[int] = []
        with backend.lease(LONG_IDS) as session:
            with pytest.raises(CancelledError):
                session.sync(
                    LONG_IDS,
                    progress=lambda done, total: seen.append(done),
                    cancelled=lambda: bool(seen),
                )
            kept = len(session.tokens)
            assert 8 <= kept < 200
        ids = LONG_IDS[: kept + 20]
        assert complete(server, ids, N_TOKENS) == alone.text(ids, N_TOKENS)
        assert evaluated(server.health()) <= len(ids) + N_TOKENS
    worker.program.close()


def test_plain_programs_work_together_too(launch: Launcher, toy: Path, alone: Alone) -> None:
    with ExitStack() as stack:
        inner = stack.enter_context(launch.inside("plain"))
        server = inner.server(
            *("--dist-role", "coordinator", "--dist-listen", "127.0.0.1:0", "-m", toy),
            *("--precision", "f32", "--dist-plain"),
        )
        start(inner, toy, "0-2", "--dist-coordinator", server.address, "--dist-plain")
        asking = start(inner, toy, "3-5", "--dist-coordinator", server.address)
        server.wait_ready()
        asking.program.wait_log("speaks the plain protocol")
        text = complete(server, LONG_IDS[:20], N_TOKENS)
        assert text == alone.text(LONG_IDS[:20], N_TOKENS)
