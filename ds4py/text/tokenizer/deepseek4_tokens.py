"""The seven tokens that steer a DeepSeek V4, and its tokenizer section as ds4 reads it.

Owns: the markers, and the rule that they are found by their text
(docs/spec/deepseek4-model.md#keys, #vocabulary). Refuses to know: prompts, how text is cut.
Invariant: whatever a file says about types and special ids, the markers are tokens and no other
special token is ever spelled by a text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final

import numpy as np

from ds4py.errors import ModelError
from ds4py.gguf.kinds import MetaValue
from ds4py.gguf.metadata import Metadata
from ds4py.text.tokenizer.vocabulary import TokenType

ARCHITECTURE: Final = "deepseek4"
"""`general.architecture` of the models that these rules are for."""

_BAR: Final = "\uff5c"


class Marker(StrEnum):
    """A control token by its spelling, in the order of docs/spec/deepseek4-model.md#vocabulary."""

    BOS = f"<{_BAR}begin\u2581of\u2581sentence{_BAR}>"
    EOS = f"<{_BAR}end\u2581of\u2581sentence{_BAR}>"
    USER = f"<{_BAR}User{_BAR}>"
    ASSISTANT = f"<{_BAR}Assistant{_BAR}>"
    THINK = "<think>"
    THINK_END = "</think>"
    DSML = f"{_BAR}DSML{_BAR}"


PromptPart = Marker | str
"""A piece of a prompt: a `Marker` is its token, any other text is ordinary characters."""

# A reply may show these; the other markers are left out of its text.
_SHOWN: Final = frozenset({Marker.THINK, Marker.THINK_END, Marker.DSML})


def marked(text: str, markers: Collection[Marker] = tuple(Marker)) -> list[PromptPart]:
    """Cut a text of our own, or one that the model wrote, at the markers spelled in it.

    Args:
        text: Never a client's: its spelled markers would steer the model.
        markers: Those to look for.
    """
    pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text)
    return [Marker(piece) if piece in markers else piece for piece in pieces if piece]


def no_marker(marker: Marker) -> ModelError:
    """Return the refusal of a vocabulary that lacks a marker."""
    return ModelError(
        "metadata key tokenizer.ggml.tokens", got=f"no {marker}", expected=", ".join(Marker)
    )


def tokenizer_section(metadata: Mapping[str, MetaValue]) -> dict[str, MetaValue]:
    """Return the tokenizer section that ds4 sees in a DeepSeek V4 file.

    Only tokens and merges are read; everything else that a file may say is replaced. Special tokens
    other than the markers become `UNUSED`: no text spells them and no reply shows them.

    Raises:
        ModelError: There are no tokens, or a marker is not among them.
    """
    tokens = Metadata(metadata).require_strings("tokenizer.ggml.tokens")
    ids = {spelling: id_ for id_, spelling in enumerate(tokens)}
    types = np.full(len(tokens), TokenType.NORMAL, np.int32)
    types[[id_ for id_, spelling in enumerate(tokens) if _BAR in spelling]] = TokenType.UNUSED
    for marker in Marker:
        if marker not in ids:
            raise no_marker(marker)
        types[ids[marker]] = TokenType.USER_DEFINED if marker in _SHOWN else TokenType.CONTROL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": Metadata(metadata).get_strings("tokenizer.ggml.merges", []),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": ids[Marker.BOS],
        "tokenizer.ggml.eos_token_id": ids[Marker.EOS],
        "tokenizer.ggml.add_bos_token": False,
    }
