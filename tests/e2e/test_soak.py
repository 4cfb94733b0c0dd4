"""The crowd of the endurance run, for a moment, at a server in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.e2e.support import coordinator, route, wait_idle, worker
from tools.run_soak import DIALECTS, Outcome, ask_again, crowd

N_CLIENTS = 8


def test_a_crowd_is_served_without_an_error(toy: Path) -> None:
    seen = Outcome()
    with (
        worker(toy, "0-2") as first,
        worker(toy, "3-5") as last,
        coordinator(toy, route=route(first, last), n_sessions=4) as server,
    ):
        server.wait_ready()
        url = f"http://{server.address}"
        asyncio.run(crowd(url, N_CLIENTS, 3.0, seen))
        wait_idle(server)
        ask_again(url, seen)
    assert seen.errors == []
    assert seen.refused == 0
    assert sorted(seen.served) == list(range(N_CLIENTS))
    assert seen.cached.keys() == DIALECTS.keys()
    assert min(seen.cached.values()) > 0
