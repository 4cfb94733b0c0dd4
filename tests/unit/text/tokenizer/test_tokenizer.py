"""The public tokenizer over both codecs: special tokens, BOS, bytes, round trips, threads."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import ModelError
from ds4py.text.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.tokenizer.toy_vocabularies import (
    CONTROL,
    UNUSED,
    USER_DEFINED,
    bpe,
    bpe_metadata,
    spm,
)

BPE = bpe(("<tool>", USER_DEFINED))
SPM = spm(("[tool]", USER_DEFINED), add_space_prefix=False)
BOTH = pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
ANY_TEXT = st.text(max_size=40) | st.text("hello world<tool>[]|im_start\n", max_size=40)


def test_control_tokens_are_recognised_only_when_asked() -> None:
    text = "<|im_start|>hello"
    hello = BPE.encode("hello", special=True)
    assert BPE.encode(text, special=True) == [1, *hello]
    plain = BPE.encode(text, special=False)
    assert 1 not in plain
    assert BPE.decode(plain).decode() == text


def test_in_spm_control_tokens_are_recognised_only_when_asked() -> None:
    hello = SPM.encode("hello", special=True)
    assert SPM.encode("<s>hello</s>", special=True) == [1, *hello, 2]
    assert {1, 2}.isdisjoint(SPM.encode("<s>hello</s>", special=False))


@BOTH
@pytest.mark.parametrize("special", [True, False])
def test_user_defined_tokens_are_recognised_either_way(tokenizer: Tokenizer, special: bool) -> None:
    spelling = "<tool>" if tokenizer is BPE else "[tool]"
    last = tokenizer.n_vocab - 1
    assert tokenizer.encode(f"hello{spelling}", special=special)[-1] == last
    assert tokenizer.token_bytes(last) == spelling.encode()


def test_deepseek_4_takes_user_defined_tokens_literally_in_plain_text() -> None:
    tokenizer = bpe(("<think>", USER_DEFINED), pre="joyai-llm")
    think = tokenizer.n_vocab - 1
    assert tokenizer.encode("<think>", special=True) == [think]
    assert think not in tokenizer.encode("<think>", special=False)


@BOTH
@given(text=ANY_TEXT)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    # U+2581 is how SPM writes a space, so it cannot survive there
    text = text if tokenizer is BPE else text.replace("\u2581", "")
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.decode(ids).decode() == text
    assert all(0 <= id_ < tokenizer.n_vocab for id_ in ids)


@BOTH
@given(text=ANY_TEXT)
def test_spelled_out_tokens_survive_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\u2581", "")
    ids = tokenizer.encode(text, special=True)
    assert tokenizer.decode(ids, special=True).decode() == text


@BOTH
def test_control_tokens_add_nothing_to_a_text_but_can_be_shown(tokenizer: Tokenizer) -> None:
    spelling = b"<|im_start|>" if tokenizer is BPE else b"<s>"
    assert tokenizer.token_bytes(1) == b""
    assert tokenizer.token_bytes(1, special=True) == spelling


@BOTH
@pytest.mark.parametrize("token", [-1, 10**9])
def test_an_id_that_no_token_has_adds_nothing(tokenizer: Tokenizer, token: int) -> None:
    assert tokenizer.token_bytes(token) == b""
    assert tokenizer.token_bytes(token, special=True) == b""


def test_unused_tokens_add_nothing() -> None:
    tokenizer = bpe(("[unused7]", UNUSED))
    assert tokenizer.token_bytes(tokenizer.n_vocab - 1) == b""


@BOTH
def test_halves_of_surrogate_pairs_are_joined_or_replaced(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\ud83d\ude00b\ud83d", special=True)
    assert tokenizer.decode(ids).decode() == "a😀b\ufffd"


@BOTH
def test_a_nul_character_is_an_ordinary_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\0b", special=True)) == b"a\0b"


def test_a_prompt_begins_with_bos_once_if_the_model_wants_it() -> None:
    tokenizer = bpe(add_bos_token=True)
    hello = tokenizer.encode("hello", special=True)
    assert tokenizer.prompt_ids("hello") == [1, *hello]
    assert tokenizer.prompt_ids("<|im_start|>hello") == [1, *hello]
    assert tokenizer.prompt_ids("") == [1]
    assert BPE.prompt_ids("hello") == hello


def test_bos_is_not_added_when_the_file_names_none() -> None:
    section = bpe_metadata(add_bos_token=True)
    del section["tokenizer.ggml.bos_token_id"]
    tokenizer = load_tokenizer(section)
    assert not tokenizer.add_bos
    assert tokenizer.prompt_ids("") == []


def test_special_ids_lists_control_tokens_and_can_not_be_changed() -> None:
    tokenizer = bpe(("<extra>", CONTROL))
    assert tokenizer.special_ids["<extra>"] == tokenizer.n_vocab - 1
    assert "hello" not in tokenizer.special_ids
    with pytest.raises(TypeError):
        tokenizer.special_ids["x"] = 1  # type: ignore[index]


def test_an_unknown_kind_of_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"tokenizer.ggml.model: got 'bert', expected 'gpt2' or"):
        load_tokenizer(bpe_metadata(model="bert"))


@BOTH
def test_several_threads_get_the_same_ids(tokenizer: Tokenizer) -> None:
    texts = [f"hello world {n} <tool>[tool]" * 20 for n in range(8)]
    expected = [tokenizer.encode(text, special=True) for text in texts]
    found: dict[int, list[list[int]]] = {}

    def work(n: int) -> None:
        found[n] = [tokenizer.encode(texts[n], special=True) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {n: [expected[n]] * 20 for n in range(len(texts))}
