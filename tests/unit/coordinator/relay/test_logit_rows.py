"""Logits of several rows of a prompt, wherever the output head is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.contracts import SessionId
from ds4py.coordinator.chunked_prefill import cut_chunks
from ds4py.wire.messages import encode
from ds4py.wire.prefix_hash import INIT
from tests.support.by_hand import by_hand
from tests.support.clusters import Cluster, cluster
from tests.support.fake_runner import reference_logits
from tests.support.peers import logits_for, take_work
from tests.support.sockets import Background

PROMPT = [5, 80, 3, 3, 41, 9, 77, 12, 60, 1]
ROUTES = {
    "one process": ([], {"local": "0-5"}),
    "head on the last worker": (["2-3", "4-5"], {"local": "0-1"}),
    "workers only": (["0-2", "3-5"], {}),
    "head on the coordinator": (["1-2", "3:5"], {"local": "0:0", "head": True}),
}


@pytest.fixture(scope="module", params=ROUTES)
def served(request):
    workers, options = ROUTES[request.param]
    with cluster(workers, **options) as c:
        c.wait_ready()
        yield c


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_are_those_of_prompts_that_end_there(served: Cluster, data) -> None:
    chunk = data.draw(st.integers(1, len(PROMPT)))
    n_logits = data.draw(st.integers(1, len(PROMPT)))
    window = data.draw(st.integers(1, 4))
    pipeline = served.coordinator.ensure_pipeline(after_loss=False, cancelled=None)
    reached: list[int] = []
    rows = pipeline.run(
        SessionId(7),
        cut_chunks(PROMPT, 0, INIT, chunk=chunk, n_logits=n_logits),
        window=window,
        completed=lambda end, _: reached.append(end),
        cancelled=None,
    )
    ends = range(len(PROMPT) - n_logits + 1, len(PROMPT) + 1)
    np.testing.assert_array_equal(rows, [reference_logits(PROMPT[:end]) for end in ends])
    assert reached[-1] == len(PROMPT)
    assert reached == sorted(set(reached))


def test_rows_stand_in_the_order_of_the_prompt_whatever_comes_first() -> None:
    with by_hand() as (c, peer, session):
        pipeline = c.coordinator.ensure_pipeline(after_loss=False, cancelled=None)
        chunks = cut_chunks(PROMPT[:6], 0, INIT, chunk=2, n_logits=5)
        asking = Background(
            lambda: pipeline.run(
                session.session_id, chunks, window=5, completed=lambda *_: None, cancelled=None
            )
        )
        works = [take_work(peer) for _ in range(5)]  # the first two tokens, then each alone
        assert [work.pos0 for work in works] == [0, 2, 3, 4, 5]
        for work in reversed(works):
            peer.send(encode(logits_for(work)))
        assert [row[0] for row in asking.result()] == [work.request_id for work in works]
