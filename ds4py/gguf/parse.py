"""GGUF bytes -> header, metadata, tensor directory.

Owns: the layout of versions 2 and 3. Refuses to know: files, maps, shards, what a key means (but
for the alignment). Invariant: every count and length is checked against the bytes that remain and
against a limit before memory is taken, so the memory used is proportional to bytes really there.

Text is UTF-8 with `surrogateescape`: token strings that are no valid UTF-8 survive unchanged, and
`text.encode("utf-8", "surrogateescape")` gives the file's bytes back. Numeric arrays are copied
once as a block into read-only NumPy arrays, so that they outlive the map.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NoReturn

import numpy as np

from ds4py.errors import GgufError
from ds4py.gguf import foreign, kinds
from ds4py.gguf.kinds import MetaValue

MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 20
MAX_NAME_BYTES: Final = 1 << 16
MAX_STRING_BYTES: Final = 64 << 20
MAX_ARRAY_ITEMS: Final = 1 << 26
MAX_ALIGNMENT: Final = 1 << 30
_OFFSET_LIMIT: Final = 1 << 63

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_MIN_KEY_BYTES: Final = 8 + 4 + 1  # empty key, type, one byte
_MIN_TENSOR_BYTES: Final = 8 + 4 + 4 + 8  # empty name, no dimensions, type, offset


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a tensor directory.

    Args:
        name: Name in the file.
        type_id: Tensor type, possibly one that nobody knows.
        dims: Dimensions in GGUF order, fastest first.
        offset: First byte, counted from the start of its shard.
        n_bytes: Packed size; for an unknown type everything up to the next tensor.
        shard: Index of its shard, 0-based; the parser knows one file only, and says 0.
    """

    name: str
    type_id: int
    dims: tuple[int, ...]
    offset: int
    n_bytes: int
    shard: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions in row-major order, slowest first, as NumPy and torch count them."""
        return self.dims[::-1]

    @property
    def type_name(self) -> str:
        """Usual name of the type, such as "Q4_1"."""
        return kinds.type_name(self.type_id)

    @property
    def is_known(self) -> bool:
        """Whether the type's block size is known."""
        return kinds.is_known(self.type_id)


@dataclass(frozen=True, slots=True)
class ParsedGguf:
    """Everything that stands in front of the weights of one file.

    Args:
        version: 2 or 3.
        metadata: Key -> value, in the order of the file.
        tensors: The directory, in the order of the file.
        data_offset: Where the weights begin.
    """

    version: int
    metadata: dict[str, MetaValue]
    tensors: tuple[TensorInfo, ...]
    data_offset: int


def shown(name: str) -> str:
    """Return a name from a file as it may be printed: short, one line, no control characters."""
    short = name if len(name) <= 80 else f"{name[:77]}..."
    return short if short.isascii() and short.isprintable() else ascii(short)


def parse_gguf(buffer: memoryview) -> ParsedGguf:
    """Read the front of a GGUF file and check that all its weights are there.

    Args:
        buffer: The whole file; only the pages of its front are touched, and none are kept.

    Raises:
        GgufError: Not a GGUF file, an unreadable version, damaged, or cut off; says which.
    """
    reader = _BufferReader(buffer)
    version = _check_head(reader)
    n_tensors = reader.u64("the number of tensors")
    n_keys = reader.u64("the number of metadata keys")
    _check_count(reader, n_keys, MAX_KEYS, _MIN_KEY_BYTES, "metadata keys")
    metadata: dict[str, MetaValue] = {}
    for index in range(n_keys):
        key, value = _read_entry(reader, index, n_keys)
        if key in metadata:
            reader.fail(f"metadata key {shown(key)} stands there twice; the file is damaged")
        metadata[key] = value
    alignment = _alignment(reader, metadata)
    _check_count(reader, n_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES, "tensors")
    entries = [_read_tensor(reader, index, n_tensors) for index in range(n_tensors)]
    data_offset = reader.position + -reader.position % alignment
    tensors = _place(entries, data_offset, alignment, buffer.nbytes)
    return ParsedGguf(version, metadata, tensors, data_offset)


