"""A small vocabulary with everything that is awkward about real ones."""

from collections.abc import Iterable

import numpy as np

from ds4py.generation.grammar import Constraint
from ds4py.generation.sampling import F32

PIECES = [
    *(bytes([byte]) for byte in range(256)),
    *(b'{"', b'":', b'"}', b'": "', b"}}", b"[]", b'",', b"ab", b"true", b"  ", b"\n  "),
    *("é".encode(), "日".encode(), "日".encode()[:2], "本".encode()[1:], b'"\xc3', b"\xa9"),
    *(b"ab", b"", b"12", b"-1"),  # one piece twice, and one that no token has
]
MARK = len(PIECES)  # a control token
EOS = MARK + 1
OTHER_EOS = MARK + 2
N_VOCAB = MARK + 3


class Toy:
    """A `grammar.Vocabulary` over `PIECES`.

    Args:
        pieces: What its ordinary tokens stand for.
        adds_space: Texts are cut as some codecs do: with a space in front.
        eos_ids: Tokens that end a reply.
    """

    def __init__(
        self,
        pieces: list[bytes] = PIECES,
        *,
        adds_space: bool = False,
        eos_ids: Iterable[int] = (EOS, OTHER_EOS),
    ) -> None:
        self._pieces = pieces
        self._adds_space = adds_space
        self.eos_ids = frozenset(eos_ids)
        self.special_ids = {"<mark>": MARK, "<end>": EOS}
        self.n_vocab = N_VOCAB
        self.n_reads = 0

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        self.n_reads += 1
        if token >= MARK:
            return [b"<mark>", b"<end>", b"<other end>"][token - MARK] if special else b""
        return self._pieces[token]

    def encode(self, text: str, *, special: bool) -> list[int]:
        assert not special
        return list((" " * self._adds_space + text).encode())

    def text(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self.token_bytes(token) for token in tokens)


def allowed(constraint: Constraint, n_logits: int = N_VOCAB) -> set[int]:
    return set(
        np.flatnonzero(np.isfinite(constraint.mask(np.zeros(n_logits, np.float32)))).tolist()
    )


def noise(rng: np.random.Generator, n_logits: int = N_VOCAB) -> F32:
    return rng.normal(0, 3, n_logits).astype(np.float32)
