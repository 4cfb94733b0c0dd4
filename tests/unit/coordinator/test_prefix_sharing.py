"""How much prompts have in common, and what becomes of a copy whose original changes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.contracts import ForwardRequest, SessionId
from ds4py.coordinator.prefix_sharing import PrefixSharing, common_prefix
from ds4py.coordinator.session import ClusterSession
from ds4py.errors import ClusterError
from tests.support.clusters import DEADLINE, Cluster, cluster, wait_until
from tests.support.fake_runner import FakeRunner, reference_logits
from tests.support.sockets import Background

PROMPT = [(7 * k * k + 3 * k) % 97 for k in range(120)]


@given(
    st.integers(0, 800), st.lists(st.integers(0, 1), max_size=3), st.lists(st.integers(0, 1)),
    st.booleans(),
)  # fmt: skip
def test_the_common_prefix_ends_at_the_first_difference(n_common, a_end, b_end, as_tuple) -> None:
    head = [k * k % 91 for k in range(n_common)]
    a, b = [*head, *a_end], [*head, *b_end]
    naive = 0
    while naive < min(len(a), len(b)) and a[naive] == b[naive]:
        naive += 1
    assert common_prefix(tuple(a) if as_tuple else a, b) == naive
    assert common_prefix(b, a) == naive


class FickleDonor:
    """A session that tells of its tokens, and is cut before they are copied."""

    def __init__(self, session: ClusterSession):
        self.session_id = session.session_id
        self._session = session

    def shares(self, wanted: Sequence[int], route: object) -> int:
        n_shared = self._session.shares(wanted, route)  # type: ignore[arg-type]
        self._session.sync([96, *PROMPT[1:]])
        return n_shared

    def holds(self, head: Sequence[int]) -> bool:
        return self._session.holds(head)


def runner(c: Cluster) -> FakeRunner:
    assert c.coordinator.local is not None
    return c.coordinator.local.runner  # type: ignore[return-value]


def test_an_original_that_is_overwritten_in_the_last_moment_is_not_copied() -> None:
    with cluster([], local="0-5", n_ctx=128) as c, c.backend.lease([]) as session:
        session.sync(PROMPT)
        route = c.coordinator.ensure_route(after_loss=False, cancelled=None)
        heads = PrefixSharing(SessionId(9), DEADLINE)
        donors = [FickleDonor(session)]
        assert heads.copy_prefix(route, donors, [*PROMPT[:100], 1, 2], 0) == 0  # type: ignore[list-item]
        assert runner(c).forked == []
        assert heads.copy_prefix(route, [session], [96, *PROMPT[1:100], 1, 2], 0) == 100
        assert runner(c).forked == [100]


def test_a_copy_that_nobody_waits_for_any_more_is_not_made() -> None:
    reached, resume = threading.Event(), threading.Event()

    def before(work: ForwardRequest) -> None:
        if work.tokens == (50,):
            reached.set()
            assert resume.wait(DEADLINE)

    with cluster([], local="0-5", n_ctx=128, before=before) as c, c.backend.lease([]) as session:
        session.sync(PROMPT)
        running = Background(lambda: session.eval(50))
        assert reached.wait(DEADLINE)
        route = c.coordinator.ensure_route(after_loss=False, cancelled=None)
        with pytest.raises(ClusterError, match="no answer within 0 s"):
            PrefixSharing(SessionId(9), 0.0).copy_prefix(route, [session], [*PROMPT[:100], 1, 2], 0)
        resume.set()
        np.testing.assert_array_equal(running.result(), reference_logits([*PROMPT, 50]))
        assert c.coordinator.local is not None
        c.coordinator.local.call(lambda _: None, timeout=DEADLINE)
        assert runner(c).forked == []
        wait_until(lambda: runner(c).length(SessionId(9)) is None, "nothing was begun")
