"""The tokenizer section of a GGUF file as checked values.

Owns: reading `tokenizer.*` metadata, its defaults, and which tokens are special or end a turn.
Refuses to know: how text is cut into tokens. Invariant: a `Vocabulary` has one type (and, when
there are scores, one score) per token, and every id in it is a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, cast

import numpy as np

from ds4py.errors import ModelError
from ds4py.gguf.kinds import MetaValue
from ds4py.gguf.metadata import Metadata

MAX_TOKENS: Final = 1 << 22
"""More tokens than any model has; guards the tables that are built per token."""

END_OF_TURN: Final = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<turn|>",
        "<EOT>",
        "_<EOT>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001  (the full-width bars are the token's spelling)
    }
)
"""Spellings that end an assistant's turn in some family, whatever `eos_token_id` says."""

# Families whose converters leave `add_bos_token` out although the model was trained with BOS.
_BOS_BY_DEFAULT: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_EOS_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_PREFIX: Final = "tokenizer.ggml."
_SURROGATE: Final = re.compile("[\ud800-\udfff]")  # how bytes that are not UTF-8 are read


class TokenType(IntEnum):
    """What a token is for; numbers as in GGUF (and in a sentencepiece model)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Everything that a GGUF file says about its tokenizer.

    Args:
        model: `tokenizer.ggml.model`: "gpt2" (byte-level BPE), "llama" (SPM), or something else.
        pre: `tokenizer.ggml.pre`, the name of the pre-tokenizer; "" if the file has none.
        tokens: Spelling of each id.
        types: Type of each id.
        scores: Score of each id, or empty.
        merges: "left right" in order of rank, or empty.
        bos_id: Token that begins a sequence.
        unknown_id: Token for what cannot be spelled.
        eos_ids: Tokens that end a reply.
        add_bos: Whether a prompt must begin with `bos_id`.
        add_space_prefix: Whether text is tokenized as if a space stood before it.
        chat_template: Jinja source, if the file has one.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    bos_id: int | None
    unknown_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    add_space_prefix: bool
    chat_template: str | None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, MetaValue]) -> Vocabulary:
        """Read and check the tokenizer section.

        Raises:
            ModelError: A key is missing, of another type, of another length than the tokens, or
                names an id that no token has.
        """
        meta = Metadata(metadata)
        model = meta.require_str(_PREFIX + "model")
        pre = meta.get_str(_PREFIX + "pre", "")
        tokens = meta.require_strings(_PREFIX + "tokens")
        n_tokens = len(tokens)
        if not 1 <= n_tokens <= MAX_TOKENS:
            raise _refusal("tokens", f"{n_tokens} tokens", f"1 to {MAX_TOKENS}")
        types = _token_types(meta, n_tokens)
        named = (_token_id(meta, key, n_tokens) for key in _EOS_KEYS)
        eos_ids = {id_ for id_ in named if id_ is not None}
        is_spm = model == "llama"
        return cls(
            model=model,
            pre=pre,
            tokens=tokens,
            scores=_scores(meta, n_tokens),
            merges=meta.get_strings(_PREFIX + "merges", []),
            bos_id=_token_id(meta, "bos_token_id", n_tokens),
            unknown_id=_token_id(meta, "unknown_token_id", n_tokens),
            eos_ids=frozenset(eos_ids | _mark_end_of_turn(tokens, types)),
            types=types,
            add_bos=meta.get_bool(_PREFIX + "add_bos_token", is_spm or pre in _BOS_BY_DEFAULT),
            add_space_prefix=meta.get_bool(_PREFIX + "add_space_prefix", is_spm),
            chat_template=meta.get_str("tokenizer.chat_template", None),
        )

    def of_type(self, *types: TokenType) -> dict[str, int]:
        """Return spelling to id of all tokens of some types; of equal spellings the last counts."""
        wanted = frozenset(types)
        return {
            spelling: id_
            for id_, (spelling, type_) in enumerate(zip(self.tokens, self.types, strict=True))
            if type_ in wanted
        }


def is_text(spelling: str) -> bool:
    """Tell whether a spelling from a file was valid UTF-8, and so can occur in a text."""
    return spelling.isascii() or not _SURROGATE.search(spelling)


def _mark_end_of_turn(tokens: Sequence[str], types: list[int]) -> set[int]:
    """Find the tokens that end a turn and make them control tokens: some converters forget to."""
    found = {spelling: id_ for id_, spelling in enumerate(tokens) if spelling in END_OF_TURN}
    if "<|return|>" in found:
        found.pop("<|end|>", None)  # there it ends one of several messages of a turn
    for id_ in found.values():
        types[id_] = TokenType.CONTROL
    return set(found.values())


def _token_id(meta: Metadata, name: str, n_tokens: int) -> int | None:
    found = meta.get_int(_PREFIX + name, None)
    if found is not None and not 0 <= found < n_tokens:
        raise _refusal(name, found, f"a token id, 0 to {n_tokens - 1}")
    return found


def _token_types(meta: Metadata, n_tokens: int) -> list[int]:
    types = meta.get_ints(_PREFIX + "token_type", None)
    if types is None:
        return [TokenType.NORMAL] * n_tokens
    if len(types) != n_tokens:
        raise _refusal("token_type", f"{len(types)} entries", f"{n_tokens}, one per token")
    return cast(list[int], types.tolist())


def _scores(meta: Metadata, n_tokens: int) -> Sequence[float]:
    scores = meta.get_floats(_PREFIX + "scores", None)
    if scores is None:
        return ()
    if len(scores) != n_tokens:
        raise _refusal("scores", f"{len(scores)} entries", f"{n_tokens}, one per token")
    if not np.isfinite(scores).all():
        raise _refusal("scores", "a value that is not finite", "numbers")
    return cast(list[float], scores.tolist())


def _refusal(name: str, got: object, expected: object) -> ModelError:
    return ModelError(f"metadata key {_PREFIX}{name}", got=got, expected=expected)
