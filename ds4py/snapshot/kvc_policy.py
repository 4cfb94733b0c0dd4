"""When a prefix is written to disk, which file may be loaded, and which goes first.

Owns: every decision of the disk cache (docs/spec/server-and-cli.md#disk-cache, #disk-cache-options,
#kvc, #eviction) and its options. Refuses to know: files and folders. Invariant: pure functions of
values; the same folder gives the same decisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from ds4py.errors import ConfigError
from ds4py.snapshot.kvc import ABI_DS4, FINGERPRINT_BYTES, OTHER_MODEL, KvcHeader, Reason, Seal

_HALF_LIFE: Final = 6 * 3600
_NO_HITS: Final = 0.01
_KEPT: Final = frozenset({Reason.COLD, Reason.EVICT, Reason.SHUTDOWN})
_FREQUENT: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCacheOptions:
    """What the user decides (docs/spec/server-and-cli.md#disk-cache-options).

    Args:
        space_bytes: Budget for all files of the folder that are the cache's.
        min_tokens: Nothing shorter is saved or loaded.
        cold_max_tokens: Longest prompt that is saved before it is answered; 0 saves none.
        continued_interval_tokens: Distance of saves while a conversation grows; 0 saves none.
        boundary_trim_tokens: Dropped from a prompt's end before alignment.
        boundary_align_tokens: What lengths are aligned to.
        reject_different_quant: Refuse files of another expert quantization. Matters for files of
            ds4's only: a seal tells models apart anyway.

    Raises:
        ConfigError: A value is out of range.
    """

    space_bytes: int = 4096 << 20
    min_tokens: int = 512
    cold_max_tokens: int = 30000
    continued_interval_tokens: int = 10000
    boundary_trim_tokens: int = 32
    boundary_align_tokens: int = 2048
    reject_different_quant: bool = False

    def __post_init__(self) -> None:
        may_be_zero = {"cold_max_tokens", "continued_interval_tokens", "boundary_trim_tokens"}
        for name in (field.name for field in fields(self) if field.type == "int"):
            low = 0 if name in may_be_zero else 1
            if getattr(self, name) < low:
                raise ConfigError(
                    f"disk cache {name} {getattr(self, name)}: expected at least {low}"
                )
        if 0 < self.cold_max_tokens < self.min_tokens:
            raise ConfigError(
                f"disk cache cold_max_tokens {self.cold_max_tokens}: expected at least the minimum "
                f"of {self.min_tokens} tokens, or 0 for no cold saves"
            )

    @property
    def continued_step(self) -> int:
        """Distance of continued saves in tokens: the interval, rounded up to the alignment."""
        align = self.boundary_align_tokens
        return -(-self.continued_interval_tokens // align) * align


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """Whose sessions are saved and loaded.

    Args:
        model_id: As on the wire, 32 bits.
        quant_bits: Of the routed experts.
        abi: Kind of payload: `ABI_DS4` for deepseek4, `ABI_OWN` for everything else.
        n_ctx: Tokens that a session can hold.
        model: The model's fingerprint, at most 32 characters; empty if unknown.
        tokenizer: A fingerprint of everything that turns text into ids, alike.

    Raises:
        ConfigError: A fingerprint is too long.
    """

    model_id: int
    quant_bits: int
    abi: int
    n_ctx: int
    model: str
    tokenizer: str

    def __post_init__(self) -> None:
        for text in (self.model, self.tokenizer):
            if not text.isascii() or len(text) > FINGERPRINT_BYTES:
                raise ConfigError(
                    f"fingerprint {text!r}: expected at most {FINGERPRINT_BYTES} ASCII characters"
                )

    @property
    def model_byte(self) -> int:
        """The model as a header names it."""
        return min(self.model_id, OTHER_MODEL)

    def seal(self, body_crc: int) -> Seal:
        """Return the seal of a file of ours."""
        return Seal(
            model_id=self.model_id,
            model=self.model,
            tokenizer=self.tokenizer,
            body_crc=body_crc,
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the folder as a scan sees it; nothing in it is verified yet.

    Args:
        name: Its file name.
        inode: Of the file.
        n_bytes: Its size.
        mtime_ns: When it changed.
        header: Its header.
        seal: Its seal; None in a file of ds4's.
    """

    name: str
    inode: int
    n_bytes: int
    mtime_ns: int
    header: KvcHeader
    seal: Seal | None


def file_name(key: bytes) -> str:
    """Return the name of the file of a key text."""
    return f"{hashlib.sha1(key, usedforsecurity=False).hexdigest()}.kv"


def names_of_prefixes(text: bytes, lengths: Iterable[int]) -> dict[int, str]:
    """Return length -> file name of that prefix of a text, in one pass over the text.

    Args:
        text: A rendered prompt.
        lengths: In bytes; those that are not prefixes are left out.
    """
    digest, at, names = hashlib.sha1(usedforsecurity=False), 0, {}
    view = memoryview(text)
    for length in sorted(set(lengths)):
        if 0 < length <= len(text):
            digest.update(view[at:length])
            names[length], at = f"{digest.hexdigest()}.kv", length
    return names


def is_usable(entry: Entry, identity: CacheIdentity, options: DiskCacheOptions) -> bool:
    """Whether a file may be loaded into a session, as far as header and seal tell.

    A file without seal is one of ds4's. It passes only where payloads are exchanged with ds4, and
    is then believed as ds4 believes it.
    """
    header, seal = entry.header, entry.seal
    if (header.abi, header.model_id) != (identity.abi, identity.model_byte):
        return False
    if header.ctx > identity.n_ctx or not options.min_tokens <= header.n_tokens < identity.n_ctx:
        return False
    if entry.n_bytes > options.space_bytes:  # no reader takes more memory than the user gave disk
        return False
    if options.reject_different_quant and header.quant_bits != identity.quant_bits:
        return False
    if seal is None:
        return header.abi == ABI_DS4
    return seal == identity.seal(seal.body_crc)


def longest(
    entries: Mapping[str, Entry], text: bytes, identity: CacheIdentity, options: DiskCacheOptions
) -> Entry | None:
    """Return the usable file whose key text is the longest prefix of a text, or None.

    Args:
        entries: By file name.
        text: A rendered prompt.
        identity: Who would load it.
        options: The least number of tokens.
    """
    usable = [entry for entry in entries.values() if is_usable(entry, identity, options)]
    names = names_of_prefixes(text, (entry.header.key_bytes for entry in usable))
    found = [entry for entry in usable if names.get(entry.header.key_bytes) == entry.name]
    return max(found, key=lambda e: (e.header.key_bytes, e.header.n_tokens), default=None)


def decayed_hits(hits: int, seconds: float) -> float:
    """Return hits halved every six hours since the last use; few are none."""
    left: float = hits * 0.5 ** (max(seconds, 0.0) / _HALF_LIFE)
    return left if left >= _NO_HITS else 0.0


def score(entry: Entry, now: float, *, superseded: bool = False) -> float:
    """Return what a file is worth; the lowest goes first (docs/spec/server-and-cli.md#eviction).

    Args:
        entry: The file.
        now: Unix seconds.
        superseded: The file that needs the room holds all of this one's text.
    """
    header = entry.header
    hits = decayed_hits(header.hits, now - header.last_used)
    value = (hits + 1) * header.n_tokens / entry.n_bytes
    if header.reason in _KEPT:
        value *= 2
    if superseded and header.reason == Reason.CONTINUED:
        value *= 0.05 + 0.45 * hits / (hits + 1)
    return value


def is_protected(entry: Entry, now: float) -> bool:
    """Whether a file goes only after all that are not protected.

    The score is tokens a byte, and a payload's fixed part makes short files look bad. So the short
    beginnings that many conversations share (system text and tools, which is what a cold save
    holds) would go first, just where they are hit all the time. Protected is a cold save of which
    two hits are left, after halving.
    """
    header = entry.header
    hits = decayed_hits(header.hits, now - header.last_used)
    return header.reason == Reason.COLD and hits >= _FREQUENT


def eviction_order(entries: Iterable[Entry], now: float, superseded: frozenset[str]) -> list[Entry]:
    """Return files in the order in which they make room.

    Args:
        entries: Readable files.
        now: Unix seconds.
        superseded: Names of the usable ones whose text the new file's text continues.
    """

    def rank(entry: Entry) -> tuple[bool, float, int]:
        value = score(entry, now, superseded=entry.name in superseded)
        return is_protected(entry, now), value, entry.header.last_used

    return sorted(entries, key=rank)


def continued_by(entries: Iterable[Entry], key: bytes) -> frozenset[str]:
    """Return names of the files whose text is a strict prefix of a key text."""
    found = list(entries)
    lengths = (entry.header.key_bytes for entry in found)
    names = names_of_prefixes(key, (length for length in lengths if length < len(key)))
    return frozenset(e.name for e in found if names.get(e.header.key_bytes) == e.name)


def with_slack(n_bytes: int) -> int:
    """Return the room that a file needs: its size and one percent."""
    return n_bytes + -(-n_bytes // 100)


def may_store_cold(n_prompt: int, n_cached: int, options: DiskCacheOptions) -> bool:
    """Whether a prefix of a prompt is saved before the prompt is answered.

    Args:
        n_prompt: Tokens of the prompt.
        n_cached: Tokens that were found in memory or on disk.
        options: Limits.
    """
    return n_cached == 0 and options.min_tokens <= n_prompt <= options.cold_max_tokens


def cold_anchor(
    tokens: Sequence[int],
    user_marker: Sequence[int],
    assistant_marker: Sequence[int],
    options: DiskCacheOptions,
) -> int:
    """Return how many tokens of a prompt a cold save holds.

    The best cut is in front of the first question: what stands there, system text and tools, is
    what other conversations begin with too.

    Args:
        tokens: The prompt.
        user_marker: Ids that begin a user's turn; empty if the format has none.
        assistant_marker: Ids that begin an answer, alike.
        options: Limits.
    """
    answer = _first(tokens, assistant_marker)
    question = _last(tokens[: len(tokens) if answer is None else answer], user_marker)
    if question is not None and question >= options.min_tokens:
        return question
    aligned = len(tokens) - options.boundary_trim_tokens
    aligned -= aligned % options.boundary_align_tokens
    return aligned if aligned >= options.min_tokens else len(tokens)


def should_store_continued(n_tokens: int, n_stored: int, options: DiskCacheOptions) -> bool:
    """Whether a growing session is saved at this length.

    Args:
        n_tokens: Tokens in the session.
        n_stored: Tokens at its last save, 0 if there was none.
        options: Interval and limits.
    """
    step = options.continued_step
    return step > 0 and n_tokens % step == 0 and n_tokens >= max(options.min_tokens, n_stored + 1)


def _first(tokens: Sequence[int], marker: Sequence[int]) -> int | None:
    starts = range(len(tokens) - len(marker) + 1) if marker else ()
    return next((at for at in starts if _is_at(tokens, marker, at)), None)


def _last(tokens: Sequence[int], marker: Sequence[int]) -> int | None:
    starts = range(len(tokens) - len(marker), -1, -1) if marker else ()
    return next((at for at in starts if _is_at(tokens, marker, at)), None)


def _is_at(tokens: Sequence[int], marker: Sequence[int], at: int) -> bool:
    return tokens[at] == marker[0] and list(tokens[at : at + len(marker)]) == list(marker)
