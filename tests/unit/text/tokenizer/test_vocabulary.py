"""Reading the tokenizer section: defaults, types, ids, and refusals that name the key."""

import numpy as np
import pytest

from ds4py.errors import ModelError
from ds4py.text.tokenizer.vocabulary import TokenType, Vocabulary, is_text
from tests.unit.text.tokenizer.toy_vocabularies import CONTROL, NORMAL, bpe_metadata, spm_metadata


def test_values_stand_where_the_file_puts_them() -> None:
    vocabulary = Vocabulary.from_metadata(bpe_metadata(unknown_token_id=0))
    assert vocabulary.model == "gpt2"
    assert vocabulary.pre == "gpt-2"
    assert (vocabulary.bos_id, vocabulary.unknown_id) == (1, 0)
    assert vocabulary.tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert vocabulary.merges[0] == "h e"
    assert vocabulary.scores == ()


def test_without_keys_bpe_adds_neither_bos_nor_space_and_spm_adds_both() -> None:
    bpe = bpe_metadata()
    del bpe["tokenizer.ggml.add_bos_token"], bpe["tokenizer.ggml.add_space_prefix"]
    assert not Vocabulary.from_metadata(bpe).add_bos
    assert not Vocabulary.from_metadata(bpe).add_space_prefix
    assert Vocabulary.from_metadata(spm_metadata()).add_bos
    assert Vocabulary.from_metadata(spm_metadata()).add_space_prefix


def test_llama_3_wants_bos_although_its_files_do_not_say_so() -> None:
    section = bpe_metadata(pre="llama-bpe")
    del section["tokenizer.ggml.add_bos_token"]
    assert Vocabulary.from_metadata(section).add_bos


def test_tokens_without_types_are_normal() -> None:
    section = bpe_metadata()
    del section["tokenizer.ggml.token_type"]
    vocabulary = Vocabulary.from_metadata(section)
    assert vocabulary.types[3] == TokenType.NORMAL


def test_known_end_of_turn_tokens_end_a_reply_beside_the_named_one() -> None:
    vocabulary = Vocabulary.from_metadata(
        spm_metadata(("<end_of_turn>", NORMAL), ("<|end|>", CONTROL))
    )
    end_of_turn = vocabulary.tokens.index("<end_of_turn>")
    assert vocabulary.eos_ids == {2, end_of_turn, end_of_turn + 1}
    assert vocabulary.types[end_of_turn] == TokenType.CONTROL


def test_the_end_of_one_message_is_not_the_end_of_a_turn_of_several() -> None:
    vocabulary = Vocabulary.from_metadata(
        spm_metadata(("<|end|>", CONTROL), ("<|return|>", CONTROL))
    )
    assert vocabulary.eos_ids == {2, vocabulary.tokens.index("<|return|>")}


def test_eot_ends_a_reply_too() -> None:
    assert Vocabulary.from_metadata(spm_metadata(eot_token_id=7)).eos_ids == {2, 7}


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("model", 3, "model"),
        ("tokens", [], "0 tokens"),
        ("tokens", 17, "tokens"),
        ("token_type", np.array([1, 2], np.int32), "2 entries"),
        ("token_type", [], "token_type"),
        ("bos_token_id", 100_000, "bos_token_id: got 100000"),
        ("eos_token_id", -1, "eos_token_id: got -1"),
        ("unknown_token_id", True, "unknown_token_id"),
        ("add_bos_token", 1, "add_bos_token"),
        ("merges", 5, "merges"),
        ("scores", np.zeros(3, np.float32), "3 entries"),
    ],
)
def test_a_value_that_can_not_be_is_refused_by_name(
    key: str, value: object, complaint: str
) -> None:
    section = bpe_metadata() | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelError, match=complaint):
        Vocabulary.from_metadata(section)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["model", "tokens"])
def test_a_file_without_a_tokenizer_is_refused_by_the_missing_key(key: str) -> None:
    section = bpe_metadata()
    del section[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelError, match=f"tokenizer.ggml.{key}: got nothing"):
        Vocabulary.from_metadata(section)


def test_a_score_that_is_no_number_is_refused() -> None:
    section = spm_metadata()
    scores = np.zeros(len(section["tokenizer.ggml.tokens"]), np.float32)  # type: ignore[arg-type]
    scores[5] = np.nan
    with pytest.raises(ModelError, match="not finite"):
        Vocabulary.from_metadata(section | {"tokenizer.ggml.scores": scores})


def test_of_equal_spellings_the_last_counts() -> None:
    vocabulary = Vocabulary.from_metadata(spm_metadata(("<x>", CONTROL), ("<x>", CONTROL)))
    assert vocabulary.of_type(TokenType.CONTROL)["<x>"] == len(vocabulary.tokens) - 1


def test_a_spelling_with_foreign_bytes_is_no_text() -> None:
    assert is_text("plain")
    assert is_text("größer")
    assert not is_text(b"\xff".decode("utf-8", "surrogateescape"))
