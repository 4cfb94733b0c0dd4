"""Whatever bytes lie on disk, opening and summing up gives a value or a `Ds4Error`."""

import tracemalloc
from functools import cache
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ds4py.errors import Ds4Error
from ds4py.gguf.file import GgufFile
from ds4py.gguf.summary import suggest_cuts, summarize
from tests.support.toys import gguf_bytes, tensor

fuzz = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@cache
def shard() -> bytes:
    """A small model that claims to be the second of two shards, so that every check is reached."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 64,
        "split.no": 1,
        "split.count": 2,
        "split.tensors.count": 4,
        "tokenizer.ggml.tokens": ["a", "b"],
    }
    return gguf_bytes(metadata, [tensor("blk.1.w", (32,), "Q4_0"), tensor("output.weight", (8,))])


def open_fully(path: Path, raw: bytes) -> str:
    """Use a file as a reader would; say how it ended."""
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with GgufFile.open(path) as file:
            summary = summarize(file)
            file.require(file.tensors)
            suggest_cuts(summary, 1)
            return "read"
    except Ds4Error as error:
        return type(error).__name__
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 500_000


def test_the_seed_itself_is_good(tmp_path: Path):
    assert open_fully(tmp_path / "m-00002-of-00002.gguf", shard()) == "read"


@fuzz
@given(raw=st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, raw: bytes):
    assert open_fully(tmp_path / "m.gguf", raw) == "GgufError"


@fuzz
@given(length=st.integers(0, len(shard()) - 32))
def test_any_truncation(tmp_path: Path, length: int):
    assert open_fully(tmp_path / "m-00002-of-00002.gguf", shard()[:length]) == "GgufError"


@fuzz
@given(position=st.integers(0, len(shard()) - 1), value=st.integers(0, 255))
@example(position=shard().index(b"llama.block_count") + 17 + 4 + 3, value=0xFF)
@example(position=shard().index(b"split.count") + 11 + 4 + 3, value=0xFF)
@example(position=shard().index(b"general.architecture") + 20 + 4 + 8, value=0xFF)
def test_any_mutated_byte(tmp_path: Path, position: int, value: int):
    raw = bytearray(shard())
    raw[position] = value
    open_fully(tmp_path / "m-00002-of-00002.gguf", bytes(raw))
