"""Writer of GGUF files: of toy models and of files that tests damage.

Owns: the layout of version 3, single or split. Refuses to know: quantization (tensors are given as
packed bytes). Invariant: the same arguments make the same bytes, and a tensor whose bytes are made
piece by piece is never in memory as a whole.

How a Python value is stored: bool as BOOL; int as UINT32, INT32, UINT64 or INT64, the first that
holds it; float as FLOAT32; str as STRING; a NumPy scalar by its dtype; a sequence of str as an
array of STRING; a NumPy array as an array of its dtype.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
from gguf import GGUF_VERSION, GGUFValueType

from ds4py.errors import GgufError
from ds4py.gguf import kinds

ScalarValue = bool | int | float | str | np.generic
WriteValue = ScalarValue | list[str] | tuple[str, ...] | npt.NDArray[np.generic]
Bytes = bytes | memoryview
_KIND_OF: Final = {dtype: kind for kind, dtype in kinds.NUMERIC_KINDS.items()}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor to write.

    Args:
        name: Name in the directory.
        type_id: Tensor type; an unknown one is written as it is.
        dims: Dimensions in GGUF order, fastest first.
        packed: Bytes of the blocks, only read; or a function that makes them again at each call,
            piece by piece, for a tensor of a known type that should not be in memory as a whole.
    """

    name: str
    type_id: int
    dims: tuple[int, ...]
    packed: Bytes | Callable[[], Iterable[Bytes]]

    def __post_init__(self) -> None:
        if not callable(self.packed) and kinds.is_known(self.type_id):
            self._check(len(self.packed))

    @property
    def n_bytes(self) -> int:
        """Packed size; raises `UnsupportedQuantError` if pieces have a type of unknown size."""
        if callable(self.packed):
            return kinds.tensor_bytes(self.type_id, self.dims)
        return len(self.packed)

    def pieces(self) -> Iterator[Bytes]:
        """Yield the bytes in order.

        Raises:
            GgufError: The pieces are together not as long as type and dimensions say.
        """
        if not callable(self.packed):
            yield self.packed
            return
        done = 0
        for piece in self.packed():
            done += len(piece)
            yield piece
        self._check(done)

    def _check(self, n_bytes: int) -> None:
        expected = kinds.tensor_bytes(self.type_id, self.dims)
        if n_bytes != expected:
            raise GgufError(
                f"tensor {self.name}: got {n_bytes} bytes, expected {expected} for "
                f"{kinds.type_name(self.type_id)} {list(self.dims)}"
            )


def write_gguf(
    stream: BinaryIO,
    metadata: Mapping[str, WriteValue],
    tensors: Sequence[TensorSource],
    *,
    alignment: int = kinds.DEFAULT_ALIGNMENT,
) -> None:
    """Write one whole file to a binary stream; tensors stand in the given order."""
    stream.writelines(_pieces(metadata, tensors, alignment))


def save_gguf(
    path: Path,
    metadata: Mapping[str, WriteValue],
    tensors: Sequence[TensorSource],
    *,
    alignment: int = kinds.DEFAULT_ALIGNMENT,
    n_shards: int = 1,
) -> list[Path]:
    """Write a file, or several shards of about as many tensors each.

    Args:
        path: The file; for shards the name without number (`toy.gguf` becomes
            `toy-00001-of-00003.gguf` and so on).
        metadata: Goes whole into the first shard; the others only know their own number.
        tensors: In the order of the file.
        alignment: Power of two.
        n_shards: 1 writes one plain file.

    Returns:
        The written files in order.

    Raises:
        GgufError: The file system refused, or pieces are not as long as their tensor.
    """
    parts = (
        [(path, metadata, tensors)] if n_shards == 1 else _split(path, metadata, tensors, n_shards)
    )
    for part_path, part_metadata, part_tensors in parts:
        try:
            with part_path.open("wb") as stream:
                write_gguf(stream, part_metadata, part_tensors, alignment=alignment)
        except OSError as error:
            raise GgufError(f"cannot be written: {error.strerror}", path=part_path) from error
    return [part[0] for part in parts]


