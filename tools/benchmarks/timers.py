"""How long a session takes for a prompt and for single tokens.

Owns: what a job is, its random prompts. Refuses to know: processes, where the layers are.
Invariant: each prompt is new, so nothing of it is cached anywhere.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Final, Literal

from ds4py.contracts import Backend

DECODE_CONTEXT: Final = 128
"""Tokens that stand before those that a decode job times."""

_FIRST_WORD: Final = 10  # below are special tokens


@dataclass(frozen=True, slots=True)
class TimedJob:
    """Something to time.

    Args:
        what: A prompt of `n` tokens, or `n` single tokens behind `DECODE_CONTEXT` others.
        n: Tokens that are timed.
    """

    what: Literal["prefill", "decode"]
    n: int

    def __str__(self) -> str:
        return f"{self.what} {self.n}"

    @classmethod
    def parse(cls, text: str) -> TimedJob:
        """Read what `str` has written."""
        what, n = text.split()
        return cls("prefill" if what == "prefill" else "decode", int(n))


def random_tokens(n: int, n_vocab: int) -> list[int]:
    """Return token ids that are no special tokens of a usual vocabulary."""
    return [random.randrange(_FIRST_WORD, n_vocab) for _ in range(n)]


def timed_job(backend: Backend, job: TimedJob) -> float:
    """Do a job and return the seconds it took."""
    n_vocab = backend.card.n_vocab
    n_before = 0 if job.what == "prefill" else DECODE_CONTEXT
    before, timed = random_tokens(n_before, n_vocab), random_tokens(job.n, n_vocab)
    with backend.lease(before or timed) as session:
        session.rewind(0)
        if before:
            session.sync(before)
        start = time.perf_counter()
        if before:
            for token in timed:
                session.eval(token)
        else:
            session.sync(timed)
        return time.perf_counter() - start
