"""The coordinator's door for workers that dial it.

Owns: the wait for their first frame, both forms of introduction, who is let in
(docs/spec/wire-protocol.md#hello and docs/design/protocol-extensions.md). Refuses to know: routes,
what a worker does afterwards. Invariant: to be let in, a worker of the stock protocol hears nothing
at all.
"""

from __future__ import annotations

import threading
from typing import Final, NoReturn

from ds4py.config import Address
from ds4py.coordinator.relay.workers.registry import WorkerRecord
from ds4py.coordinator.relay.workers.worker_hello import (
    RegistrarHost,
    check_hello,
    refusal_of,
    register,
)
from ds4py.errors import ClusterError, RemoteProtocolError
from ds4py.layer_range import LayerRange
from ds4py.transport.connection import Connection
from ds4py.wire.extensions import PeerHello, decode_peer_hello, encode_peer_hello
from ds4py.wire.frames import EXT_HELLO, Frame, FrameType, type_name
from ds4py.wire.messages import ErrorText, Hello, encode

HELLO_SECONDS: Final = 10.0


class WorkerRegistrar:
    """Lets workers in.

    Args:
        host: The coordinator.
        plain: Understand nothing but the stock protocol.
    """

    def __init__(self, host: RegistrarHost, *, plain: bool):
        self._host = host
        self._plain = plain
        self._lock = threading.Lock()
        self._arriving: set[Connection] = set()  # said nothing yet
        self._closed = False

    def admit(self, connection: Connection) -> WorkerRecord | None:
        """Listen to a caller; None if it is no worker, or left, or we are closing.

        The first four refusals of the stock protocol are silent; the others say why.

        Raises:
            ClusterError: A worker that does not fit; it was told.
            Ds4Error: The caller said nonsense, or nothing in time.
        """
        frame = self._first_frame(connection)
        if frame is None:
            return None
        if frame.type == EXT_HELLO and not self._plain:
            return self._admit_extended(connection, decode_peer_hello(frame.body))
        if frame.type != FrameType.HELLO:
            raise RemoteProtocolError(
                f"{type_name(frame.type)}, expected a worker's HELLO", kind="H-TYPE"
            )
        return self._admit_plain(connection, Hello.decode(frame.body))

    def close(self) -> None:
        """Turn away who has said nothing yet, and everybody from now on."""
        with self._lock:
            self._closed = True
            arriving = list(self._arriving)
        for connection in arriving:
            connection.close()

    def _first_frame(self, connection: Connection) -> Frame | None:
        with self._lock:
            if self._closed:
                return None
            self._arriving.add(connection)
        try:
            return connection.receive(timeout=HELLO_SECONDS)
        finally:
            with self._lock:
                self._arriving.discard(connection)

    def _admit_plain(self, connection: Connection, hello: Hello) -> WorkerRecord:
        refusal = check_hello(hello, self._host.facts())
        if refusal is not None:
            _refuse(connection, refusal.text)
        return WorkerRecord(
            link=self._host.new_link_id(),
            address=Address(connection.peer.host, hello.listen_port),
            layers=LayerRange(hello.layer_start, hello.layer_end, bool(hello.has_output)),
            n_ctx=hello.ctx_size,
            has_hidden=bool(hello.has_hidden),
        )

    def _admit_extended(self, connection: Connection, hello: PeerHello) -> WorkerRecord:
        text = refusal_of(hello, self._host.facts())
        if text is not None:
            _refuse(connection, text)
        if hello.listen_port is None:
            _refuse(connection, "names no data port")
        address = Address(connection.peer.host, hello.listen_port)
        connection.send(encode_peer_hello(self._host.introduce()))
        return register(self._host, hello, address, dialled=False)


def _refuse(connection: Connection, text: str) -> NoReturn:
    connection.send(encode(ErrorText.of(text)))
    raise ClusterError(f"worker refused: {text}")