class _BufferReader:
    """A position in the file that never moves past its end; `subject` is what is being read."""

    def __init__(self, buffer: memoryview):
        self.buffer = buffer
        self.size = buffer.nbytes
        self.position = 0
        self.subject = "the header"

    def fail(self, what: str) -> NoReturn:
        raise GgufError(what, offset=self.position)

    def need(self, length: int, what: str) -> int:
        """Move past `length` bytes and return where they begin."""
        start, end = self.position, self.position + length
        if end > self.size:
            self.cut_off(end, what)
        self.position = end
        return start

    def cut_off(self, end: int, what: str) -> NoReturn:
        self.fail(
            f"the file is cut off inside {self.subject}: {what} ends at byte {end}, the file at "
            f"{self.size}, so at least {end - self.size} bytes are missing; download it again"
        )

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.need(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.need(8, what))[0])

    def text(self, what: str, limit: int) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            self.fail(
                f"{self.subject}: {what} claims {length} bytes, expected at most {limit}; "
                "the file is damaged"
            )
        start = self.need(length, what)
        return str(self.buffer[start : start + length], "utf-8", "surrogateescape")

    def texts(self, count: int) -> list[str]:
        """Read strings in one tight loop: vocabularies have hundreds of thousands of them."""
        buffer, size, position = self.buffer, self.size, self.position
        unpack = _U64.unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = position + 8
            end = start + unpack(buffer, position)[0] if start <= size else start
            if end > size:
                self.position = position
                self.cut_off(end, f"string {len(strings)} of {count}")
            strings.append(str(buffer[start:end], "utf-8", "surrogateescape"))
            position = end
        self.position = position
        return strings


def _check_head(reader: _BufferReader) -> int:
    magic = bytes(reader.buffer[: len(kinds.MAGIC)])
    if magic != kinds.MAGIC:
        raise GgufError(foreign.describe(bytes(reader.buffer[: foreign.HEAD_BYTES])))
    reader.need(len(magic), "the magic")
    version = reader.u32("the version")
    if version and version & 0xFFFF == 0:
        reader.fail(
            "the file is big-endian, expected little-endian; get the little-endian file, or "
            "convert it with `gguf-convert-endian` of the gguf package"
        )
    if version not in kinds.VERSIONS:
        advice = "convert the model again" if version < 2 else "update ds4py"
        reader.fail(f"GGUF version {version} cannot be read, expected 2 or 3; {advice}")
    return version


def _check_count(
    reader: _BufferReader, count: int, limit: int, least_bytes: int, what: str
) -> None:
    if count > limit:
        reader.fail(f"the file claims {count} {what}, expected at most {limit}; it is damaged")
    end = reader.position + count * least_bytes
    if end > reader.size:
        reader.cut_off(end, f"the list of {count} {what}")


def _read_entry(reader: _BufferReader, index: int, count: int) -> tuple[str, MetaValue]:
    reader.subject = f"the metadata (key {index + 1} of {count})"
    key = reader.text("the key", MAX_NAME_BYTES)
    reader.subject = f"metadata key {shown(key)}"
    kind = reader.u32("the type")
    if kind != kinds.KIND_ARRAY:
        return key, _read_scalar(reader, kind)
    kind = reader.u32("the type of the items")
    length = reader.u64("the number of items")
    return key, _read_array(reader, kind, length)


def _read_scalar(reader: _BufferReader, kind: int) -> MetaValue:
    if kind == kinds.KIND_STRING:
        return reader.text("the text", MAX_STRING_BYTES)
    if kind == kinds.KIND_BOOL:
        value = reader.buffer[reader.need(1, "the value")]
        if value > 1:
            reader.fail(f"{reader.subject}: got {value} for a boolean, expected 0 or 1")
        return bool(value)
    dtype = _numeric(reader, kind)
    start = reader.need(dtype.itemsize, "the value")
    item: int | float = np.frombuffer(reader.buffer, dtype, 1, start)[0].item()
    return item


def _read_array(reader: _BufferReader, kind: int, length: int) -> MetaValue:
    least = 8 if kind == kinds.KIND_STRING else 1
    if length > MAX_ARRAY_ITEMS:
        reader.fail(
            f"{reader.subject} claims {length} items, expected at most {MAX_ARRAY_ITEMS}; "
            "the file is damaged"
        )
    if reader.position + length * least > reader.size:
        reader.cut_off(reader.position + length * least, f"the array of {length} items")
    if kind == kinds.KIND_STRING:
        return reader.texts(length)
    dtype = np.dtype("u1") if kind == kinds.KIND_BOOL else _numeric(reader, kind)
    start = reader.need(length * dtype.itemsize, f"the array of {length} items")
    values = np.frombuffer(reader.buffer, dtype, length, start).copy()
    if kind == kinds.KIND_BOOL:
        if (values > 1).any():
            reader.fail(f"{reader.subject}: a boolean is neither 0 nor 1; the file is damaged")
        values = values.view(np.bool_)
    values.flags.writeable = False
    return values


