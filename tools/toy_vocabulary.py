"""A byte-level BPE vocabulary of any size, made of invented words.

Owns: tokens and merges such that every token but the special ones is what some text is cut into.
Refuses to know: models. Invariant: the same arguments make the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Final

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from ds4py.errors import ConfigError
from ds4py.text.tokenizer.vocabulary import TokenType
from tools.gguf_writer import WriteValue

Special = tuple[str, TokenType]

_SYLLABLES: Final = tuple(product("bdfgklmnprstvz", "aeiou"))


def vocabulary(
    n_vocab: int, pre: str, front: Sequence[Special], back: Sequence[Special] = ()
) -> dict[str, WriteValue]:
    """Return the `tokenizer.*` metadata of a vocabulary, without the ids of special tokens.

    Args:
        n_vocab: Number of tokens.
        pre: Name of the pre-tokenizer.
        front: Special tokens, from id 0.
        back: Special tokens, up to the last id.

    Raises:
        ConfigError: There are more special tokens and bytes than `n_vocab`.
    """
    alphabet = sorted(ByteLevel.alphabet())
    n_words = n_vocab - len(front) - len(alphabet) - len(back)
    if n_words < 0:
        raise ConfigError(f"vocabulary: got {n_vocab} tokens, expected {n_vocab - n_words} or more")
    merges = list(islice(_merges(), n_words))
    words = [left + right for left, right in merges]
    n_normal = len(alphabet) + len(words)
    types = [*(t for _, t in front), *[TokenType.NORMAL] * n_normal, *(t for _, t in back)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*(s for s, _ in front), *alphabet, *words, *(s for s, _ in back)],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
    }


def _merges() -> Iterator[tuple[str, str]]:
    """Yield merges without end: syllables, then words of one, two, three syllables."""
    yield from _SYLLABLES
    syllables = ["".join(pair) for pair in _SYLLABLES]
    words = ["Ġ"]
    while True:
        yield from product(words, syllables)
        words = [word + syllable for word, syllable in product(words, syllables)]
