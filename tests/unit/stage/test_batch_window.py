"""For how many single tokens a stage waits, and for how long at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.stage.batch_window import MAX_SECONDS, BatchWindow, stages_alike


@pytest.mark.parametrize(
    ("n_sessions", "n_stages", "wanted"),
    [(1, 1, 1), (1, 3, 1), (2, 2, 1), (3, 2, 2), (8, 2, 4), (8, 1, 8), (8, 3, 3), (0, 2, 0)],
)
def test_each_stage_hopes_for_its_share_of_the_sessions(n_sessions, n_stages, wanted) -> None:
    window = BatchWindow(n_stages)
    for _ in range(3):
        window.ran(range(n_sessions), 0.1)
    assert window.target_batch == wanted


def test_sessions_that_have_ended_are_soon_not_hoped_for() -> None:
    window = BatchWindow(1)
    window.ran(range(8), 0.1)
    for _ in range(32):
        window.ran([3], 0.1)
    assert window.target_batch == 1


@given(st.floats(0, 10))
def test_the_wait_is_short_beside_a_batch(seconds) -> None:
    window = BatchWindow(2)
    assert window.max_wait == 0  # nothing is known
    window.ran([1], seconds)
    assert window.max_wait <= min(MAX_SECONDS, seconds / 4)


@pytest.mark.parametrize(
    ("n_layers", "n_own", "n_stages"), [(30, 30, 1), (30, 15, 2), (43, 14, 3), (6, 5, 1), (2, 9, 1)]
)
def test_the_own_layers_tell_how_many_stages_there_are(n_layers, n_own, n_stages) -> None:
    assert stages_alike(n_layers, n_own) == n_stages
