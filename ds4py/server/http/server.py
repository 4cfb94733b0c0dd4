"""The HTTP server's thread: an event loop with uvicorn in it.

Owns: the loop's thread, listening sockets and adopted connections, deadlines of silent or stalled
clients. Refuses to know: routes, DS4D, how sockets are made. Invariant: `adopt` and `close` may be
called from any thread; after `close` no connection and no generation is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

import h11
import msgspec
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from ds4py.errors import RequestError, TransportError
from ds4py.server.errors import describe
from ds4py.server.http.app import queue_of

_log = logging.getLogger(__name__)

HEADER_SECONDS: Final = 10.0
"""Time in which the headers of a request must be complete."""

STALL_SECONDS: Final = 30.0
"""Time without a byte taken after which a client that is written to counts as gone."""

MAX_HEADER_BYTES: Final = 64 << 10

MAX_CRUMBS: Final = 16_384
"""Pieces of a body below `_CRUMB_BYTES`: each costs as much time as a large one."""

_CRUMB_BYTES: Final = 256
_START_SECONDS: Final = 10.0
_CUT_OFF_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.005


class AdoptedSocket(Protocol):
    """A TCP socket, as far as this module knows one."""

    def close(self) -> None:
        """Close it."""


class HttpServer:
    """Serves an application from a thread of its own.

    Args:
        app: Made by `create_app`; its generation threads end with the server.
    """

    def __init__(self, app: Starlette):
        self._jobs = queue_of(app)
        self._config = uvicorn.Config(
            app,
            loop="asyncio",
            http=_HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=[("Connection", "close")],  # one request per connection, as in ds4
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._server = uvicorn.Server(self._config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def connections(self) -> int:
        """Open connections, its own and adopted ones."""
        return len(self._server.server_state.connections)

    @property
    def closing(self) -> bool:
        """Whether the server ended or was asked to."""
        return self._closed

    def start(self, sockets: Sequence[AdoptedSocket] = ()) -> None:
        """Run the server; returns when it accepts connections.

        Args:
            sockets: Listening sockets, owned by the server from now on; none serves adopted
                connections only.

        Raises:
            TransportError: The server did not start.
        """
        self._thread = threading.Thread(
            target=self._run, args=(list(sockets),), name="ds4-http", daemon=True
        )
        self._thread.start()
        if not self._started.wait(_START_SECONDS) or not self._server.started:
            raise TransportError("the HTTP server did not start; the log has the reason")

    def adopt(self, sock: AdoptedSocket) -> None:
        """Serve HTTP on an accepted connection of which no byte was read; from any thread.

        The socket belongs to the server from now on; a server that does not run closes it.
        """
        if self._loop is None or self._closed:
            sock.close()
            return
        connecting = self._connect(sock)
        try:
            asyncio.run_coroutine_threadsafe(connecting, self._loop)
        except RuntimeError:  # the loop ended just now
            connecting.close()
            sock.close()

    def close(self, deadline: float, *, grace: float = 0.0) -> None:
        """Stop: refuse new requests, end running ones, end the threads; idempotent.

        Args:
            deadline: Seconds until connections that are still open are cut off.
            grace: Seconds before, in which running requests may end by themselves.
        """
        self._closed = True
        self._server.should_exit = True
        end = time.monotonic() + grace + deadline
        self._jobs.close(deadline / 2, grace=grace)
        if self._thread is None:
            return
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive() and self._loop is not None:
            _log.warning("connections were still open after %.1f s and are cut off", deadline)
            with contextlib.suppress(RuntimeError):  # the loop ended just now
                self._loop.call_soon_threadsafe(self._cut_off)
            self._thread.join(_CUT_OFF_SECONDS)

    def _cut_off(self) -> None:
        self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def _run(self, sockets: list[AdoptedSocket]) -> None:
        try:
            asyncio.run(self._serve(sockets))
        except Exception:  # noqa: BLE001 - a thread body: nobody may wait for it in vain
            _log.exception("the HTTP server failed")
        finally:
            self._closed = True
            self._started.set()

    async def _serve(self, sockets: list[AdoptedSocket]) -> None:
        self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._server.serve(cast("Any", sockets)))
        while not self._server.started and not serving.done():
            await asyncio.sleep(_POLL_SECONDS)
        self._started.set()
        await serving

    async def _connect(self, sock: AdoptedSocket) -> None:
        """Give a connection to the protocol that uvicorn gives to those it accepts itself."""

        def protocol() -> _HttpConnection:
            return _HttpConnection(self._config, self._server.server_state, {})

        if self._server.should_exit:
            sock.close()
            return
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(protocol, cast("Any", sock))
        except OSError as error:
            _log.debug("a client was gone before it was served: %s", error)
            sock.close()


class _Pieces(h11.Connection):
    """h11's connection, with an end to bodies that come in crumbs."""

    _n_crumbs = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Data) and len(event.data) < _CRUMB_BYTES:
            self._n_crumbs += 1
            if self._n_crumbs > MAX_CRUMBS:
                raise h11.RemoteProtocolError(f"a body of more than {MAX_CRUMBS} tiny pieces")
        return event


class _HttpConnection(H11Protocol):
    """uvicorn's connection with ds4's deadlines and error bodies."""

    _guard: asyncio.TimerHandle | None = None
    _unsent: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Pieces(h11.SERVER, MAX_HEADER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            super().data_received(data)
        # else nobody reads it: there is one request per connection. It is thrown away, because
        # reading must go on to see the client leave.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        super().connection_made(transport)
        self._guard = self.loop.call_later(HEADER_SECONDS, self._expect_request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_progress()

    def resume_writing(self) -> None:
        self._disarm()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_progress()  # the connection closes only when the client has taken all

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP in the words of docs/spec/server-and-cli.md#errors."""
        _log.debug("refused a connection of %s: %s", self.client, msg)
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.abort()  # in the middle of a reply there is no place for an error
            return
        problem = describe(RequestError("bad HTTP request"))
        body = msgspec.json.encode({"error": problem.body()}) + b"\n"
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # the fault is in the body: who reads it may answer no more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _expect_request(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.send_400_response("no request came in time")

    def _watch_progress(self) -> None:
        self._disarm()
        self._unsent = self.transport.get_write_buffer_size()
        self._guard = self.loop.call_later(STALL_SECONDS, self._expect_progress)

    def _expect_progress(self) -> None:
        if self.transport.get_write_buffer_size() >= self._unsent:
            self.transport.abort()
        else:
            self._watch_progress()

    def _disarm(self) -> None:
        if self._guard is not None:
            self._guard.cancel()
            self._guard = None
