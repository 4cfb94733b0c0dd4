"""How much prompts have in common, and what becomes of a copy whose original changes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.contracts import ForwardRequest, SessionId
from ds4py.coordinator.prefix_sharing import choose_copy, common_prefix
from ds4py.errors import ClusterError
from ds4py.stage.executor import wait_for
from tests.clusters import DEADLINE, Cluster, cluster
from tests.fake_runner import FakeRunner, reference_logits
from tests.sockets import Background

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


class Source(NamedTuple):
    """Another session with what it shares."""

    session_id: SessionId
    n_shared: int

    def shares(self, wanted: Sequence[int], pipeline: object) -> int:
        return self.n_shared


class Forks:
    """A pipeline, as far as the choice looks at it."""

    def __init__(self, *, can_fork: bool = True):
        self.can_fork = can_fork


@pytest.mark.parametrize(
    ("n_wanted", "n_held", "shared", "expected"),
    [
        (200, 0, [], None),
        (200, 0, [63, 10], None),  # saves too little
        (200, 0, [64, 10], (1, 64)),
        (200, 0, [64, 90, 80], (2, 90)),  # the longest
        (200, 40, [100], None),  # it holds most of that itself
        (200, 36, [100], (1, 100)),
        (100, 0, [100], (1, 98)),  # two tokens are left to evaluate
        (65, 0, [65], None),
    ],
)
def test_the_longest_prefix_is_copied_if_that_saves_enough(
    n_wanted, n_held, shared, expected
) -> None:
    sources = [Source(SessionId(n), count) for n, count in enumerate(shared, 1)]
    assert choose_copy(Forks(), sources, range(n_wanted), n_held) == expected
    assert choose_copy(Forks(can_fork=False), sources, range(n_wanted), n_held) is None


def runner(c: Cluster) -> FakeRunner:
    assert c.coordinator.local is not None
    return c.coordinator.local.runner  # type: ignore[return-value]


def test_an_original_that_is_overwritten_in_the_last_moment_is_not_copied() -> None:
    with cluster([], local="0-5", n_ctx=128) as c, c.backend.lease([]) as session:
        session.sync(PROMPT)
        source, target = session.session_id, SessionId(9)
        pipeline = c.coordinator.ensure_pipeline(after_loss=False, cancelled=None)
        session.sync([96, *PROMPT[1:]])
        assert not pipeline.copy_prefix(source, target, PROMPT[:100], timeout=DEADLINE)
        assert runner(c).forked == []
        copied = [96, *PROMPT[1:100]]
        assert pipeline.copy_prefix(source, target, copied, timeout=DEADLINE)
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
        pipeline = c.coordinator.ensure_pipeline(after_loss=False, cancelled=None)
        with pytest.raises(ClusterError, match="no answer within 0 s"):
            pipeline.copy_prefix(session.session_id, SessionId(9), PROMPT[:100], timeout=0.0)
        resume.set()
        np.testing.assert_array_equal(running.result(), reference_logits([*PROMPT, 50]))
        assert c.coordinator.local is not None
        wait_for(c.coordinator.local.device.ask(lambda _: None), DEADLINE)
        assert runner(c).forked == []
