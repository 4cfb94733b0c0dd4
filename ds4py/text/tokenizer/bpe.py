"""Byte-level BPE from a GGUF vocabulary, computed by the `tokenizers` library.

Owns: turning tokens, merges and types into a `tokenizers` object, and ids back into bytes. Refuses
to know: where the vocabulary came from, special tokens in prompts, BOS. Invariant: text that
contains no user-defined token is split and merged as the named family does it.
"""

from __future__ import annotations

from typing import Final

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from ds4py.errors import ModelError
from ds4py.text.tokenizer.markers import Markers
from ds4py.text.tokenizer.pretokenize import SplitRule, split_rule
from ds4py.text.tokenizer.vocabulary import TokenType, Vocabulary, is_text


def _byte_alphabet() -> dict[str, int]:
    """Map GPT-2's printable stand-ins to byte values (deepseek4-model.md#byte-alphabet)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET: Final = _byte_alphabet()
"""Character of a byte-level spelling to the byte it stands for."""


class BpeCodec:
    """Byte-level BPE; safe to use from several threads.

    Args:
        vocabulary: A vocabulary whose model is "gpt2".

    Raises:
        ModelError: There are no merges, or one of them names something that is no token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._spellings = vocabulary.tokens
        self._types = vocabulary.types
        self._user_defined = Markers(vocabulary.of_type(TokenType.USER_DEFINED))
        rule = split_rule(vocabulary.pre)
        self._literal = rule.literal
        self._tokenizer = _build(vocabulary, rule)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text that contains no control tokens."""
        if self._literal and not special:
            return self._plain(text)
        ids: list[int] = []
        for piece in self._user_defined.cut(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._plain(piece)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Return what a token that is not special stands for."""
        spelling = self._spellings[token]
        if self._types[token] != TokenType.USER_DEFINED:
            try:
                return bytes(BYTE_ALPHABET[character] for character in spelling)
            except KeyError:
                pass  # not a byte-level spelling: it stands for itself
        return spelling.encode("utf-8", "surrogateescape")

    def _plain(self, text: str) -> list[int]:
        # a batch, because that lets other threads run meanwhile
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids


def _build(vocabulary: Vocabulary, rule: SplitRule) -> HfTokenizer:
    # Control tokens stay out, so that no text and no merge can become one.
    ids = {
        spelling: id_
        for id_, (spelling, type_) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, strict=True)
        )
        if type_ not in (TokenType.CONTROL, TokenType.UNKNOWN) and is_text(spelling)
    }
    merges = _merges(vocabulary, ids)
    tokenizer = HfTokenizer(models.BPE(ids, merges, ignore_merges=rule.whole_pieces))
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    normalizer = rule.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def _merges(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    if not vocabulary.merges:
        raise ModelError(
            "metadata key tokenizer.ggml.merges", got="nothing", expected="the BPE merges"
        )
    merges = []
    for rank, merge in enumerate(vocabulary.merges):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(
                f"metadata key tokenizer.ggml.merges, entry {rank}",
                got=f"{merge!a:.80}",
                expected="two tokens, separated by a space, that make a third",
            )
        merges.append((left, right))
    return merges
