"""What a file is when it is no GGUF file, in words that tell a person what to do.

Owns: the first bytes of the files that people hand over by mistake. Refuses to know: GGUF itself.
Invariant: any bytes at all give one clear sentence.
"""

from __future__ import annotations

from typing import Final

_GET_GGUF: Final = "download or convert the model in GGUF format"
_MAGICS: Final = (
    (b"version https://git-lfs", "it is a git-LFS pointer, not the model; run `git lfs pull`"),
    (b"PK\x03\x04", f"it is a zip archive, perhaps PyTorch weights; unpack it, or {_GET_GGUF}"),
    (b"\x1f\x8b", "it is gzip-compressed; decompress it first"),
    (b"\x28\xb5\x2f\xfd", "it is zstd-compressed; decompress it first"),
    (b"\xfd7zXZ\x00", "it is xz-compressed; decompress it first"),
    (b"FUGG", "its magic is byte-swapped, so it is a big-endian GGUF; get the little-endian one"),
    (b"tjgg", f"it is an old GGJT file, older than GGUF; {_GET_GGUF}"),
    (b"fmgg", f"it is an old GGMF file, older than GGUF; {_GET_GGUF}"),
    (b"lmgg", f"it is an old GGML file, older than GGUF; {_GET_GGUF}"),
)
_MARKUP: Final = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")
HEAD_BYTES: Final = 64
"""How much of a file `describe` wants to see."""


def describe(head: bytes) -> str:
    """Say what a file that does not begin with the GGUF magic is, from its first bytes."""
    if not head:
        return "not a GGUF file: it is empty; the download may have failed, fetch it again"
    return f"not a GGUF file: {_guess(head)}"


def _guess(head: bytes) -> str:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(_MARKUP):
        return "it is an HTML page; the download link led to a web page, fetch the file itself"
    for magic, sentence in _MAGICS:
        if head.startswith(magic):
            return sentence
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 40:
        return f"it looks like safetensors; {_GET_GGUF}"
    if head[:1] == b"\x80" and head[1:2] in {b"\x02", b"\x03", b"\x04", b"\x05"}:
        return f"it looks like a Python pickle, perhaps PyTorch weights; {_GET_GGUF}"
    return f"it begins with {head[:4]!r}, expected b'GGUF'; check the path, or {_GET_GGUF}"
