"""The writer: what it writes, the parser and the `gguf` package read back."""

import io
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import GgufError, UnsupportedQuantError
from ds4py.gguf import kinds
from ds4py.gguf.parse import parse_gguf
from tests.toys import gguf_bytes, packed, tensor, toy_llama
from tools.gguf_writer import TensorSource, save_gguf, shard_name, write_gguf


def test_the_same_arguments_make_the_same_bytes(tmp_path: Path):
    one = toy_llama(tmp_path / "one.gguf", quant="Q4_1", seed=3).read_bytes()
    two = toy_llama(tmp_path / "two.gguf", quant="Q4_1", seed=3).read_bytes()
    other = toy_llama(tmp_path / "other.gguf", quant="Q4_1", seed=4).read_bytes()
    assert one == two != other


def test_the_gguf_package_reads_the_same_tensors(tmp_path: Path):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = tmp_path / "small.gguf"
    save_gguf(path, {"a.key": 5}, [packed("x", values), tensor("y", (32,), "Q8_0", fill=1)])
    reader = GGUFReader(path)
    assert reader.fields["a.key"].contents() == 5
    assert [t.name for t in reader.tensors] == ["x", "y"]
    assert np.array_equal(reader.tensors[0].data, values)
    assert reader.tensors[1].n_bytes == 34


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, GGUFValueType.UINT32),
        (-1, GGUFValueType.INT32),
        (1 << 40, GGUFValueType.UINT64),
        (-(1 << 40), GGUFValueType.INT64),
        (1.5, GGUFValueType.FLOAT32),
        (True, kinds.KIND_BOOL),
        (np.bool_(True), kinds.KIND_BOOL),
        (np.float64(0.1), 12),
        (np.uint16(9), 2),
        ("text", kinds.KIND_STRING),
    ],
)
def test_a_python_value_gets_the_smallest_usual_type(value, kind: int):
    raw = gguf_bytes({"k": value})
    assert int.from_bytes(raw[24 + 8 + 1 :][:4], "little") == kind
    read = parse_gguf(memoryview(raw)).metadata["k"]
    assert read == value


scalars = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(width=32, allow_nan=False),
    st.text(),
    st.lists(st.text()),
)


@given(st.dictionaries(st.text(max_size=20).filter(lambda k: k != "general.alignment"), scalars))
def test_whatever_was_written_is_read_back(metadata):
    assert parse_gguf(memoryview(gguf_bytes(metadata))).metadata == metadata


@pytest.mark.parametrize("code", ["u1", "i1", "u2", "i2", "u4", "i4", "f4", "u8", "i8", "f8", "?"])
def test_numeric_arrays_keep_their_type_and_are_read_only(code: str):
    values = np.array([0, 1, 1], code)
    read = parse_gguf(memoryview(gguf_bytes({"k": values}))).metadata["k"]
    assert isinstance(read, np.ndarray)
    assert read.dtype == values.dtype
    assert np.array_equal(read, values)
    assert not read.flags.writeable


def test_a_dtype_that_gguf_lacks_is_refused():
    with pytest.raises(GgufError, match="complex64"):
        gguf_bytes({"k": np.zeros(2, np.complex64)})


def test_a_tensor_of_the_wrong_size_is_refused():
    with pytest.raises(GgufError, match="tensor x: got 3 bytes, expected 4"):
        TensorSource("x", 0, (1,), b"abc")


def test_a_tensor_made_in_pieces_is_written_like_one_in_memory():
    whole = TensorSource("x", 0, (3,), b"abcdefghijkl")
    pieces = TensorSource("x", 0, (3,), lambda: [b"abcde", memoryview(b"fghijk"), b"l"])
    last = tensor("y", (1,))
    assert gguf_bytes({}, [pieces, last]) == gguf_bytes({}, [whole, last])
    assert b"".join(pieces.pieces()) == b"".join(pieces.pieces()) == whole.packed


def test_a_piece_is_written_before_the_next_is_made():
    stream = io.BytesIO()
    sizes = []

    def pieces():
        for _ in range(3):
            sizes.append(stream.tell())
            yield bytes(40)

    write_gguf(stream, {}, [TensorSource("x", 0, (30,), pieces)])
    assert [later - sizes[0] for later in sizes] == [0, 40, 80]


@pytest.mark.parametrize("pieces", [[], [b"abc"], [b"abc", b"de"]])
def test_pieces_of_the_wrong_size_are_refused(tmp_path: Path, pieces):
    source = TensorSource("x", 0, (1,), lambda: pieces)
    with pytest.raises(GgufError, match=r"tensor x: got \d bytes, expected 4 for F32"):
        save_gguf(tmp_path / "m.gguf", {}, [source])


def test_pieces_need_a_type_of_known_size():
    with pytest.raises(UnsupportedQuantError, match="type 99"):
        gguf_bytes({}, [TensorSource("x", 99, (1,), list)])


def test_alignment_is_kept():
    tensors = [tensor("a", (1,)), tensor("b", (1,))]
    parsed = parse_gguf(memoryview(gguf_bytes({}, tensors, alignment=256)))
    assert [info.offset % 256 for info in parsed.tensors] == [0, 0]
    assert parsed.tensors[1].offset - parsed.tensors[0].offset == 256


def test_shards_share_the_tensors_in_order(tmp_path: Path):
    tensors = [tensor(f"t{k}", (1,)) for k in range(5)]
    paths = save_gguf(tmp_path / "m.gguf", {"general.name": "m"}, tensors, n_shards=2)
    assert [path.name for path in paths] == [shard_name("m", 0, 2), shard_name("m", 1, 2)]
    parsed = [parse_gguf(memoryview(path.read_bytes())) for path in paths]
    assert [[info.name for info in part.tensors] for part in parsed] == [
        ["t0", "t1"],
        ["t2", "t3", "t4"],
    ]
    assert "general.name" in parsed[0].metadata
    assert "general.name" not in parsed[1].metadata


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path):
    with pytest.raises(GgufError, match="cannot be written"):
        save_gguf(tmp_path / "none" / "m.gguf", {}, [])
