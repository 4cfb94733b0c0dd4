"""Prefixes of prompts on disk, so that a conversation survives its session and its server.

Owns: finding, loading and storing checkpoints in a folder, the budget, the fate of bad files
(docs/spec/server-and-cli.md#disk-cache, #disk-cache-options, #kvc, #eviction). Refuses to know:
sessions, prompts, requests. Invariant: after every save the cache's files are within the budget,
what `load` returns is what was stored, and no trouble with the disk is ever more than a warning and
a miss.

Any thread may call any method at any time, and other processes, ds4's among them, may use the same
folder: the index is replaced as a whole by every scan, and what needs agreement is decided under
the folder's lock (`kvc_files`), which nobody holds while a payload is read or written.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ds4py.errors import SnapshotError
from ds4py.snapshot.kvc import (
    HEADER_BYTES,
    Buffer,
    Flag,
    KvcHeader,
    Reason,
    ToolMap,
    crc_of,
    write_trailer,
)
from ds4py.snapshot.kvc_files import (
    Folder,
    PartFile,
    copied,
    count_use,
    locked,
    make_folder,
    misfit,
    read_body,
    read_tool_map,
    remove_leftovers,
    scan,
    set_aside,
)
from ds4py.snapshot.kvc_policy import (
    CacheIdentity,
    DiskCacheOptions,
    Entry,
    continued_by,
    eviction_order,
    file_name,
    is_usable,
    longest,
    with_slack,
)

__all__ = ["CacheIdentity", "Checkpoint", "DiskCache", "DiskCacheOptions", "Hit", "Loaded"]

log = logging.getLogger(__name__)

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a file stands for.

    Args:
        key: Rendered text of the prefix; for a session with hidden reasoning the visible text.
        n_tokens: Tokens of the session.
        reason: Why it is saved now.
        flags: Which kind of text the key is.
        tool_map: Blocks of the calls in the text, as they were sampled.
    """

    key: bytes
    n_tokens: int
    reason: Reason
    flags: Flag = Flag.NONE
    tool_map: ToolMap = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hit:
    """A file whose text is a prefix of a prompt.

    Args:
        entry: The file; what its header says is not verified before it is loaded.
        key: Its text, as the prompt has it.
    """

    entry: Entry
    key: bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file's content, verified.

    Args:
        header: Tokens, flags, reason; hits and last use as they were before.
        payload: To be given to `Session.load`; owned by the caller.
        tool_map: Blocks by id; empty if the file has none.
    """

    header: KvcHeader
    payload: memoryview
    tool_map: dict[bytes, bytes]


class DiskCache:
    """Checkpoints in a folder.

    Args:
        folder: Made if it is not there, with mode 0700.
        options: Budget and limits.
        identity: Of the model whose sessions are saved and loaded.
        now: Unix time.

    Raises:
        ConfigError: The folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        options: DiskCacheOptions,
        identity: CacheIdentity,
        *,
        now: Callable[[], float] = time.time,
    ):
        self.options = options
        self._folder = folder
        self._identity = identity
        self._now = now
        self._index: Mapping[str, Entry] = {}
        self._refused: set[tuple[str, int]] = set()  # damaged, and could not be renamed
        self._consumed: set[str] = set()
        self._tool_ids: dict[Entry, frozenset[bytes]] = {}
        self._troubled = False
        make_folder(folder)
        try:
            with locked(folder):
                self._make_room()
        except OSError as e:
            self._complain(str(e))
        self._introduce()

    def find(self, prompt_text: bytes) -> Hit | None:
        """Return the usable file with the longest text that a prompt begins with.

        Of files that are new since the last call header and seal are read, of others nothing.
        """
        try:
            entries = self._scan().entries
        except OSError as e:
            self._complain(str(e))
            return None
        entry = longest(entries, prompt_text, self._identity, self.options)
        return None if entry is None else Hit(entry, prompt_text[: entry.header.key_bytes])

    def load(self, hit: Hit) -> Loaded | None:
        """Read and verify a file, and count the use.

        A session may own from now on what a long file holds (longer than cold saves, which only
        conversations are); the file is kept until a save continues its text.

        Returns:
            None if the file is gone or damaged: `find` has another answer then.
        """
        path, header = self._folder / hit.entry.name, hit.entry.header
        try:
            payload, tool_map = read_body(path, hit.entry, hit.key)
        except FileNotFoundError:
            return None
        except (OSError, SnapshotError) as e:
            self.reject(hit, str(e))
            return None
        count_use(path, header.hits + 1, self._now())
        if 0 < self.options.cold_max_tokens < header.n_tokens:
            self._consumed.add(hit.entry.name)
        return Loaded(header, payload, tool_map)

    def reject(self, hit: Hit, reason: str) -> None:
        """Set a file aside: it is damaged, or no session could go on from it."""
        self._set_aside(hit.entry, reason)

    def store(self, checkpoint: Checkpoint, payload: Callable[[], Sequence[memoryview]]) -> bool:
        """Save a session, or refresh the file that holds it already.

        A usable file with the same text keeps its payload; only calls that it does not know are
        added to its tool map, by copying it. Anything else of that name is replaced.

        Args:
            checkpoint: What is saved.
            payload: Returns the session's pieces (`Session.save`). Called if a payload is needed;
                what it raises passes through.

        Returns:
            Whether the text is on disk now. Trouble with the disk is logged, never raised.
        """
        if not checkpoint.key or checkpoint.n_tokens < self.options.min_tokens:
            return False
        try:
            known = self._refresh(checkpoint)
            if known is not None:
                return known
        except (OSError, SnapshotError) as e:
            self._complain(str(e))
            return False
        pieces = payload()
        try:
            return self._write(checkpoint, pieces)
        except (OSError, SnapshotError) as e:
            self._complain(str(e))
            return False

    def tool_blocks(self, ids: Collection[bytes]) -> dict[bytes, bytes]:
        """Return the sampled blocks of calls that some file of this model remembers.

        For histories with calls from before this server started. A file's ids are read once.
        """
        try:
            entries = self._scan().entries.values()
        except OSError as e:
            self._complain(str(e))
            return {}
        holders = [e for e in entries if e.header.has_tool_map and self._is_usable(e)]
        holders.sort(key=lambda entry: entry.header.last_used, reverse=True)
        known = self._tool_ids  # another thread may put a new one in its place
        ids_of = self._tool_ids = {e: known[e] for e in holders if e in known}
        found: dict[bytes, bytes] = {}
        for entry in holders:
            wanted = set(ids) - found.keys()
            if wanted and not wanted.isdisjoint(ids_of.get(entry, wanted)):
                blocks = self._blocks_of(entry)
                ids_of[entry] = frozenset(blocks)
                found |= {id_: blocks[id_] for id_ in wanted & blocks.keys()}
        return found

    def _blocks_of(self, entry: Entry) -> dict[bytes, bytes]:
        """Return a file's tool map; empty if it is gone or damaged."""
        try:
            return read_tool_map(self._folder / entry.name, entry)
        except SnapshotError as e:
            self._set_aside(entry, str(e))
        except OSError as e:
            log.debug("%s: %s", entry.name, e)
        return {}

    def _refresh(self, checkpoint: Checkpoint) -> bool | None:
        """Add calls to the usable file with a text; None if there is no such file."""
        entry = self._scan().entries.get(file_name(checkpoint.key))
        if entry is None or not self._is_usable(entry):
            return None
        path = self._folder / entry.name
        try:
            old = read_tool_map(path, entry) if entry.header.has_tool_map else {}
        except FileNotFoundError:
            return None
        except SnapshotError as e:
            self._set_aside(entry, str(e))
            return None
        tool_map = {**old, **checkpoint.tool_map}
        if tool_map == old:
            return True
        raw = replace(entry.header, flags=entry.header.flags | Flag.TOOL_MAP).encode()
        trailer = write_trailer(raw, tool_map, entry.seal)
        body = copied(path, HEADER_BYTES, entry.header.trailer_at)
        n_bytes = entry.header.trailer_at + len(trailer)
        return self._publish(checkpoint.key, n_bytes, itertools.chain([raw], body, [trailer]))

    def _write(self, checkpoint: Checkpoint, pieces: Sequence[memoryview]) -> bool:
        """Write a whole file."""
        key, now = checkpoint.key, int(self._now())
        tools = Flag.TOOL_MAP if checkpoint.tool_map else Flag.NONE
        raw = KvcHeader(
            n_tokens=checkpoint.n_tokens,
            ctx=self._identity.n_ctx,
            payload_bytes=sum(piece.nbytes for piece in pieces),
            key_bytes=len(key),
            created=now,
            last_used=now,
            reason=checkpoint.reason,
            flags=(checkpoint.flags & ~Flag.TOOL_MAP) | tools,
            quant_bits=self._identity.quant_bits,
            model_id=self._identity.model_byte,
            abi=self._identity.abi,
        ).encode()
        seal = self._identity.seal(crc_of([key, *pieces]))
        whole: list[bytes | memoryview] = [raw, key, *pieces]
        whole.append(write_trailer(raw, checkpoint.tool_map, seal))
        return self._publish(key, sum(memoryview(piece).nbytes for piece in whole), whole)

    def _publish(self, key: bytes, n_bytes: int, pieces: Iterable[Buffer]) -> bool:
        """Take the room for a file, write it, and drop what it continues."""
        path = self._folder / file_name(key)
        with locked(self._folder):
            if not self._make_room(n_bytes, key):
                return False
            part = PartFile(path, n_bytes)
        with part:
            part.write(pieces)
        self._troubled = False
        log.debug("%s: saved, %.1f MiB", path, n_bytes / _MIB)
        for name in continued_by(self._index.values(), key):
            if name in self._consumed:
                self._consumed.discard(name)
                (self._folder / name).unlink(missing_ok=True)
        return True

    def _make_room(self, n_bytes: int = 0, key: bytes = b"") -> bool:
        """Remove files until a new one fits; hold the folder's lock.

        The file that the new one replaces counts as gone. Nothing is removed if that would not be
        enough. Damaged files go first.
        """
        remove_leftovers(self._folder)
        found, name = self._scan(), file_name(key)
        replaced = found.entries.pop(name, None)
        if key and replaced is None and (self._folder / name).exists():
            log.debug("%s: is not ours, so the text is not saved", name)
            return False
        total = found.n_bytes
        usable = [entry for entry in found.entries.values() if self._is_usable(entry)]
        order = eviction_order(found.entries.values(), self._now(), continued_by(usable, key))
        victims = [*found.aside.items(), *((entry.name, entry.n_bytes) for entry in order)]
        room = self.options.space_bytes - with_slack(n_bytes)
        stuck = total - sum(size for _, size in victims)
        if stuck > room:
            self._complain(
                f"{n_bytes} bytes beside {stuck} that are not ours to remove do not fit the budget "
                f"of {self.options.space_bytes}"
            )
            return False
        for victim, size in victims:
            if total <= room:
                break
            (self._folder / victim).unlink(missing_ok=True)
            log.info("%s: removed to make room", self._folder / victim)
            total -= size
        return True

    def _scan(self) -> Folder:
        """Look at the folder again; what cannot be whole is set aside."""
        found = scan(self._folder, self._index)
        for entry in list(found.entries.values()):
            problem = misfit(entry)
            if problem:
                self._set_aside(entry, problem)
            if problem or (entry.name, entry.inode) in self._refused:
                del found.entries[entry.name]
                found.other_bytes += entry.n_bytes
        self._index = dict(found.entries)
        return found

    def _set_aside(self, entry: Entry, reason: str) -> None:
        """Rename a file so that nobody stumbles over it again; tell about it once."""
        path = self._folder / entry.name
        if (entry.name, entry.inode) in self._refused:
            return
        try:
            if path.stat().st_ino != entry.inode:
                return  # a new file has the name
            aside = set_aside(path)
        except FileNotFoundError:
            return  # somebody else was faster
        except OSError as e:
            self._refused.add((entry.name, entry.inode))
            log.warning("%s: %s; not used again, could not be set aside: %s", path, reason, e)
            return
        log.warning("%s: %s; was set aside as %s", path, reason, aside.name)

    def _is_usable(self, entry: Entry) -> bool:
        return is_usable(entry, self._identity, self.options)

    def _complain(self, what: str) -> None:
        """Warn about the disk, once until a save succeeds again."""
        level = logging.DEBUG if self._troubled else logging.WARNING
        self._troubled = True
        log.log(level, "disk cache %s: %s; going on without", self._folder, what)

    def _introduce(self) -> None:
        """Tell what there is."""
        entries = self._index.values()
        usable = [entry for entry in entries if self._is_usable(entry)]
        n_unsealed = sum(entry.seal is None for entry in usable)
        log.info(
            "disk cache %s: %d files, %d for this model (%d of ds4's, without checksum), "
            "%.0f of %.0f MiB",
            *(self._folder, len(entries), len(usable), n_unsealed),
            sum(entry.n_bytes for entry in entries) / _MIB,
            self.options.space_bytes / _MIB,
        )
