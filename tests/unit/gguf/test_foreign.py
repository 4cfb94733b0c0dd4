"""Files that are no GGUF files are told apart by their first bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.gguf.foreign import HEAD_BYTES, describe


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"", "it is empty"),
        (b"<!DOCTYPE html><html>", "HTML page"),
        (b"\xef\xbb\xbf\n  <HTML lang=en>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:", "git lfs pull"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"\x28\xb5\x2f\xfd....", "zstd"),
        (b"\xfd7zXZ\x00", "xz"),
        ((900).to_bytes(8, "little") + b'{"a":1}', "safetensors"),
        (b"\x80\x04\x95abc", "pickle"),
        (b"FUGG\x00\x00\x00\x03", "big-endian"),
        (b"tjgg\x03\x00\x00\x00", "GGJT"),
        (b"\x7fELF\x02\x01", r"begins with b'\x7fELF', expected b'GGUF'"),
    ],
)
def test_the_sentence_says_what_was_found(head: bytes, words: str):
    assert words in describe(head)


@given(st.binary(max_size=HEAD_BYTES))
def test_any_bytes_give_one_printable_line(head: bytes):
    assert describe(head).isprintable()
