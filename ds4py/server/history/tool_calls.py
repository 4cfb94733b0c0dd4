"""The words in which the model once called tools, by the ids that clients return.

Owns: which ids belong to which block, and what is forgotten when there are too many. Refuses to
know: markup, prompts, files. Invariant: neither limit is ever exceeded, and what is returned for
ids is, to the letter, what was remembered for each of them.

Clients send calls back as JSON, which says less than the model wrote. Prompts repeat the model's
own words, so that what was cached behind them stays valid
(docs/spec/server-and-cli.md#tool-memory). Ids have 128 random bits and go to one client only, so
nobody else can name another's words.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence


class ToolCallMemory:
    """Blocks of calls, least recently used forgotten first; safe to use from several threads.

    Args:
        max_ids: Most ids; 0 remembers nothing.
        max_bytes: Most bytes of blocks, in UTF-8; one that several ids share counts once.
    """

    def __init__(self, max_ids: int = 100_000, max_bytes: int = 512 << 20) -> None:
        self._max_ids = max_ids
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[str, bytes] = OrderedDict()  # by id, least recently used first
        self._ids: dict[bytes, set[str]] = {}
        self._n_bytes = 0

    def remember(self, ids: Sequence[str], block: str) -> None:
        """Remember a block for the ids of its calls, all of them.

        Args:
            ids: Instead of what was remembered for them before.
            block: With the white space before it; an empty one is not remembered.
        """
        written = block.encode()
        with self._lock:
            for id_ in ids:
                self._forget(id_)
                self._add(id_, written)
            self._shrink()

    def block_for(self, ids: Sequence[str]) -> str | None:
        """Return the block of some calls; None unless all of them are known as calls of one."""
        with self._lock:
            blocks = {self._blocks.get(id_) for id_ in ids}
            block = blocks.pop() if len(blocks) == 1 else None
            if block is None:
                return None
            for id_ in ids:
                self._blocks.move_to_end(id_)
        return block.decode()

    def unknown(self, ids: Iterable[str]) -> list[str]:
        """Return those ids for which nothing is remembered."""
        with self._lock:
            return [id_ for id_ in ids if id_ not in self._blocks]

    def items_for(self, blocks: Iterable[str]) -> dict[bytes, bytes]:
        """Return what to store beside a prompt: id to block, for all ids of some blocks.

        Args:
            blocks: Those in the prompt, with the white space before each; unknown ones are skipped.
        """
        with self._lock:
            known = {block.encode(): None for block in blocks}
            return {
                id_.encode(): block for block in known for id_ in sorted(self._ids.get(block, ()))
            }

    def restore(self, entries: Mapping[bytes, bytes]) -> None:
        """Remember what was stored beside a prompt, unless something is remembered already.

        Args:
            entries: Id to block; those that are no UTF-8 are skipped.
        """
        with self._lock:
            for name, block in entries.items():
                id_ = _text(name)
                if id_ is not None and id_ not in self._blocks and _text(block) is not None:
                    self._add(id_, block)
            self._shrink()

    def _add(self, id_: str, block: bytes) -> None:
        if not 0 < len(block) <= self._max_bytes:
            return
        ids = self._ids.get(block)
        if ids is None:
            self._n_bytes += len(block)
            ids = self._ids[block] = set()
        ids.add(id_)
        self._blocks[id_] = block

    def _forget(self, id_: str) -> None:
        block = self._blocks.pop(id_, None)
        if block is None:
            return
        ids = self._ids[block]
        ids.remove(id_)
        if not ids:
            del self._ids[block]
            self._n_bytes -= len(block)

    def _shrink(self) -> None:
        while len(self._blocks) > self._max_ids or self._n_bytes > self._max_bytes:
            self._forget(next(iter(self._blocks)))


def _text(written: bytes) -> str | None:
    try:
        return written.decode()
    except UnicodeDecodeError:
        return None
