"""The coordinator's one port: workers and HTTP clients come through the same door.

Owns: how patient the port is, and who gets which caller. Refuses to know: how callers are accepted
and told apart (`transport.acceptor`), what they say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.transport.acceptor import Acceptor, CallerLimits
from ds4py.transport.sockets import Listener, Socket
from ds4py.wire.frames import hello_limits

_FIRST_WORD_SECONDS: Final = 10.0
_MAX_SILENT: Final = 256


def coordinator_port(
    listener: Listener, coordinator: Coordinator, on_http: Callable[[Socket], None] | None = None
) -> Acceptor:
    """Return what accepts workers, and HTTP clients if somebody takes them; not started yet.

    Args:
        listener: Where they come from; owned by the acceptor.
        coordinator: Gets the workers.
        on_http: Takes over a connection that does not speak DS4D, unread; None turns it away.
    """
    return Acceptor(
        listener,
        coordinator.welcome,
        frames=hello_limits(),
        limits=CallerLimits(word_seconds=_FIRST_WORD_SECONDS, unknown=_MAX_SILENT),
        on_other=on_http,
        security=coordinator.connector.security,
    )
