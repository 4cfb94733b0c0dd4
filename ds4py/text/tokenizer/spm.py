"""SentencePiece BPE from a GGUF vocabulary, computed by the `sentencepiece` library.

Owns: writing the few fields of a sentencepiece ModelProto that the library needs, and turning ids
back into bytes. Refuses to know: where the vocabulary came from, control tokens in prompts, BOS.
Invariant: piece number n of the model is token n of the vocabulary.

The proto is written by hand because the generated classes need the protobuf package, which nothing
else here does: it is a list of `tag, length, bytes` records.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Final

import sentencepiece

from ds4py.errors import ModelError
from ds4py.text.tokenizer.vocabulary import TokenType, Vocabulary, is_text

SPACE: Final = "\u2581"
"""How spellings write a space."""

_NO_CHARACTER: Final = "\ufdd0"  # a code point that is no character and never will be
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Field numbers of sentencepiece's ModelProto and its parts.
_MODEL_PIECES, _MODEL_TRAINER, _MODEL_NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_TRAINER_MODEL_TYPE, _TRAINER_BYTE_FALLBACK, _TRAINER_UNK_ID = 3, 35, 40
_TRAINER_BOS_ID, _TRAINER_EOS_ID, _TRAINER_PAD_ID = 41, 42, 43
_NORMALIZER_DUMMY_PREFIX, _NORMALIZER_TRIM, _NORMALIZER_ESCAPE = 3, 4, 5
_MODEL_TYPE_BPE = 2


class SpmCodec:
    """SentencePiece BPE; safe to use from several threads.

    Args:
        vocabulary: A vocabulary whose model is "llama".

    Raises:
        ModelError: There are no scores, there is no unknown token, or only some of the 256 byte
            tokens are there.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._spellings = vocabulary.tokens
        self._types = vocabulary.types
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model_proto(vocabulary))
        except RuntimeError as error:
            raise ModelError(
                "tokenizer", got=str(error), expected="a sentencepiece vocabulary"
            ) from error

    def encode(self, text: str, *, special: bool) -> list[int]:  # noqa: ARG002  (see Codec)
        """Return the ids of a text that contains no control tokens."""
        ids: list[int] = self._processor.EncodeAsIds(text) if text else []
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Return what a token that is not special stands for."""
        spelling = self._spellings[token]
        if self._types[token] == TokenType.BYTE and (byte := _BYTE.fullmatch(spelling)):
            return bytes([int(byte[1], 16)])
        if self._types[token] == TokenType.NORMAL:
            spelling = spelling.replace(SPACE, " ")
        return spelling.encode("utf-8", "surrogateescape")


def model_proto(vocabulary: Vocabulary) -> bytes:
    """Write a vocabulary as a serialized sentencepiece ModelProto."""
    if not vocabulary.scores:
        raise ModelError(
            "metadata key tokenizer.ggml.scores", got="nothing", expected="a score per token"
        )
    types = _types(vocabulary)
    has_bytes = _has_byte_tokens(vocabulary)
    parts = [
        _record(_MODEL_PIECES, _piece(spelling, score, type_))
        for spelling, score, type_ in zip(
            _unique_spellings(vocabulary), vocabulary.scores, types, strict=True
        )
    ]
    trainer = (
        _varint_field(_TRAINER_MODEL_TYPE, _MODEL_TYPE_BPE)
        + _varint_field(_TRAINER_BYTE_FALLBACK, int(has_bytes))
        + _varint_field(_TRAINER_UNK_ID, types.index(TokenType.UNKNOWN))
        + b"".join(
            _varint_field(field, 2**64 - 1)  # -1: the library shall not look for them
            for field in (_TRAINER_BOS_ID, _TRAINER_EOS_ID, _TRAINER_PAD_ID)
        )
    )
    normalizer = (
        _varint_field(_NORMALIZER_DUMMY_PREFIX, int(vocabulary.add_space_prefix))
        + _varint_field(_NORMALIZER_TRIM, 0)
        + _varint_field(_NORMALIZER_ESCAPE, 1)
    )
    parts += [_record(_MODEL_TRAINER, trainer), _record(_MODEL_NORMALIZER, normalizer)]
    return b"".join(parts)


def _types(vocabulary: Vocabulary) -> list[int]:
    """Return the types with exactly one UNKNOWN, as the library demands."""
    types = list(vocabulary.types)
    unknown = vocabulary.unknown_id
    if unknown is None:
        if TokenType.UNKNOWN not in types:
            raise ModelError(
                "metadata key tokenizer.ggml.unknown_token_id", got="nothing", expected="a token id"
            )
        unknown = types.index(TokenType.UNKNOWN)
    known = {*TokenType}
    types = [type_ if type_ in known else TokenType.UNUSED for type_ in types]
    types = [TokenType.CONTROL if type_ == TokenType.UNKNOWN else type_ for type_ in types]
    types[unknown] = TokenType.UNKNOWN
    return types


def _has_byte_tokens(vocabulary: Vocabulary) -> bool:
    spellings = vocabulary.of_type(TokenType.BYTE)
    values = {int(match[1], 16) for match in map(_BYTE.fullmatch, spellings) if match}
    if len(spellings) not in (0, 256) or len(values) != len(spellings):
        raise ModelError(
            "byte tokens", got=f"{len(values)} of them", expected="<0x00> to <0xFF>, or none"
        )
    return bool(spellings)


def _unique_spellings(vocabulary: Vocabulary) -> Iterator[str]:
    """Yield spellings as the library accepts them: valid, without NUL, and each one once.

    Spaces are written as the library sees them in text. What cannot be kept gets a name that no
    text contains; such a token can still be generated, only not be found in a text.
    """
    seen: set[str] = set()
    for id_, spelling in enumerate(vocabulary.tokens):
        unique = spelling.replace(" ", SPACE)
        refused = not unique or unique[0] == _NO_CHARACTER or "\0" in unique
        if refused or unique in seen or not is_text(unique):
            unique = f"{_NO_CHARACTER}{id_}"
        seen.add(unique)
        yield unique


def _piece(spelling: str, score: float, type_: int) -> bytes:
    return (
        _record(_PIECE_TEXT, spelling.encode())
        + struct.pack("<Bf", _PIECE_SCORE << 3 | 5, score)
        + _varint_field(_PIECE_TYPE, type_)
    )


def _record(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _varint_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
