"""What hostile peers do on sockets, and what is watched meanwhile.

Owns: calling, saying, answering, the fence around a worker's dialling, the exceptions that nobody
foresaw. Refuses to know: which program is on the other side. Invariant: everything that waits has a
deadline.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from unittest import mock

from ds4py.config import Address
from ds4py.errors import ConnectError
from ds4py.transport.connection import Connection
from ds4py.transport.connector import Connector
from ds4py.wire.frames import FrameType
from ds4py.worker import worker as worker_module
from interop.fuzz import corpus
from interop.fuzz.damage import RawFrame
from interop.fuzz.target import LOGS
from tests.sockets import read_exactly, read_to_end

SECONDS: Final = 10.0
"""For anything that should happen at once."""

RESET: Final = struct.pack("ii", 1, 0)
"""Linger option: closing leaves nothing behind in the system."""


def soon(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that happens at once."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.0002)


@contextmanager
def watch() -> Iterator[list[str]]:
    """Collect exceptions that nobody foresaw: logged with their traceback, or fatal to a thread."""
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                seen.append(f"{record.getMessage()}: {record.exc_info[1]!r}")

    handler, logs = Handler(), [logging.getLogger(name) for name in LOGS]
    for log in logs:
        log.addHandler(handler)
    ended = lambda args: seen.append(f"{args.thread} died of {args.exc_value!r}")  # noqa: E731
    try:
        with mock.patch.object(threading, "excepthook", ended):
            yield seen
    finally:
        for log in logs:
            log.removeHandler(handler)


@contextmanager
def fence(allowed: Collection[Address] = ()) -> Iterator[None]:
    """Let workers that are made meanwhile dial these addresses only; all others refuse at once."""

    class Fenced(Connector):
        def connect(self, address: Address, limits: Mapping[int, int], **_: object) -> Connection:
            if address not in allowed:
                raise ConnectError("beyond the fence", peer=str(address))
            return super().connect(address, limits, rounds=1)

    with mock.patch.object(worker_module, "Connector", Fenced):
        yield


def call(address: Address) -> socket.socket:
    sock = socket.create_connection((address.host, address.port), timeout=SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return sock


def say(sock: socket.socket, data: bytes) -> bool:
    """Send an input in pieces, then nothing more; False if the peer has hung up meanwhile."""
    step = len(data) // (1 + zlib.crc32(data) % 4) + 1
    try:
        for start in range(0, len(data), step):
            sock.sendall(data[start : start + step])
        sock.shutdown(socket.SHUT_WR)
    except TimeoutError:
        raise
    except OSError:
        return False
    return True


def converse(address: Address, data: bytes) -> bytes:
    """Say an input to a listener and return its answer; now and then hang up without listening."""
    with call(address) as sock:
        said = say(sock, data)
        if said and zlib.crc32(data) % 8 == 0:
            return b""
        return read_to_end(sock)


def read_frame(sock: socket.socket) -> RawFrame | None:
    """Read one frame of an honest peer; None at the end."""
    header = read_exactly(sock, 12)
    if len(header) < 12:
        return None
    kind, size = struct.unpack_from(">II", header, 4)
    return RawFrame(kind, read_exactly(sock, size))


def answered_as(asked: RawFrame, data: bytes) -> bytes:
    """Return an answer that names the WORK, SAVE_REQ or LOAD_BEGIN that was asked."""
    session_id, request_id, token_hash, result_hash = struct.unpack_from(
        ">4Q", asked.body[4:44].ljust(32, b"\0")
    )
    if asked.kind == FrameType.WORK:
        token_hash = result_hash
    return corpus.answering(
        data, request_id=request_id, token_hash=token_hash, session_id=session_id
    )
