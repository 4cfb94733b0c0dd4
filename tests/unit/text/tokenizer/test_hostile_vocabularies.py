"""Any tokenizer section at all gives a working tokenizer or a `ModelError`."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import ModelError
from ds4py.gguf.kinds import MetaValue
from ds4py.text.tokenizer.tokenizer import load_tokenizer
from tests.unit.text.tokenizer.toy_vocabularies import BYTE, NORMAL, metadata_of

SPELLINGS = (
    st.text("ab\u2581 \0<>0xé", max_size=4)
    | st.sampled_from(["<0x41>", "<unk>", "\ufdd00", "\ufdd01", "<|im_end|>"])
    | st.binary(max_size=3).map(lambda content: content.decode("utf-8", "surrogateescape"))
)
TYPES = st.sampled_from([1, 1, 1, 2, 3, 4, 5, 6, 0, -1, 2**31 - 1])
TOKENS = st.lists(st.tuples(SPELLINGS, TYPES), min_size=1, max_size=8)
TEXTS = st.text("ab\u2581 \0<>0xé41", max_size=12) | st.text(max_size=10)
BYTES = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]


def check(metadata: dict[str, MetaValue], text: str) -> None:
    try:
        tokenizer = load_tokenizer(metadata)
    except ModelError:
        return
    for special in (True, False):
        ids = tokenizer.encode(text, special=special)
        assert all(0 <= id_ < tokenizer.n_vocab for id_ in ids)
    tokenizer.decode(range(-1, tokenizer.n_vocab + 1), special=True)


@given(tokens=TOKENS, with_bytes=st.booleans(), text=TEXTS, data=st.data())
def test_any_spm_vocabulary(
    tokens: list[tuple[str, int]], with_bytes: bool, text: str, data: st.DataObject
) -> None:
    tokens = [*tokens, *BYTES] if with_bytes else tokens
    scores = data.draw(st.lists(st.floats(width=32), min_size=len(tokens[:8]), max_size=8))
    scores = [*scores, *[0.0] * len(tokens)][: len(tokens)]
    values: dict[str, MetaValue] = {
        "scores": np.array(scores, np.float32),
        "unknown_token_id": data.draw(st.integers(-1, len(tokens))),
        "add_space_prefix": data.draw(st.booleans()),
    }
    check(metadata_of(tokens, "llama", **values), text)


@given(tokens=TOKENS, text=TEXTS, data=st.data())
def test_any_bpe_vocabulary(tokens: list[tuple[str, int]], text: str, data: st.DataObject) -> None:
    tokens = [*tokens, ("a", NORMAL), ("b", NORMAL), ("ab", NORMAL)]
    merge = st.lists(st.sampled_from(tokens), min_size=2, max_size=2).map(
        lambda pair: " ".join(spelling for spelling, _ in pair)
    )
    merges = data.draw(st.lists(st.just("a b") | merge, max_size=3))
    check(metadata_of(tokens, "gpt2", merges=merges, pre="gpt-2"), text)
