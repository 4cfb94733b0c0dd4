"""The tokenizer that a GGUF file describes: text to token ids, ids to bytes.

Owns: the choice of the codec, special tokens in a text, BOS, and ids out of range. Refuses to know:
files, models, chat formats. Invariant: a `Tokenizer` never changes after it was built, so any
number of threads may use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from ds4py.errors import ModelError
from ds4py.gguf.kinds import MetaValue
from ds4py.text.tokenizer import deepseek4_tokens
from ds4py.text.tokenizer.bpe import BpeCodec
from ds4py.text.tokenizer.markers import Markers
from ds4py.text.tokenizer.spm import SpmCodec
from ds4py.text.tokenizer.vocabulary import TokenType, Vocabulary, is_text

_HIDDEN: Final = (TokenType.CONTROL, TokenType.UNKNOWN)
_SILENT: Final = frozenset({*_HIDDEN, TokenType.UNUSED})


class Codec(Protocol):
    """What differs between the families of tokenizers."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text that contains no control tokens."""

    def token_bytes(self, token: int) -> bytes:
        """Return what a token that is not special stands for."""


_CODECS: Final[dict[str, type[BpeCodec] | type[SpmCodec]]] = {"gpt2": BpeCodec, "llama": SpmCodec}


class Tokenizer:
    """Token ids of one model. Immutable; safe to use from several threads.

    Args:
        vocabulary: What the file says.
        codec: The family's way of cutting text.

    Attributes:
        n_vocab: Number of tokens.
        bos_id: Token that begins a sequence, if there is one.
        eos_ids: Tokens that end a reply.
        add_bos: Whether a prompt must begin with `bos_id`.
        chat_template: Jinja source, if the file has one.
        special_ids: Spelling to id of the control tokens.
    """

    def __init__(self, vocabulary: Vocabulary, codec: Codec) -> None:
        self._spellings = vocabulary.tokens
        self._types = vocabulary.types
        self._codec = codec
        special = vocabulary.of_type(*_HIDDEN)
        self._markers = Markers(special)
        self.n_vocab: Final = len(vocabulary.tokens)
        self.bos_id: Final = vocabulary.bos_id
        self.eos_ids: Final = vocabulary.eos_ids
        self.add_bos: Final = vocabulary.add_bos and vocabulary.bos_id is not None
        self.chat_template: Final = vocabulary.chat_template
        self.special_ids: Final[Mapping[str, int]] = MappingProxyType(special)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text; nothing is added at either end.

        Args:
            text: Any text. Halves of surrogate pairs become U+FFFD. Bytes that are no UTF-8 have no
                way in: anyone who has some decodes them first, with replacement.
            special: Whether control tokens spelled in the text become those tokens; otherwise they
                are ordinary characters. User-defined tokens are recognised either way, except for
                families that say otherwise (`SplitRule.literal`).
        """
        text = _well_formed(text)
        if not special:
            return self._codec.encode(text, special=False)
        ids: list[int] = []
        for piece in self._markers.cut(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._codec.encode(piece, special=True)
        return ids

    def prompt_ids(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a whole prompt: `encode`, with BOS in front if the model wants it.

        A BOS that the text already begins with is not doubled.
        """
        ids = self.encode(text, special=special)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return what a token adds to a text; it may be half of a UTF-8 character.

        Args:
            token: Token id; ids that no token has add nothing.
            special: Whether control tokens are shown as they are spelled instead of left out.
        """
        if not 0 <= token < self.n_vocab:
            return b""
        if self._types[token] in _SILENT:
            spelling = self._spellings[token].encode("utf-8", "surrogateescape")
            return spelling if special else b""
        return self._codec.token_bytes(token)

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> bytes:
        """Return what the tokens add to a text, one after another."""
        return b"".join(self.token_bytes(token, special=special) for token in tokens)


def load_tokenizer(metadata: Mapping[str, MetaValue]) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Raises:
        ModelError: The section is missing, inconsistent, or of a kind that ds4py does not know.
    """
    if metadata.get("general.architecture") == deepseek4_tokens.ARCHITECTURE:
        metadata = deepseek4_tokens.tokenizer_section(metadata)
    vocabulary = Vocabulary.from_metadata(metadata)
    codec = _CODECS.get(vocabulary.model)
    if codec is None:
        raise ModelError(
            "metadata key tokenizer.ggml.model",
            got=repr(vocabulary.model),
            expected=" or ".join(map(repr, _CODECS)),
        )
    return Tokenizer(vocabulary, codec(vocabulary))


def _well_formed(text: str) -> str:
    """Join surrogate pairs; replace lone halves, which no UTF-8 can express, by U+FFFD."""
    if is_text(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
