"""What a session asks of its stages: the same as if it looked at all its tokens in every step.

But it does not look at them: a decode step costs the same in any context.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.config import CoordinatorConfig
from ds4py.contracts import ForwardRequest, SessionId
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.session import ClusterSession
from ds4py.layer_range import LayerRange
from tests.clusters import SOCKETS, Cluster, cluster
from tests.fake_runner import reference_logits
from tools.benchmarks.null_runner import NullRunner, null_card

CHUNK, N_CTX = 4, 64


@dataclass
class PlainWay:
    """A session that compares and copies the whole timeline in every step."""

    can_rewind: bool
    tokens: list[int] = field(default_factory=list)
    evaluated: bool = False
    stages_hold_more: bool = False

    def sync(self, wanted: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Return the spans, position and tokens, that lead to a timeline."""
        if wanted == self.tokens and self.evaluated:
            return []
        pairs = zip(self.tokens, wanted, strict=False)
        keep = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(wanted))
        )
        keep = min(keep, len(wanted) - 1)
        if not self.can_rewind and (keep < len(self.tokens) or self.stages_hold_more):
            keep = 0
        self.tokens, self.evaluated, self.stages_hold_more = list(wanted), True, False
        starts = range(keep, len(wanted), CHUNK)
        return [(start, tuple(wanted[start : start + CHUNK])) for start in starts]

    def rewind(self, n_tokens: int) -> None:
        """Cut the timeline."""
        if n_tokens < len(self.tokens):
            self.tokens = self.tokens[:n_tokens]
            self.evaluated, self.stages_hold_more = False, True


@pytest.fixture(scope="module", params=[True, False], ids=["rewinds", "does not rewind"])
def route(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, list[ForwardRequest], bool]]:
    seen: list[ForwardRequest] = []

    def before(work: ForwardRequest) -> None:
        if work.hidden is None:
            seen.append(work)

    with cluster(
        ["0-2", "3-5"], n_ctx=N_CTX, can_rewind=request.param, before=before, chunk=CHUNK
    ) as c:
        c.wait_ready()
        yield c, seen, request.param


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("sync"), TOKENS),
        st.tuples(st.just("extend"), TOKENS),
        st.tuples(st.just("decode"), TOKENS),
        st.tuples(st.just("rewind"), st.integers(0, 30)),
    ),
    max_size=7,
)


@settings(deadline=None)
@given(steps=STEPS)
def test_each_step_sends_what_a_look_at_the_whole_timeline_would_send(route, steps) -> None:
    c, seen, can_rewind = route
    plain = PlainWay(can_rewind, stages_hold_more=True)
    with c.backend.lease([]) as session:
        session.rewind(0)
        for what, value in steps:
            if what == "rewind":
                plain.rewind(value)
                session.rewind(value)
                continue
            for wanted in timelines(plain.tokens, what, value):
                expected = plain.sync(wanted)
                seen.clear()
                first_request = c.coordinator._context.next_request_id() + 1
                logits = (
                    session.eval(wanted[-1]) if what == "decode" else session.sync(wanted).logits
                )
                np.testing.assert_array_equal(logits, reference_logits(wanted))
                assert [(work.pos0, work.tokens) for work in seen] == expected
                n_requests = c.coordinator._context.next_request_id() - first_request
                assert n_requests == len(expected), "some were refused"
                assert list(session.tokens) == wanted


def timelines(held: Sequence[int], what: str, tokens: Sequence[int]) -> Iterator[list[int]]:
    """The timelines that a step asks for, one after the other."""
    if what == "decode":
        for n in range(1, min(len(tokens), N_CTX - len(held)) + 1):
            yield [*held, *tokens[:n]]
    else:
        yield ([*held, *tokens] if what == "extend" else [*tokens])[:N_CTX]


def test_a_decode_step_copies_nothing_that_is_as_long_as_the_context() -> None:
    n_tokens = 30_000
    runner = NullRunner(LayerRange(0, 0, has_output=True), 1)
    runner.n_ctx = 2 * n_tokens  # type: ignore[misc]
    coordinator = Coordinator(
        null_card(1), runner.n_ctx, CoordinatorConfig(), SOCKETS, local=runner
    )
    session = ClusterSession(SessionId(1), coordinator, coordinator.config)
    session.sync([k % 256 for k in range(n_tokens)])
    session.eval(1)
    tracemalloc.start()
    try:
        session.eval(2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        coordinator.close()
    assert peak < 4 * n_tokens, "a list of the tokens takes twice as much"
    assert len(session.tokens) == n_tokens + 2
