"""How two processes know that they may talk, and whether others can read along.

Owns: the contract that `Connector` and `Acceptor` keep, and its one form today, no protection.
Refuses to know: sockets, frames, who connects to whom. Invariant: it comes before the first frame
and below all frames, so that every connection is covered alike: a coordinator's, those between
workers, lanes.

A form that encrypts sends a word of its own and shakes hands in `dial`; in `accept` it takes that
word off the stream and answers. Both return a stream that wraps the one they got. The word is what
an `Acceptor` tells the callers of one port apart by, and is never encrypted: so it can be seen
without being read, and the one who takes the caller over finds the socket untouched.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from ds4py.transport.stream import Stream
from ds4py.wire.frames import MAGIC

HANDSHAKE_SECONDS: Final = 10.0
"""Time in which a handshake must be done, on both sides."""


class Security(Protocol):
    """What lies between a stream of TCP and the first frame."""

    @property
    def words(self) -> Collection[bytes]:
        """How a peer may begin, four bytes each; also those that `accept` refuses, to say why."""

    def dial(self, stream: Stream, deadline: float) -> Stream:
        """Prove ourselves to somebody whom we have called.

        Args:
            stream: Nothing was sent or received yet; closed by the caller if this fails.
            deadline: Of `time.monotonic`.

        Returns:
            What frames travel on; owns `stream`.

        Raises:
            TransportError: The other side is not who it must be, or did not answer in time.
        """

    def accept(self, stream: Stream, word: bytes, deadline: float) -> Stream:
        """Let somebody who has called us prove itself.

        Args:
            stream: Nothing was received yet; closed by the caller if this fails.
            word: One of `words`: what the stream begins with.
            deadline: Of `time.monotonic`.

        Returns:
            What frames travel on; owns `stream`.

        Raises:
            TransportError: The caller is not who it must be, or was too slow.
        """


class PlainSecurity:
    """No protection: frames travel as they are, and anybody may call."""

    words = (MAGIC,)

    def dial(self, stream: Stream, deadline: float) -> Stream:
        """Return the stream as it is."""
        del deadline
        return stream

    def accept(self, stream: Stream, word: bytes, deadline: float) -> Stream:
        """Return the stream as it is: its first word is that of the first frame."""
        del word, deadline
        return stream


PLAIN: Final[Security] = PlainSecurity()
