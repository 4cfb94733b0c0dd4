"""Damage to honest bytes: fields, lengths, order, cuts.

Owns: every way in which an input becomes hostile. Refuses to know: where honest inputs come from
and who reads the others. Invariant: all choices come from the generator that is passed in, so equal
seeds give equal inputs.
"""

from __future__ import annotations

import copy
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Final, Literal, NamedTuple

from ds4py.wire.frames import MAGIC

_HEADER: Final = struct.Struct(">4sII")
_WIDTHS: Final = {"H": 2, "I": 4, "Q": 8}
_RECORDS: Final = {  # wire-protocol.md#algorithms; then notices of ds4py peers
    1: "10I",
    3: "IQQQQ11I",
    4: "QQ6I10I",  # and the first record of telemetry
    5: "IQQQ3I",
    6: "IQQQ3IQ3I",
    7: "QI",
    8: "QII",
    9: "IQQQ3IQ3I",
    258: "QQ",
    259: "Q",
    260: "H",
    261: "QQIQ",
}
TYPES: Final = (*range(12), 77, 255, *range(256, 263), 1 << 31, (1 << 32) - 1)
"""Frame types that exist, their neighbours, and the ends of the range."""


class RawFrame(NamedTuple):
    """A frame whose header may lie.

    Args:
        kind: Frame type.
        body: What follows the header.
        lie: Added to the length that the header declares.
    """

    kind: int
    body: bytes
    lie: int = 0

    def encode(self) -> bytes:
        """Return header and body."""
        declared = (len(self.body) + self.lie) % (1 << 32)
        return _HEADER.pack(MAGIC, self.kind, declared) + self.body


Talk = Sequence[RawFrame]
"""Frames that follow each other in one direction of a connection."""


def cut_frames(data: bytes) -> list[RawFrame]:
    """Cut honest bytes into frames; what is no whole frame at the end is left out."""
    frames, at = [], 0
    while at + _HEADER.size <= len(data):
        _, kind, size = _HEADER.unpack_from(data, at)
        at += _HEADER.size + size
        if at <= len(data):
            frames.append(RawFrame(kind, data[at - size : at]))
    return frames


def _fields(record: str) -> tuple[tuple[int, int], ...]:
    """Return (offset, width in bytes) of every field."""
    places, at = [], 0
    for count, code in re.findall(r"(\d*)([HIQ])", record):
        for _ in range(int(count or 1)):
            places.append((at, _WIDTHS[code]))
            at += _WIDTHS[code]
    return tuple(places)


FIELDS: Final[Mapping[int, tuple[tuple[int, int], ...]]] = {
    kind: _fields(record) for kind, record in _RECORDS.items()
}
"""(offset, width) of the fields in the fixed record of each frame type that has one."""


def _edges(bits: int) -> tuple[int, ...]:
    powers = [1 << n for n in (2, 5, 7, 8, 12, 15, 16, 20, 23, 24, 31, 32, 48, 63) if n < bits]
    around = {power + step for power in powers for step in (-1, 0, 1)}
    return tuple(sorted(around | {0, 1, 2, (1 << bits) - 2, (1 << bits) - 1}))


EDGES: Final = {width: _edges(8 * width) for width in (2, 4, 8)}
"""Values at which counts, sizes and signs turn, by width in bytes."""


def near_or_edge(rng: Random, old: int, width: int) -> int:
    """Return another value for a field: an edge, a neighbour of the old value, or anything."""
    chance = rng.random()
    if chance < 0.5:
        return rng.choice(EDGES[width])
    if chance < 0.8:
        return (old + rng.choice((-4, -1, 1, 4))) % (1 << (8 * width))
    return rng.getrandbits(8 * width)


def change_word(
    rng: Random, raw: bytearray, at: int, width: int, *, little_endian: bool = False
) -> None:
    """Replace one number inside some bytes."""
    order: Literal["little", "big"] = "little" if little_endian else "big"
    old = int.from_bytes(raw[at : at + width], order)
    raw[at : at + width] = near_or_edge(rng, old, width).to_bytes(width, order)


def damage_bytes(rng: Random, data: bytes) -> bytes:
    """Flip, cut, insert or repeat bytes anywhere."""
    if not data:
        return rng.randbytes(rng.randrange(1, 20))
    at, chance = rng.randrange(len(data)), rng.random()
    if chance < 0.4:
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if chance < 0.7:
        return data[:at]
    if chance < 0.85:
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
    return data[:at] + data[at - rng.randrange(at + 1) :]


