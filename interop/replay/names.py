"""What a live party calls by other names than the recording: sessions, requests, addresses.

Owns: the mapping from recorded to live names. Refuses to know: sockets, the order of events.
Invariant: one recorded name has one live name for the whole replay.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ds4py.config import Address
from ds4py.wire.messages import Hello, WireMessage, Work
from ds4py.wire.route import HopEntry, decode_route, encode_route
from interop.replay.recording import N_LAYERS, WORKERS


@dataclass(slots=True)
class Names:
    """Grows while a live coordinator tells its names.

    Args:
        addresses: Where parties can be reached, if not where they could during the recording.
        sessions: Recorded session id -> live one.
        requests: Recorded request id -> live one.
    """

    addresses: dict[str, Address] = field(default_factory=dict)
    sessions: dict[int, int] = field(default_factory=dict)
    requests: dict[int, int] = field(default_factory=dict)

    def learn(self, recorded: WireMessage, live: WireMessage) -> None:
        """Take over the ids that a live coordinator chose."""
        if hasattr(recorded, "session_id") and hasattr(live, "session_id"):
            self.sessions.setdefault(recorded.session_id, live.session_id)
        if hasattr(recorded, "request_id") and hasattr(live, "request_id"):
            self.requests[recorded.request_id] = live.request_id

    def live(self, message: WireMessage, by: str, *, answers: bool) -> WireMessage:
        """Return a recorded message as it must read today.

        Args:
            message: As recorded.
            by: The sender.
            answers: Map request ids as well, because the live party chose them; a request id that
                the live party itself sends must be the recorded one.
        """
        changes: dict[str, Any] = {}
        if isinstance(message, Work):
            changes["route_blob"] = self._route(message)
        if isinstance(message, Hello) and by in self.addresses:
            changes["listen_port"] = self.addresses[by].port
        if hasattr(message, "session_id"):
            changes["session_id"] = self.sessions.get(message.session_id, message.session_id)
        if answers and hasattr(message, "request_id"):
            changes["request_id"] = self.requests.get(message.request_id, message.request_id)
        return replace(message, **changes) if changes else message

    def _route(self, work: Work) -> memoryview:
        entries = decode_route(work.route_blob, work.route_count, N_LAYERS)
        pairs = zip(WORKERS, entries, strict=False)
        return memoryview(encode_route([self._entry(party, entry) for party, entry in pairs]))

    def _entry(self, party: str, entry: HopEntry) -> HopEntry:
        address = self.addresses.get(party, Address("127.0.0.1", entry.port))
        return replace(entry, host=address.host, port=address.port)
