"""What one more stage costs a token, and how fast large frames come in: the section `hop`.

Owns: routes of stages that compute nothing, two ways of reading a frame. Refuses to know: real
models, how verdicts are shown. Invariant: what is compared takes turns; this process is on the
first core and others on the cores after it, as far as there are any.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import numpy as np

from ds4py.config import Address, CoordinatorConfig, RouteEntry, SocketConfig
from ds4py.contracts import Session
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.errors import ClusterError
from ds4py.layer_range import LayerRange
from ds4py.transport.connector import Connector
from ds4py.transport.stream import Stream
from ds4py.wire.frames import HEADER_BYTES, FrameType, encode_frame
from tools.benchmarks import targets
from tools.benchmarks.null_runner import LOOPBACK, N_CTX, NullRunner, null_card
from tools.benchmarks.processes import pinned_here, ready, running
from tools.benchmarks.sections import Bench
from tools.benchmarks.targets import Finding, found, median_ratio

FRAME_BYTES: Final = 256 << 20
_N_TOKENS: Final = 300
_HOPS: Final = (0, 1, 2)


def measure(bench: Bench) -> Iterator[Finding]:
    """Yield the cost of a hop and the rate of frames."""
    with pinned_here(0):
        yield _hop(bench)
        yield _receive(bench)


# --- hops -----------------------------------------------------------------------------------------


def _hop(bench: Bench) -> Finding:
    usec = hop_medians(bench.rounds, _N_TOKENS, bench.step)
    added = [two - one for one, two in zip(usec[1], usec[2], strict=True)]
    routes = ", ".join(f"{n}: {statistics.median(usec[n]):.0f} us" for n in _HOPS)
    detail = f"a token by number of hops: {routes}; fewest for one more {min(added):.0f} us"
    return found(targets.HOP, statistics.median(added), cores=bench.cores, detail=detail)


def hop_medians(rounds: int, n_tokens: int, step: Callable[[str], None]) -> dict[int, list[float]]:
    """Return each round's median microseconds of a token, by number of workers.

    Args:
        rounds: Turns of every route; one more comes first, for first-use costs.
        n_tokens: Of a turn.
        step: Told what comes next.
    """
    usec: dict[int, list[float]] = {n: [] for n in _HOPS}
    with ExitStack() as stack:
        sessions = {n: stack.enter_context(null_session(n)) for n in _HOPS}
        for turn in range(rounds + 1):
            for n, session in sessions.items():
                step(f"a token over {n} hops")
                median = statistics.median(_token_usec(session, n_tokens))
                if turn:
                    usec[n].append(median)
    return usec


@contextmanager
def null_session(n_hops: int) -> Iterator[Session]:
    """Start workers of one layer each, and a coordinator with the layer before them."""
    n_layers = n_hops + 1
    with ExitStack() as stack:
        ports = []
        for layer in range(1, n_layers):
            command = [
                sys.executable,
                "-m",
                "tools.benchmarks.null_runner",
                "stage",
                layer,
                n_layers,
            ]
            stage = stack.enter_context(running(f"stub of layer {layer}", command, layer))
            ports.append(int(stage.ask("")))
        own = NullRunner(LayerRange(0, 0, has_output=n_hops == 0), n_layers)
        config = CoordinatorConfig(
            route=tuple(RouteEntry(Address(LOOPBACK.host, port)) for port in ports), n_sessions=1
        )
        coordinator = Coordinator(null_card(n_layers), N_CTX, config, SocketConfig(), local=own)
        backend = stack.enter_context(ready(coordinator))
        yield stack.enter_context(backend.lease(()))


def _token_usec(session: Session, n_tokens: int) -> list[float]:
    session.rewind(0)
    session.sync([1])
    return [1e6 * _seconds(lambda: session.eval(2)) for _ in range(n_tokens)]


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


# --- frames ---------------------------------------------------------------------------------------


def _receive(bench: Bench) -> Finding:
    bench.step(f"frames of {FRAME_BYTES >> 20} MiB")
    ours, bare = frame_rates(bench.rounds, FRAME_BYTES)
    detail = f"{statistics.median(ours):.2f} GB/s, bare {statistics.median(bare):.2f} GB/s"
    return found(targets.RECEIVE, median_ratio(ours, bare), cores=bench.cores, detail=detail)


def frame_rates(rounds: int, n_bytes: int) -> tuple[list[float], list[float]]:
    """Return GB/s of each round through `Connection.receive`, and into memory that is there.

    Args:
        rounds: Frames for each way; one more comes first, for first-use costs.
        n_bytes: Of a frame's body.
    """
    with ExitStack() as stack:
        command = [sys.executable, "-m", "tools.benchmarks.null_runner", "frames", n_bytes]
        sender = stack.enter_context(running("sender of frames", command, 1))
        address = Address(LOOPBACK.host, int(sender.ask("")))
        connection = Connector(SocketConfig()).connect(address, {FrameType.RESULT: n_bytes})
        stack.callback(connection.close)
        there = np.ones(HEADER_BYTES + n_bytes, np.uint8).data
        ways: tuple[Callable[[], object], ...] = (
            connection.receive,
            lambda: _read_all(connection.stream, there),
        )
        rates: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds + 1):
            for way, own in zip(ways, rates, strict=True):
                connection.send(encode_frame(FrameType.WORK, b""))
                rate = 1e-9 * n_bytes / _seconds(way)
                if turn:
                    own.append(rate)
    return rates


def _read_all(stream: Stream, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = stream.recv_into(buffer[done:])
        if not count:
            raise ClusterError("the sender of frames has ended")
        done += count