def damage_body(rng: Random, kind: int, body: bytes) -> bytes:
    """Change a field of a body, a word behind its fields, or its length."""
    fields = FIELDS.get(kind)
    chance = rng.random()
    if fields and chance < 0.6:
        at, width = fields[int(rng.random() * len(fields))]
    elif len(body) >= 4 and chance < 0.8:
        at, width = 4 * rng.randrange(len(body) // 4), 4
    else:
        return damage_bytes(rng, body)
    if at + width > len(body):
        return damage_bytes(rng, body)
    changed = bytearray(body)
    change_word(rng, changed, at, width)
    return bytes(changed)


ODD_VALUES: Final[Sequence[Any]] = (
    *(None, True, False, 0, 1, 5, -1, 0.2, 86400, float("nan"), float("inf"), 1e308, 10**400),
    *(2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64),
    *("", "x", "x" * 128, "x" * 129, "\0", "é\u2028\U0001f600", "\ud800", "worker", "none"),
    *([], ["a"], ["a"] * 64, ["a"] * 65, ["A"], [["a"]], {}, {"a": 1}, {"type": "text"}),
)
"""Values that JSON can say and few readers expect; of JSON numbers some are none."""


def damage_json(rng: Random, tree: dict[str, Any], stranger: dict[str, Any]) -> bytes:
    """Return an object as JSON text after one damage or more.

    Args:
        rng: All choices come from it.
        tree: At least one member; stays as it is.
        stranger: Another object, whose parts are put into this one.
    """
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if places := list(_places(tree)):
            _change(rng, *rng.choice(places), rng.choice([*_places(tree), *_places(stranger)]))
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    if tree and rng.random() < 0.1:  # the same member twice
        twin = json.dumps({rng.choice(list(tree)): rng.choice(ODD_VALUES)})
        text = rng.choice((f"{twin[:-1]}, {text[1:]}", f"{text[:-1]}, {twin[1:]}"))
    if rng.random() < 0.01:
        text = text.replace(": ", ": " + "[" * rng.choice((100, 1000, 100_000)), 1)
    data = text.encode("utf-8", "surrogatepass")
    return damage_bytes(rng, data) if rng.random() < 0.2 else data


_Place = tuple[Any, Any]  # a list or an object, and an index or a name in it


def _places(tree: Any) -> Iterator[_Place]:
    """Yield every place of a tree but its root."""
    inner = enumerate(tree) if isinstance(tree, list) else tree.items()
    for name, value in inner:
        yield tree, name
        if isinstance(value, list | dict):
            yield from _places(value)


def _change(rng: Random, tree: Any, name: Any, source: _Place) -> None:
    """Remove, replace, wrap, rename or repeat what stands at a place of a tree."""
    chance = rng.random()
    if chance < 0.15:
        del tree[name]
    elif chance < 0.45:
        tree[name] = copy.deepcopy(source[0][source[1]])
    elif chance < 0.8:
        tree[name] = copy.deepcopy(rng.choice(ODD_VALUES))
    elif chance < 0.85:
        tree[name] = [tree[name]]
    elif isinstance(tree, list):
        tree.extend(copy.deepcopy(tree[name]) for _ in range(rng.choice((1, 1, 100))))
    else:
        tree[str(source[1])] = tree.pop(name)


def damage_talk(rng: Random, talk: Talk, strangers: Talk) -> bytes:
    """Return an honest talk as bytes after one damage, sometimes more, rarely none.

    Args:
        rng: All choices come from it.
        talk: At least one frame.
        strangers: Frames of other talks, to be put between.
    """
    frames = list(talk)
    for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 1, 2, 3, 5))):
        if rng.random() < 0.6:
            place = rng.randrange(len(frames))
            frame = frames[place]
            frames[place] = frame._replace(body=damage_body(rng, frame.kind, frame.body))
        else:
            rng.choice(_WAYS)(rng, frames, strangers)
    data = b"".join([frame.encode() for frame in frames])
    return damage_bytes(rng, data) if rng.random() < 0.2 else data


def _retype(rng: Random, frames: list[RawFrame], _: Talk) -> None:
    place = rng.randrange(len(frames))
    frames[place] = frames[place]._replace(kind=rng.choice(TYPES))


def _lie(rng: Random, frames: list[RawFrame], _: Talk) -> None:
    place = rng.randrange(len(frames))
    frames[place] = frames[place]._replace(
        lie=rng.choice((-12, -4, -1, 1, 4, 12, 1 << 20, 1 << 31))
    )


def _drop(rng: Random, frames: list[RawFrame], _: Talk) -> None:
    if len(frames) > 1:
        del frames[rng.randrange(len(frames))]


def _repeat(rng: Random, frames: list[RawFrame], _: Talk) -> None:
    place = rng.randrange(len(frames))
    frames.insert(place, frames[place])


def _swap(rng: Random, frames: list[RawFrame], _: Talk) -> None:
    a, b = rng.randrange(len(frames)), rng.randrange(len(frames))
    frames[a], frames[b] = frames[b], frames[a]


def _interrupt(rng: Random, frames: list[RawFrame], strangers: Talk) -> None:
    frames.insert(rng.randrange(len(frames) + 1), rng.choice(strangers))


def _empty(rng: Random, frames: list[RawFrame], _: Talk) -> None:
    frames.insert(rng.randrange(len(frames) + 1), RawFrame(rng.choice(TYPES), b""))


_Way = Callable[[Random, list[RawFrame], Talk], None]
_WAYS: Final[Sequence[_Way]] = (_retype, _lie, _drop, _repeat, _swap, _interrupt, _empty)
