"""A `Security` that encrypts, for one purpose: to prove that one fits under every connection.

It is no product: one fixed pair of key and certificate (`tls_pair.pem`, worth nothing, valid for a
century so that clocks do not matter) stands for a secret that both sides have.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ds4py.config import Address
from ds4py.errors import PeerClosedError, TransportError, TransportTimeoutError
from ds4py.transport.stream import Buffer, Stream, after

PAIR = Path(__file__).with_name("tls_pair.pem")
WORD = b"DS4T"

Wrap = Callable[[Stream], Stream]


def _context(protocol: int) -> ssl.SSLContext:
    """TLS 1.3 only; both sides show the pair and trust nothing else."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(PAIR)
    context.load_verify_locations(PAIR)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


class TlsStream:
    """TLS over any stream: OpenSSL between two memory buffers, never on a socket.

    Two locks: `_tls` around OpenSSL and no call of the stream below; `_order` around records on
    their way, which only senders wait for.
    """

    def __init__(self, below: Stream, context: ssl.SSLContext):
        self.below = below
        self._came, self._leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._ssl = context.wrap_bio(self._came, self._leaves, server_side=server)
        self._tls, self._order = threading.Lock(), threading.Lock()
        self._cipher = memoryview(bytearray(1 << 16))
        self._unsent: Sequence[Buffer] = ()

    @property
    def peer(self) -> Address:
        return self.below.peer

    @property
    def local(self) -> Address:
        return self.below.local

    def shake_hands(self, deadline: float) -> None:
        done = False
        while not done:
            try:
                self._ssl.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                self.below.send_pieces([self._leaves.read()])  # the alert that says why
                raise
            if self._leaves.pending:
                self.below.send_pieces([self._leaves.read()])
            if not (done or self._fetch(deadline)):
                raise ConnectionResetError(0, "hung up during the handshake")

    def recv_into(self, buffer: memoryview, deadline: float | None = None) -> int:
        while True:
            with self._tls:
                try:
                    return self._ssl.read(len(buffer), buffer)  # type: ignore[return-value, arg-type]
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return 0
            self._say()
            if not self._fetch(deadline):
                return 0

    def _fetch(self, deadline: float | None) -> int:
        n_bytes = self.below.recv_into(self._cipher, deadline)
        with self._tls:
            self._came.write(self._cipher[:n_bytes])
        return n_bytes

    def _say(self) -> None:
        """Send what TLS itself wants to say, unless a sender does it with its next record."""
        if self._order.acquire(blocking=False):
            try:
                with self._tls:
                    said = self._leaves.read()
                if said:
                    self._unsent = self.below.try_send([*self._unsent, said])
            finally:
                self._order.release()

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        with self._order:
            self.below.send_pieces(self._unsent)
            self._unsent = ()
            pieces = after(pieces, 0)
            while pieces:
                pieces, record = self._sealed(pieces)
                self.below.send_pieces([record])

    def try_send(self, pieces: Sequence[Buffer]) -> Sequence[Buffer]:
        with self._order:
            self._unsent = self.below.try_send(self._unsent)
            pieces = after(pieces, 0)
            while pieces and not self._unsent:
                pieces, record = self._sealed(pieces)
                self._unsent = self.below.try_send([record])
            return pieces or ([b""] if self._unsent else ())

    def _sealed(self, pieces: Sequence[Buffer]) -> tuple[Sequence[Buffer], bytes]:
        with self._tls:
            taken = self._ssl.write(pieces[0])  # type: ignore[arg-type]
            return after(pieces, taken), self._leaves.read()

    def shutdown(self) -> None:
        self.below.shutdown()

    def close(self) -> None:
        self.below.close()


class TlsSecurity:
    """Everybody must know the pair; `wrap` may stand between TLS and the socket."""

    words = (WORD,)

    def __init__(self, wrap: Wrap = lambda below: below):
        self._wrap = wrap
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT)
        self.server = _context(ssl.PROTOCOL_TLS_SERVER)

    def dial(self, stream: Stream, deadline: float) -> Stream:
        below = self._wrap(stream)
        below.send_pieces([WORD])
        return self._proved(below, self.client, deadline)

    def accept(self, stream: Stream, word: bytes, deadline: float) -> Stream:
        below = self._wrap(stream)
        left = memoryview(bytearray(len(word)))
        while left:
            left = left[below.recv_into(left, deadline) :]
        return self._proved(below, self.server, deadline)

    def _proved(self, below: Stream, context: ssl.SSLContext, deadline: float) -> Stream:
        peer = str(below.peer)
        tls = TlsStream(below, context)
        try:
            tls.shake_hands(deadline)
        except BlockingIOError as e:
            raise TransportTimeoutError("no handshake in time", peer=peer) from e
        except ssl.SSLError as e:
            raise TransportError(f"does not know the secret: {e.reason}", peer=peer) from e
        except OSError as e:
            raise PeerClosedError(f"no handshake: {e.strerror}", peer=peer) from e
        return tls


class Recorder:
    """A stream that remembers all that goes out."""

    def __init__(self, below: Stream, heard: list[bytes]):
        self.below, self._heard = below, heard
        self.peer, self.local = below.peer, below.local
        self.recv_into, self.shutdown, self.close = below.recv_into, below.shutdown, below.close

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        self._heard.extend(bytes(piece) for piece in pieces)
        self.below.send_pieces(pieces)

    def try_send(self, pieces: Sequence[Buffer]) -> Sequence[Buffer]:
        self._heard.extend(bytes(piece) for piece in pieces)
        return self.below.try_send(pieces)


class Chopper:
    """A stream that gives and takes a few bytes at a time, as sizes say in turns."""

    def __init__(self, below: Stream, sizes: Sequence[int]):
        self.below, self._sizes = below, sizes
        self._n_in = self._n_out = 0
        self.peer, self.local = below.peer, below.local
        self.shutdown, self.close = below.shutdown, below.close

    def recv_into(self, buffer: memoryview, deadline: float | None = None) -> int:
        self._n_in += 1
        size = self._sizes[self._n_in % len(self._sizes)]
        return self.below.recv_into(buffer[:size], deadline)

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        while pieces := after(pieces, 0):
            self._n_out += 1
            part = memoryview(pieces[0])[: self._sizes[self._n_out % len(self._sizes)]]
            self.below.send_pieces([part])
            pieces = after(pieces, len(part))

    def try_send(self, pieces: Sequence[Buffer]) -> Sequence[Buffer]:
        """Take one part only, even if there is room."""
        pieces = after(pieces, 0)
        if not pieces:
            return ()
        self._n_out += 1
        part = memoryview(pieces[0])[: self._sizes[self._n_out % len(self._sizes)]]
        rest = self.below.try_send([part])
        return after(pieces, len(part) - sum(map(len, rest)))
