"""Byte-level BPE: merges by rank, refusals, spellings that are not byte-level."""

import pytest

from ds4py.errors import ModelError
from ds4py.text.tokenizer.bpe import BYTE_ALPHABET
from tests.support.toys import byte_characters
from tests.unit.text.tokenizer.toy_vocabularies import CONTROL, NORMAL, USER_DEFINED, bpe


def test_the_alphabet_stands_for_each_byte_once() -> None:
    assert [BYTE_ALPHABET[character] for character in byte_characters()] == list(range(256))
    assert BYTE_ALPHABET["\u0120"] == ord(" ")
    assert BYTE_ALPHABET["\u010a"] == ord("\n")


def test_merges_apply_in_order_of_rank() -> None:
    tokenizer = bpe()
    spelled = [tokenizer.token_bytes(id_) for id_ in tokenizer.encode("hello the", special=False)]
    assert spelled == [b"hello", b" the"]
    # "l l" ranks before "l d", so the pair in the middle goes first
    spelled = [tokenizer.token_bytes(id_) for id_ in tokenizer.encode("llld", special=False)]
    assert spelled == [b"ll", b"ld"]


def test_text_without_merges_is_spelled_in_bytes() -> None:
    tokenizer = bpe()
    ids = tokenizer.encode("é", special=False)
    assert [tokenizer.token_bytes(id_) for id_ in ids] == [b"\xc3", b"\xa9"]


def test_families_that_say_so_take_whole_pieces_without_merging() -> None:
    piece = ("wxyz", NORMAL)
    plain, whole = bpe(piece, pre="qwen2"), bpe(piece, pre="llama-bpe")
    assert len(plain.encode("wxyz", special=False)) == 4
    assert whole.encode("wxyz", special=False) == [whole.n_vocab - 1]


def test_no_text_becomes_a_control_token_by_merging() -> None:
    tokenizer = bpe(("wxyz", CONTROL), pre="llama-bpe")
    assert tokenizer.n_vocab - 1 not in tokenizer.encode("wxyz", special=False)


def test_qwen_composes_characters_and_others_do_not() -> None:
    decomposed = "e\u0301"
    qwen, gpt2 = bpe(pre="qwen2"), bpe(pre="gpt-2")
    assert qwen.decode(qwen.encode(decomposed, special=False)).decode() == "\u00e9"
    assert gpt2.decode(gpt2.encode(decomposed, special=False)).decode() == decomposed


def test_a_spelling_outside_the_alphabet_stands_for_itself() -> None:
    tokenizer = bpe(("你", NORMAL), ("\u0120x", USER_DEFINED))
    assert tokenizer.token_bytes(tokenizer.n_vocab - 2).decode() == "你"
    assert tokenizer.token_bytes(tokenizer.n_vocab - 1).decode() == "\u0120x"


def test_a_spelling_that_is_not_utf_8_keeps_its_bytes() -> None:
    spelling = b"\xff\xfe".decode("utf-8", "surrogateescape")
    tokenizer = bpe((spelling, USER_DEFINED))
    assert tokenizer.token_bytes(tokenizer.n_vocab - 1) == b"\xff\xfe"
    assert tokenizer.decode(tokenizer.encode("hello", special=True)) == b"hello"


@pytest.mark.parametrize("merge", ["h", "h e e", "q q", "hello nothing", "", " e"])
def test_a_merge_of_something_else_than_tokens_is_refused_by_its_number(merge: str) -> None:
    with pytest.raises(ModelError, match="merges, entry 1: got"):
        bpe(merges=["h e", merge])


def test_a_vocabulary_without_merges_is_refused() -> None:
    with pytest.raises(ModelError, match=r"merges: got nothing"):
        bpe(merges=[])
