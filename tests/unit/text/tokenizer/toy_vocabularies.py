"""Small tokenizer sections for tests; `toys.bpe_metadata` makes the byte-level BPE one."""

from typing import Any

import numpy as np

from ds4py.gguf.kinds import MetaValue
from ds4py.text.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.support import toys

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPM_PIECES = (
    "\u2581", *"helowrd", "he", "ll", "hell", "hello", "\u2581hello", "\u2581w", "or", "ld",
    "\u2581wor", "\u2581world",
)  # fmt: skip


def metadata_of(
    tokens: list[tuple[str, int]], model: str, **values: MetaValue
) -> dict[str, MetaValue]:
    """A tokenizer section of (spelling, type) pairs; `values` are further keys."""
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [spelling for spelling, _ in tokens],
        "tokenizer.ggml.token_type": np.array([type_ for _, type_ in tokens], np.int32),
        **{f"tokenizer.ggml.{key}": value for key, value in values.items()},
    }


def spm_metadata(*more: tuple[str, int], **values: MetaValue) -> dict[str, MetaValue]:
    """A working SPM section: unknown 0, BOS 1, EOS 2, bytes 3-258, pieces from 259, then `more`."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [(piece, NORMAL) for piece in SPM_PIECES]
    tokens += more
    scores = -np.arange(len(tokens), dtype=np.float32)
    given: dict[str, MetaValue] = {
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return metadata_of(tokens, "llama", **{**given, **values})


def spm(*more: tuple[str, int], **values: MetaValue) -> Tokenizer:
    """The tokenizer of `spm_metadata`."""
    return load_tokenizer(spm_metadata(*more, **values))


def bpe_metadata(*more: tuple[str, int], **values: MetaValue) -> dict[str, MetaValue]:
    """The section of `toys.bpe_metadata` with more tokens and other values."""
    section: dict[str, Any] = dict(toys.bpe_metadata())
    tokens, types = section["tokenizer.ggml.tokens"], section["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, np.ndarray)
    section["tokenizer.ggml.tokens"] = [*tokens, *(spelling for spelling, _ in more)]
    section["tokenizer.ggml.token_type"] = np.array(
        [*types.tolist(), *(type_ for _, type_ in more)], np.int32
    )
    return {**section, **{f"tokenizer.ggml.{key}": value for key, value in values.items()}}


def bpe(*more: tuple[str, int], **values: MetaValue) -> Tokenizer:
    """The tokenizer of `bpe_metadata`."""
    return load_tokenizer(bpe_metadata(*more, **values))
