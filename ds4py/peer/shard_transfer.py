"""A shard on its way over a connection, in either direction.

Owns: which form a model's shards have, the memory that one arrives in, the bounds on its chunks
(docs/spec/wire-protocol.md#snapshot-chunk, #quirks Q22), how long a transfer may take. Refuses to
know: what stands in a shard, who asked for it.
Invariant: bytes are kept only if memory was taken for them, which is for the caller to decide once
it knows that the announced size is right.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from ds4py.errors import (
    CapacityError,
    PeerClosedError,
    RemoteProtocolError,
    TransportError,
    TransportTimeoutError,
)
from ds4py.transport.connection import Connection
from ds4py.wire.frames import Frame, FrameType, type_name
from ds4py.wire.messages import ErrorText, SnapshotChunk

GRACE_SECONDS: Final = 60.0
_SLOWEST: Final = 1 << 20  # bytes a second; a network below that could serve no route
_MAX_EMPTY: Final = 1024


def transfer_seconds(n_bytes: int) -> float:
    """Return how long the bytes of a shard may take on their way."""
    return GRACE_SECONDS + n_bytes / _SLOWEST


@contextmanager
def time_limit(connection: Connection, seconds: float) -> Iterator[None]:
    """Close a connection unless the body ends in time, which wakes anyone who waits on it.

    A limit for each send and receive would not do: a byte now and then would satisfy it.

    Raises:
        TransportTimeoutError: Time was up; in place of the error that closing led to.
    """
    late = threading.Event()

    def expire() -> None:
        late.set()
        connection.close()

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except TransportError as e:
        if late.is_set():
            raise TransportTimeoutError(
                f"was not done with a session's shard after {seconds:g} s",
                peer=str(connection.peer),
            ) from e
        raise
    finally:
        timer.cancel()


class Arrival:
    """A shard that comes in chunks.

    It is put together in one buffer rather than in a file: the size is known beforehand, it is at
    most twice what a session's slot of the cache takes anyway, and the loader wants it in one
    piece. The system commits pages as they are written, so a peer that announces much and sends
    nothing costs nothing.

    Args:
        request_id: The transfer.
        n_bytes: Announced size.
    """

    def __init__(self, request_id: int, n_bytes: int):
        self._request_id = request_id
        self._empty = 0
        self._memory: memoryview | None = None
        self.n_bytes = n_bytes
        self.missing = n_bytes

    def take_memory(self) -> None:
        """Keep what arrives from now on.

        Raises:
            CapacityError: There is not enough memory.
        """
        try:
            self._memory = np.empty(self.n_bytes, np.uint8).data
        except MemoryError:
            raise CapacityError(
                "bytes of memory for a session's shard", needed=self.n_bytes, available=0
            ) from None

    @property
    def payload(self) -> memoryview:
        """The whole shard, once nothing is missing."""
        assert self._memory is not None
        assert not self.missing
        return self._memory

    def receive(self, connection: Connection) -> None:
        """Read chunks until nothing is missing.

        Raises:
            RemoteProtocolError: Kind "L-CHUNK": a frame that does not belong here.
            TransportError: The connection ended before.
        """
        while self.missing:
            self._add(next_frame(connection, FrameType.SNAPSHOT_CHUNK).body)

    def _add(self, body: memoryview) -> None:
        chunk = SnapshotChunk.decode(body)
        n_bytes = chunk.data.nbytes
        self._empty += not n_bytes
        is_ours = chunk.request_id == self._request_id and n_bytes <= self.missing
        if not is_ours or self._empty > _MAX_EMPTY:
            raise RemoteProtocolError("invalid distributed snapshot chunk", kind="L-CHUNK")
        if self._memory is not None:
            start = self.n_bytes - self.missing
            self._memory[start : start + n_bytes] = chunk.data
        self.missing -= n_bytes


def next_frame(connection: Connection, expected: FrameType) -> Frame:
    """Wait for a frame of one type.

    Raises:
        RemoteProtocolError: Kind "L-CHUNK": another one came.
        TransportError: The connection ended, perhaps with the peer's reason.
    """
    frame = connection.receive()
    if frame is None:
        raise PeerClosedError(f"closed before {expected.name}", peer=str(connection.peer))
    if frame.type == FrameType.ERROR and not frame.discarded:
        words = ErrorText(bytes(frame.body)).text
        raise PeerClosedError(f"said: {words}", peer=str(connection.peer))
    if frame.type != expected or frame.discarded:
        raise RemoteProtocolError(
            f"{type_name(frame.type)} in place of {expected.name}", kind="L-CHUNK"
        )
    return frame
