"""Every connection that others open to this process.

Owns: the accepting thread, a thread for each caller, what a caller may be before anybody knows it,
and how many there may be. Refuses to know: what is said on a connection, HTTP. Invariant: a caller
that says nothing costs one thread for a bounded time, if a first word is asked for at all; whatever
a caller does, the next one is accepted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ds4py.config import Address
from ds4py.errors import ConnectError, Ds4Error
from ds4py.transport.connection import Connection
from ds4py.transport.security import HANDSHAKE_SECONDS, PLAIN, Security
from ds4py.transport.sockets import Listener, Socket
from ds4py.transport.stream import PlainStream, Stream
from ds4py.transport.switch import first_word
from ds4py.wire.frames import MAGIC

log = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """How many callers, and how patient we are with them.

    Args:
        word_seconds: Time in which the first word must be there; None does not look, if peers can
            be of one kind only: a caller may then be silent for as long as it likes.
        unknown: Callers at once that have not proved yet what they are; None does not count them.
        served: Callers at once altogether; None does not count them.
    """

    word_seconds: float | None = None
    unknown: int | None = None
    served: int | None = None


class Acceptor:
    """Takes callers from a listener and serves each on a thread of its own.

    Args:
        listener: Where they come from; owned from now on.
        serve: Called with a connection, which it owns; the thread ends with it.
        frames: Accepted frame types of a new connection, with their largest bodies in bytes.
        limits: Of callers.
        name: What threads of callers are called, before the address of the caller.
        on_other: Takes over the socket of a caller with another first word, unread; None turns it
            away.
        security: What comes before the first frame.
    """

    def __init__(
        self,
        listener: Listener,
        serve: Callable[[Connection], None],
        *,
        frames: Mapping[int, int],
        limits: CallerLimits,
        name: str = "caller",
        on_other: Callable[[Socket], None] | None = None,
        security: Security = PLAIN,
    ):
        self._listener = listener
        self._serve = serve
        self._frames = frames
        self._limits = limits
        self._name = name
        self._on_other = on_other
        self._security = security
        self._unknown: set[PlainStream] = set()
        self._callers: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)

    @property
    def address(self) -> Address:
        """The bound address."""
        return self._listener.address

    @property
    def n_callers(self) -> int:
        """Callers that have a thread now, known or not."""
        return len(self._callers)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, and turn away callers that are not known yet; the others go on."""
        self._closed = True
        self._listener.close()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        with self._lock:
            for stream in self._unknown:
                stream.shutdown()

    def join(self, deadline: float) -> None:
        """Wait for the threads of all callers, until a time of `time.monotonic` at most."""
        with self._lock:
            callers = list(self._callers)
        for thread in callers:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while (sock := self._listener.accept()) is not None:
            try:
                stream = PlainStream(sock, self._listener.config)
            except ConnectError as e:
                log.debug("accepted connection is gone already: %s", e)
                continue
            if self._has_room(stream):
                self._start_caller(stream)
            else:
                stream.shutdown()
                stream.close()

    def _has_room(self, stream: PlainStream) -> bool:
        unknown, served = self._limits.unknown, self._limits.served
        if unknown is not None and len(self._unknown) >= unknown:
            log.warning("too many connections that say nothing; one is turned away")
            return False
        if served is not None and len(self._callers) >= served:
            log.debug("%s: turned away, %d others are served", stream.peer, served)
            return False
        return True

    def _start_caller(self, stream: PlainStream) -> None:
        name = f"{self._name} {stream.peer}"
        caller = threading.Thread(target=self._meet, args=(stream,), name=name, daemon=True)
        with self._lock:
            self._unknown.add(stream)
            self._callers.add(caller)
        caller.start()

    def _meet(self, stream: PlainStream) -> None:
        """Find out what a caller is and serve it."""
        leave: Callable[[], None] = stream.close
        try:
            secured = self._know(stream)
            if secured is not None:
                connection = Connection(secured, self._frames, cores=self._listener.config.cores)
                leave = connection.close
                self._serve(connection)
        except Ds4Error as e:
            log.debug("caller on %s is gone: %s", self.address, e)
            leave()
        except Exception:  # one caller's bug must not leave its socket open
            log.exception("a caller on %s could not be served", self.address)
            leave()
        finally:
            with self._lock:
                self._callers.discard(threading.current_thread())

    def _know(self, stream: PlainStream) -> Stream | None:
        """Return what a peer's frames come on; None if the caller is somebody else's, or nobody's.

        Until then it counts as unknown: a peer that says its word and nothing more is no better
        than one that is silent.
        """
        try:
            word = self._first_word(stream)
            if word and not self._closed:
                deadline = time.monotonic() + HANDSHAKE_SECONDS
                return self._security.accept(stream, word, deadline)
        finally:
            with self._lock:
                self._unknown.discard(stream)
        if word == b"" and self._on_other is not None:
            self._on_other(stream.sock)
            return None
        if word == b"":
            log.warning("a caller on %s speaks no DS4D; HTTP is elsewhere", self.address)
        stream.close()
        return None

    def _first_word(self, stream: PlainStream) -> bytes | None:
        seconds, words = self._limits.word_seconds, self._security.words
        if seconds is None:
            if tuple(words) == (MAGIC,):
                return MAGIC
            seconds = HANDSHAKE_SECONDS  # there are several kinds of peers, so one must look
        return first_word(stream, words, deadline=time.monotonic() + seconds)
