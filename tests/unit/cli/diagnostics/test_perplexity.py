"""Perplexity against a direct computation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from ds4py.cli.diagnostics.perplexity import Score, score
from ds4py.config import CoordinatorConfig
from ds4py.errors import CancelledError, CapacityError, ConfigError
from ds4py.runtime import Node, open_node
from tests.e2e.support import SOCKETS, engine
from tests.support.toys import toy_llama

TEXT = [3 + (7 * k * k + k) % 250 for k in range(40)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    path = toy_llama(tmp_path_factory.mktemp("model") / "toy.gguf", n_layers=2, n_ctx=64)
    with open_node(engine(path), CoordinatorConfig(n_sessions=1), SOCKETS, whole=True) as opened:
        yield opened


def scored(node: Node, ids: Sequence[int], *, stop_at: int = 1000) -> tuple[Score, list[int]]:
    told: list[int] = []
    found = score(
        node,
        ids,
        cancelled=lambda: len(told) >= stop_at,
        progress=lambda done, _: told.append(done),
    )
    return found, told


def test_each_token_behind_the_first_32_is_scored_once(node: Node) -> None:
    found, told = scored(node, TEXT)
    nll = 0.0
    for n in range(32, 40):
        with node.backend.lease(()) as session:
            logits = session.sync(TEXT[:n]).logits.astype(np.float64)
        nll += math.log(np.exp(logits).sum()) - logits[TEXT[n]]
    assert (found.n_tokens, found.n_scored) == (40, 8)
    assert found.nll == pytest.approx(nll, rel=1e-5)
    assert told[-1] == 40


def test_a_token_that_ends_answers_is_one_like_any_other(node: Node) -> None:
    (end, *_) = node.text.tokenizer.eos_ids
    ids = [*TEXT[:34], end, *TEXT[35:]]
    assert scored(node, ids)[0].n_scored == 8


def test_the_line() -> None:
    assert Score(40, 8, 16.0).line == (
        "tokens=40 scored=8 nll=16.000000 avg_nll=2.000000 ppl=7.389056"
    )
    assert Score(33, 1, math.inf).line == "tokens=33 scored=1 nll=inf avg_nll=inf ppl=inf"


def test_what_can_not_be_scored(node: Node) -> None:
    with pytest.raises(ConfigError, match="32 tokens, expected over 32"):
        scored(node, TEXT[:32])
    with pytest.raises(CapacityError, match="needed 65, available 64"):
        scored(node, [5] * 65)
    assert scored(node, [5] * 64)[0].n_scored == 32
    with pytest.raises(CancelledError, match="interrupted after 34 of 40 tokens"):
        scored(node, TEXT, stop_at=3)
