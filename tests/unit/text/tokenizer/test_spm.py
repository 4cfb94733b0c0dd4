"""SentencePiece vocabularies: scores, byte fallback, spaces, and what the library would refuse."""

import numpy as np
import pytest

from ds4py.errors import ModelError
from ds4py.text.tokenizer.spm import SpmCodec, model_proto
from ds4py.text.tokenizer.tokenizer import Tokenizer
from ds4py.text.tokenizer.vocabulary import Vocabulary
from tests.unit.text.tokenizer.toy_vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    SPM_PIECES,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    metadata_of,
    spm,
    spm_metadata,
)

FIRST_PIECE = 259


def spelled(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(id_) for id_ in tokenizer.encode(text, special=False)]


def test_better_scores_merge_first() -> None:
    assert spelled(spm(), "hello world") == [b" hello", b" world"]
    n_tokens = FIRST_PIECE + len(SPM_PIECES)
    scores = -np.arange(n_tokens, dtype=np.float32)
    scores[FIRST_PIECE + SPM_PIECES.index("he")] = -5000  # now "ll" merges before "he"
    scores[FIRST_PIECE + SPM_PIECES.index("hell")] = -6000
    assert spelled(spm(scores=scores), "hell") == [b" ", b"hell"]


def test_a_space_is_put_in_front_only_if_the_file_says_so() -> None:
    assert spelled(spm(), "hello") == [b" hello"]
    assert spelled(spm(add_space_prefix=False), "hello") == [b"hello"]


def test_spaces_are_kept_one_by_one() -> None:
    assert b"".join(spelled(spm(add_space_prefix=False), "  he  ")) == b"  he  "


def test_a_character_without_a_piece_is_spelled_in_byte_tokens() -> None:
    tokenizer = spm(add_space_prefix=False)
    assert tokenizer.encode("é", special=False) == [3 + 0xC3, 3 + 0xA9]
    assert spelled(tokenizer, "é") == [b"\xc3", b"\xa9"]


def test_byte_tokens_spelled_in_a_text_are_characters() -> None:
    assert b"".join(spelled(spm(add_space_prefix=False), "<0x41>")) == b"<0x41>"


def test_user_defined_tokens_may_be_written_with_spaces() -> None:
    tokenizer = spm(("   ", USER_DEFINED), add_space_prefix=False)
    assert tokenizer.encode("he   he", special=False)[1] == tokenizer.n_vocab - 1
    assert tokenizer.token_bytes(tokenizer.n_vocab - 1) == b"   "


def test_without_byte_tokens_unknown_characters_become_the_unknown_token() -> None:
    tokens = [("<unk>", UNKNOWN), ("\u2581", NORMAL), ("h", NORMAL)]
    section = metadata_of(tokens, "llama", scores=np.zeros(3, np.float32), unknown_token_id=0)
    codec = SpmCodec(Vocabulary.from_metadata(section))
    assert codec.encode("hé", special=False) == [1, 2, 0]


def test_the_unknown_token_is_found_by_its_type_or_by_its_id() -> None:
    by_type = spm_metadata()
    del by_type["tokenizer.ggml.unknown_token_id"]
    assert SpmCodec(Vocabulary.from_metadata(by_type)).encode("he", special=False)
    by_id = spm_metadata(("[unk]", CONTROL), unknown_token_id=FIRST_PIECE + len(SPM_PIECES))
    assert SpmCodec(Vocabulary.from_metadata(by_id)).encode("he", special=False)


@pytest.mark.parametrize(
    "spelling", ["hello", "", "a\0b", b"\xff".decode("utf-8", "surrogateescape")]
)
def test_spellings_that_the_library_would_refuse_disturb_no_other_token(spelling: str) -> None:
    tokenizer = spm((spelling, NORMAL), ("\u2581zz", NORMAL), ("z", UNUSED))
    assert spelled(tokenizer, "hello") == [b" hello"]
    assert tokenizer.token_bytes(tokenizer.n_vocab - 3) == spelling.encode(
        "utf-8", "surrogateescape"
    )


def test_a_type_that_nobody_knows_counts_as_unused() -> None:
    tokenizer = spm(("qqq", 77))
    assert tokenizer.n_vocab - 1 not in tokenizer.encode("qqq", special=False)


def test_a_vocabulary_without_scores_is_refused() -> None:
    section = spm_metadata()
    del section["tokenizer.ggml.scores"]
    with pytest.raises(ModelError, match=r"scores: got nothing"):
        SpmCodec(Vocabulary.from_metadata(section))


def test_a_vocabulary_without_an_unknown_token_is_refused() -> None:
    section = metadata_of([("a", NORMAL)], "llama", scores=np.zeros(1, np.float32))
    with pytest.raises(ModelError, match=r"unknown_token_id: got nothing"):
        SpmCodec(Vocabulary.from_metadata(section))


def test_what_only_the_library_objects_to_is_refused_too() -> None:
    with pytest.raises(ModelError, match="expected a sentencepiece vocabulary"):
        spm(unknown_token_id=3)  # a byte token cannot be the unknown token


@pytest.mark.parametrize("extra", ["<0x00>", "<0xZZ>", "nonsense"])
def test_a_vocabulary_with_only_some_byte_tokens_is_refused(extra: str) -> None:
    tokens = [("<unk>", UNKNOWN), (extra, BYTE)]
    section = metadata_of(tokens, "llama", scores=np.zeros(2, np.float32), unknown_token_id=0)
    with pytest.raises(ModelError, match="byte tokens"):
        SpmCodec(Vocabulary.from_metadata(section))


def test_the_proto_is_written_in_the_known_wire_form() -> None:
    tokens = [("<unk>", UNKNOWN), ("a", NORMAL)]
    section = metadata_of(tokens, "llama", scores=np.array([0, -1], np.float32), unknown_token_id=0)
    proto = model_proto(Vocabulary.from_metadata(section))
    first = b"\x0a\x0e" + b"\x0a\x05<unk>" + b"\x15\x00\x00\x00\x00" + b"\x18\x02"
    second = b"\x0a\x0a" + b"\x0a\x01a" + b"\x15\x00\x00\x80\xbf" + b"\x18\x01"
    assert proto.startswith(first + second)
