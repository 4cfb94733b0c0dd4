"""The tokenizer section of a DeepSeek V4: markers by their text, whatever else the file says."""

import numpy as np
import pytest

from ds4py.errors import ModelError
from ds4py.gguf.kinds import MetaValue
from ds4py.text.tokenizer.deepseek4_tokens import Marker, marked
from ds4py.text.tokenizer.tokenizer import load_tokenizer
from tests.unit.text import tiny_deepseek4 as tiny

PREFIX = "tokenizer.ggml."
TEXT = f"hi {Marker.USER}<think>{Marker.DSML}"


def changed(**values: MetaValue | None) -> dict[str, MetaValue]:
    """The tiny file's metadata with other values; None removes a key."""
    metadata: dict[str, MetaValue | None] = {**tiny.metadata()}
    metadata |= {PREFIX + key: value for key, value in values.items()}
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize(
    "values",
    [
        {
            "pre": None,
            "model": None,
            "token_type": None,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        {"pre": "gpt-2", "token_type": np.full(768, 3, np.int32), "eos_token_id": 5},
        {"token_type": np.ones(768, np.int32), "add_bos_token": True, "bos_token_id": 9},
    ],
)
def test_types_and_special_ids_of_the_file_do_not_count(values: dict[str, MetaValue]) -> None:
    tokenizer = load_tokenizer(changed(**values))
    for special in (False, True):
        assert tokenizer.encode(TEXT, special=special) == tiny.tokenizer().encode(
            TEXT, special=special
        )
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (0, {1}, False)


def test_no_text_spells_another_special_token_and_no_reply_shows_one() -> None:
    tokenizer = tiny.tokenizer()
    spelling = tokenizer.token_bytes(766, special=True).decode()
    assert "place" in spelling
    assert 766 not in tokenizer.encode(spelling, special=True)
    assert tokenizer.token_bytes(766) == b""


def test_a_reply_shows_tags_but_no_turns() -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer.encode("".join(Marker), special=True)
    assert len(ids) == 7
    assert tokenizer.decode(ids).decode() == f"<think></think>{Marker.DSML}"


def test_of_equal_spellings_the_last_counts() -> None:
    tokens = [*tiny.metadata()[PREFIX + "tokens"], Marker.EOS.value]  # type: ignore[misc]
    tokenizer = load_tokenizer(changed(tokens=tokens))
    assert tokenizer.eos_ids == {768}
    assert tokenizer.encode(Marker.EOS, special=True) == [768]


@pytest.mark.parametrize("marker", list(Marker))
def test_a_file_that_lacks_a_marker_is_refused(marker: Marker) -> None:
    tokens = ["x" if token == marker else token for token in tiny.metadata()[PREFIX + "tokens"]]  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=f"tokenizer.ggml.tokens: got no {marker}"):
        load_tokenizer(changed(tokens=tokens))


def test_a_text_is_cut_at_its_markers() -> None:
    parts = marked(TEXT)
    assert parts == ["hi ", Marker.USER, Marker.THINK, Marker.DSML]
    assert [isinstance(part, Marker) for part in parts] == [False, True, True, True]
    only = marked(TEXT, (Marker.DSML,))
    assert [isinstance(part, Marker) for part in only] == [False, True]
    assert marked("") == []