def _numeric(reader: _BufferReader, kind: int) -> np.dtype[np.generic]:
    dtype = kinds.NUMERIC_KINDS.get(kind)
    if dtype is None:
        found = "an array inside an array" if kind == kinds.KIND_ARRAY else f"value type {kind}"
        reader.fail(f"{reader.subject}: {found} cannot be read; expected types 0 to 12")
    return dtype


def _alignment(reader: _BufferReader, metadata: dict[str, MetaValue]) -> int:
    value = metadata.get(kinds.ALIGNMENT_KEY, kinds.DEFAULT_ALIGNMENT)
    # A power of two shares no bit with its predecessor.
    if type(value) is int and 1 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0:
        return value
    return reader.fail(
        f"{kinds.ALIGNMENT_KEY}: got {value!a:.60}, expected a power of two; the file is damaged"
    )


def _read_tensor(reader: _BufferReader, index: int, count: int) -> TensorInfo:
    """Read one entry; its offset is still relative to the data section, its size unknown."""
    reader.subject = f"the tensor directory (entry {index + 1} of {count})"
    name = reader.text("the name", MAX_NAME_BYTES)
    reader.subject = f"the directory entry of tensor {shown(name)}"
    n_dims = reader.u32("the number of dimensions")
    if n_dims > kinds.MAX_DIMS:
        reader.fail(
            f"tensor {shown(name)}: got {n_dims} dimensions, expected at most {kinds.MAX_DIMS}"
        )
    dims = tuple(reader.u64("a dimension") for _ in range(n_dims))
    type_id = reader.u32("the type")
    offset = reader.u64("the offset")
    size = _tensor_size(reader, name, type_id, dims)
    if offset + size >= _OFFSET_LIMIT:
        reader.fail(f"tensor {shown(name)}: offset {offset} is impossible; the file is damaged")
    return TensorInfo(name, type_id, dims, offset, size)


def _tensor_size(reader: _BufferReader, name: str, type_id: int, dims: tuple[int, ...]) -> int:
    if 0 in dims:
        reader.fail(f"tensor {shown(name)}: got dimensions {list(dims)}, expected none of 0")
    if not kinds.is_known(type_id):
        return 0
    columns, per_block = dims[0] if dims else 1, kinds.block_values(type_id)
    if columns % per_block:
        reader.fail(
            f"tensor {shown(name)}: got rows of {columns} values, expected a multiple of "
            f"{per_block} for {kinds.type_name(type_id)}"
        )
    return kinds.tensor_bytes(type_id, dims)


def _place(
    entries: list[TensorInfo], data_offset: int, alignment: int, file_size: int
) -> tuple[TensorInfo, ...]:
    """Turn offsets into absolute ones and check that tensors are disjoint and inside the file."""
    _check_names(entries)
    order = sorted(range(len(entries)), key=lambda index: entries[index].offset)
    starts = [data_offset + entries[index].offset for index in order]
    # A type of unknown size reaches up to the next tensor, or to the end of the file.
    next_starts = [*starts, max([file_size, *starts])][1:]
    placed: dict[int, TensorInfo] = {}
    for index, start, next_start in zip(order, starts, next_starts, strict=True):
        entry = entries[index]
        if entry.offset % alignment:
            _refuse(entry, f"offset {entry.offset} is not a multiple of {alignment}", start)
        size = entry.n_bytes if entry.is_known else next_start - start
        is_last = index == order[-1]
        if not is_last and (start + size > next_start or start == next_start):
            _refuse(entry, f"its {size} bytes run into the next tensor", start)
        placed[index] = TensorInfo(entry.name, entry.type_id, entry.dims, start, size)
    _check_complete([placed[index] for index in order], file_size)
    return tuple(placed[index] for index in range(len(entries)))


def _check_names(entries: list[TensorInfo]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            _refuse(entry, "its name stands in the directory twice", None)
        seen.add(entry.name)


def _check_complete(in_file_order: list[TensorInfo], file_size: int) -> None:
    ends = [max(info.offset + info.n_bytes, info.offset + 1) for info in in_file_order]
    for info, end in zip(in_file_order, ends, strict=True):
        if end > file_size:
            raise GgufError(
                f"the file is cut off: tensor {shown(info.name)} is the first that is incomplete; "
                f"the file has {file_size} bytes, {max(ends) - file_size} bytes are missing; "
                "download it again"
            )


def _refuse(entry: TensorInfo, what: str, offset: int | None) -> NoReturn:
    raise GgufError(f"tensor {shown(entry.name)}: {what}; the file is damaged", offset=offset)