def shard_name(stem: str, number: int, count: int) -> str:
    """Return the file name of shard `number` (0-based) of `count`."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"


def _split(
    path: Path, metadata: Mapping[str, WriteValue], tensors: Sequence[TensorSource], n_shards: int
) -> list[tuple[Path, Mapping[str, WriteValue], Sequence[TensorSource]]]:
    parts: list[tuple[Path, Mapping[str, WriteValue], Sequence[TensorSource]]] = []
    for number in range(n_shards):
        own: dict[str, WriteValue] = {
            "split.no": np.uint16(number),
            "split.count": np.uint16(n_shards),
            "split.tensors.count": np.int32(len(tensors)),
        }
        first, past = (len(tensors) * k // n_shards for k in (number, number + 1))
        name = shard_name(path.name.removesuffix(".gguf"), number, n_shards)
        keys = {**metadata, **own} if number == 0 else own
        parts.append((path.with_name(name), keys, tensors[first:past]))
    return parts


def _pieces(
    metadata: Mapping[str, WriteValue], tensors: Sequence[TensorSource], alignment: int
) -> Iterator[bytes | memoryview]:
    entries = dict(metadata)
    if alignment != kinds.DEFAULT_ALIGNMENT:
        entries[kinds.ALIGNMENT_KEY] = np.uint32(alignment)
    head = bytearray(kinds.MAGIC)
    head += struct.pack("<IQQ", GGUF_VERSION, len(tensors), len(entries))
    for key, value in entries.items():
        head += _string(key) + _value(value)
    offset = 0
    for tensor in tensors:
        head += _string(tensor.name) + struct.pack("<I", len(tensor.dims))
        head += struct.pack(f"<{len(tensor.dims)}QIQ", *tensor.dims, tensor.type_id, offset)
        offset += tensor.n_bytes + _padding(tensor.n_bytes, alignment)
    yield bytes(head)
    yield bytes(_padding(len(head), alignment))
    for tensor in tensors:
        yield from tensor.pieces()
        yield bytes(_padding(tensor.n_bytes, alignment))


def _padding(length: int, alignment: int) -> int:
    return -length % alignment


def _string(text: str) -> bytes:
    utf8 = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(utf8)) + utf8


def _value(value: WriteValue) -> bytes:
    """Encode one value with its type id in front."""
    if isinstance(value, (list, tuple)):
        strings = b"".join(map(_string, value))
        return struct.pack("<IIQ", kinds.KIND_ARRAY, kinds.KIND_STRING, len(value)) + strings
    if isinstance(value, np.ndarray):
        kind = _numeric_kind(value.dtype)
        return struct.pack("<IIQ", kinds.KIND_ARRAY, kind, value.size) + value.tobytes()
    kind, encoded = _scalar(value)
    return struct.pack("<I", kind) + encoded


def _scalar(value: ScalarValue) -> tuple[int, bytes]:
    if isinstance(value, str):
        return kinds.KIND_STRING, _string(value)
    if isinstance(value, np.generic):  # before float: np.float64 is one, and stays 64 bits wide
        return _numeric_kind(value.dtype), value.tobytes()
    if isinstance(value, bool):
        return kinds.KIND_BOOL, bytes([value])
    if isinstance(value, int):
        kind = _int_kind(value)
        return kind, kinds.NUMERIC_KINDS[kind].type(value).tobytes()
    return int(GGUFValueType.FLOAT32), struct.pack("<f", value)


def _int_kind(value: int) -> int:
    if value >= 0:
        return int(GGUFValueType.UINT32) if value < 1 << 32 else int(GGUFValueType.UINT64)
    return int(GGUFValueType.INT32) if value >= -(1 << 31) else int(GGUFValueType.INT64)


def _numeric_kind(dtype: np.dtype[np.generic]) -> int:
    if dtype == np.bool_:
        return kinds.KIND_BOOL
    if dtype not in _KIND_OF:
        raise GgufError(f"metadata value of dtype {dtype}: GGUF has no such type")
    return _KIND_OF[dtype]
