"""Tell the log once who a peer is.

Owns: the line about version and build, the warning about another model file, the memory of both.
Refuses to know: connections, roles. Invariant: a peer that comes back unchanged is no news, and the
memory is bounded.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from ds4py.contracts import ModelCard
from ds4py.wire.extensions import PeerHello
from ds4py.wire.frames import printable

log = logging.getLogger(__name__)

_MAX_KNOWN: Final = 256


class PeerIdentityLog:
    """The ds4py peers that a process has met.

    Args:
        card: Our own model.
    """

    def __init__(self, card: ModelCard):
        self._card = card
        self._known: dict[tuple[str, str, str, str], None] = {}
        self._lock = threading.Lock()

    def meet(self, peer: str, hello: PeerHello) -> None:
        """Say who the peer is, unless that was said before.

        Args:
            peer: Printable name that stays the same when it comes back.
            hello: What it says about itself.
        """
        if not self._is_news((peer, hello.version, hello.build, hello.fingerprint)):
            return
        build = _shown(hello.build) or "unknown"
        log.info("%s is ds4py %s (build %s)", peer, _shown(hello.version), build)
        self._compare_models(peer, hello)

    def _is_news(self, key: tuple[str, str, str, str]) -> bool:
        with self._lock:
            is_news = key not in self._known
            self._known[key] = None
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            return is_news

    def _compare_models(self, peer: str, hello: PeerHello) -> None:
        """Another file of the same model may be meant: a layer may be quantized again."""
        ours, theirs = self._card.fingerprint, hello.fingerprint
        if ours and theirs and ours != theirs and hello.model_id == self._card.model_id:
            log.warning(
                "%s has another file of the same model: its fingerprint is %s, ours %s; "
                "answers differ from those of one process if its weights do",
                *(peer, _shown(theirs), ours),
            )


def _shown(text: str) -> str:
    return printable(text.encode("utf-8", errors="replace"))
